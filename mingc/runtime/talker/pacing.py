"""Pacing of speech: when the next patch of a stream may be launched, and which streams come first.

Speech for a listener is generated only a few patches ahead of its playback, which leaves device time to others. Plain
Python; imports no torch. All times are seconds of one clock, which the caller reads.

The talker loop calls it under its lock. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

ListenerState = Literal["starting", "playing", "late", "paused"]
LISTENER_STATES: tuple[ListenerState, ...] = ("starting", "playing", "late", "paused")


@dataclass(slots=True, eq=False)
class _Stream:
    """Speech of one request.

    Attributes:
        is_live: whether it is played while it is generated.
        arrived_at: time of its first segment.
        launched_at: time of its last launch.
        started_at: when playback started, shifted by every stall since.
        num_samples: how many samples of all segments are ready.
        in_flight: how many patches are launched and not ready.
        was_paused: whether its client has not read since the last patch; a late patch then does not count as an
            underrun.
        earliest: when its next patch may be launched. Stored, because every launch looks at all streams.
    """

    is_live: bool
    arrived_at: float | None = None
    launched_at: float | None = None
    started_at: float | None = None
    num_samples: int = 0
    in_flight: int = 0
    was_paused: bool = False
    earliest: float = -math.inf


class SpeechPacing:
    """Playback clocks of all streams, and the order of their patches.

    The audio of a live stream is assumed to be played from the moment at which its first samples are sent, without gaps
    between segments. A patch may be launched when at most `lead` patches remain to be played before it. A launch waits
    up to one patch so that streams share a batch, because a batch costs little more than one row. The first `lead`
    patches of a stream are never delayed.

    Args:
        lead: patches that may be ready ahead of the playback position; 0: no stream is delayed.
        patch_samples: samples of a patch.
        sample_rate: samples per second.
    """

    def __init__(self, lead: int, *, patch_samples: int, sample_rate: int) -> None:
        self._lead = lead
        self._patch_samples = patch_samples
        self._sample_rate = sample_rate
        self._patch_s = patch_samples / sample_rate
        # How long a launch waits for others; at least one patch of the lead must remain for generating it.
        self._slack_s = self._patch_s * min(1.0, (lead - 1) / 2)
        self._streams: dict[int, _Stream] = {}
        self.num_underruns = 0  # how many patches were ready after their playback time

    def release(self) -> None:
        """Delay no stream from now on."""
        self._lead = 0
        for each in self._streams.values():
            each.earliest = -math.inf

    def open(self, stream: int, *, is_live: bool) -> None:
        """Add a stream; only live streams are ever delayed."""
        self._streams[stream] = _Stream(is_live)

    def close(self, stream: int) -> None:
        """Remove a stream; does nothing if it is unknown."""
        self._streams.pop(stream, None)

    def arrive(self, stream: int, now: float) -> None:
        """Record that a segment of the stream has arrived."""
        each = self._streams[stream]
        if each.arrived_at is None:
            each.arrived_at = now

    def begin_playback(self, stream: int, now: float) -> None:
        """Record that the first audio of the stream is sent. Does nothing for a later call or an unknown stream."""
        each = self._streams.get(stream)
        if each is not None and each.started_at is None:
            each.started_at = now
            each.earliest = self._earliest(each)

    def launch(self, streams: Iterable[int], now: float) -> None:
        """Record that the next patch of each stream was launched."""
        for stream in streams:
            each = self._streams[stream]
            each.launched_at = now
            each.in_flight += 1
            each.earliest = self._earliest(each)

    def deliver(self, stream: int, num_samples: int, now: float) -> None:
        """Record that the oldest patch in flight of the stream is ready, with `num_samples`."""
        each = self._streams[stream]
        if each.is_live and each.started_at is not None:
            stalled_s = now - self._played_at(each, each.started_at)
            if stalled_s > 0.0:
                each.started_at += stalled_s  # a player waits for the patch and continues from there
                self.num_underruns += not each.was_paused
        each.was_paused = False
        each.num_samples += num_samples
        each.in_flight -= 1
        each.earliest = self._earliest(each)

    def end_segment(self, stream: int) -> None:
        """Record that a segment of the stream has ended; its surplus patches in flight are discarded."""
        each = self._streams[stream]
        each.in_flight = 0
        each.earliest = self._earliest(each)

    def pause(self, stream: int) -> None:
        """Record that the client of the stream does not read."""
        self._streams[stream].was_paused = True

    def unread(self, streams: Iterable[int]) -> set[int]:
        """The streams that are delayed because none of their patches has been sent yet."""
        delayed = [stream for stream in streams if self._streams[stream].earliest == math.inf]
        return {stream for stream in delayed if self._streams[stream].num_samples > 0}

    def admissible(self, waiting: Iterable[int], now: float) -> list[int]:
        """Streams that wait for a slot and whose next patch may be launched, most urgent first."""
        if not self._lead:
            return list(waiting)
        streams = [stream for stream in waiting if self._streams[stream].earliest <= now]
        return sorted(streams, key=lambda stream: self._deadline(self._streams[stream]))

    def due(self, running: Iterable[int], now: float, *, is_crowded: bool = False) -> list[int]:
        """Running streams whose patch is to be launched now, earliest playback first.

        `is_crowded`: another stream waits for a slot. Then no stream is delayed, so that slots become free.
        """
        found = [stream for stream in running if is_crowded or self._streams[stream].earliest <= now]
        # A patch is launched at the latest after the slack, if no other patch is launched before.
        if not is_crowded and all(self._streams[stream].earliest + self._slack_s > now for stream in found):
            return []
        return sorted(found, key=lambda stream: self._deadline(self._streams[stream]))

    def next_time(
        self, running: Iterable[int], waiting: Iterable[int], now: float, admitted_at: float | None = None
    ) -> float:
        """When the first of the streams that are delayed now becomes due; inf if none does.

        `admitted_at`: time of the last `admissible`, if not `now`. Streams of `waiting` that became due since then
        count as well.
        """
        streams, slack_s = self._streams, self._slack_s
        times = [time for stream in running if (time := streams[stream].earliest + slack_s) > now]
        since = now if admitted_at is None else admitted_at
        times += [time for stream in waiting if (time := streams[stream].earliest) > since]
        return min(times, default=math.inf)

    def listeners(self, now: float) -> Mapping[str, int]:
        """Number of live streams by state: nothing sent yet; audio left to play; none left; not read."""
        count: dict[str, int] = dict.fromkeys(LISTENER_STATES, 0)
        for each in self._streams.values():
            if each.is_live:
                count[self._state(each, now)] += 1
        return count

    def _state(self, each: _Stream, now: float) -> ListenerState:
        if each.started_at is None:
            return "starting"
        if each.was_paused:
            return "paused"
        return "playing" if now < self._played_at(each, each.started_at) else "late"

    def _played_at(self, each: _Stream, started_at: float) -> float:
        """When all samples that are ready will have been played."""
        return started_at + each.num_samples / self._sample_rate

    def _deadline(self, each: _Stream) -> float:
        """When the next patch must be played. A new stream's is its arrival, before all streams that are on time.

        Speech that is not live has the deadline of a listener whose patch has just become due.
        """
        if each.launched_at is None:
            return -math.inf if each.arrived_at is None else each.arrived_at
        if not each.is_live:
            return each.launched_at + self._lead * self._patch_s
        before = each.num_samples + each.in_flight * self._patch_samples
        start = each.launched_at if each.started_at is None else each.started_at
        return start + before / self._sample_rate

    def _earliest(self, each: _Stream) -> float:
        """When the next patch may be launched."""
        if not each.is_live or not self._lead or each.launched_at is None:
            return -math.inf
        if each.started_at is None:
            before = each.num_samples + each.in_flight * self._patch_samples
            return -math.inf if before <= (self._lead - 1) * self._patch_samples else math.inf
        return self._deadline(each) - self._lead * self._patch_s
