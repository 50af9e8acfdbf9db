"""Pacing of speech: when the next patch of a stream may be launched, and which streams come first.

Speech for a listener is generated only a few patches ahead of its playback, which leaves device time to others. Plain
Python; imports no torch. All times are seconds of one clock, which the caller reads.

The talker loop calls it under its lock. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

ListenerState = Literal["starting", "playing", "late", "paused"]
LISTENER_STATES: tuple[ListenerState, ...] = ("starting", "playing", "late", "paused")
_PATIENCE_S = 3.0  # speech that has waited so long takes part in the next patch beside listeners
_MARGIN = 1.5  # a patch may take so many times its estimate: the model's other stages share the device


@dataclass(slots=True, eq=False)
class _Stream:
    """Speech of one request.

    Attributes:
        is_live: whether it is played while it is generated.
        lead: patches that may be ready ahead of its playback; 0: no limit.
        priority: streams with a lower one come first.
        slack_s: how long a launch waits for others; at least one patch of the lead must remain for generating it.
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
    lead: int
    priority: int
    slack_s: float
    arrived_at: float | None = None
    launched_at: float | None = None
    started_at: float | None = None
    num_samples: int = 0
    in_flight: int = 0
    was_paused: bool = False
    earliest: float = -math.inf

    @property
    def is_starting(self) -> bool:
        """Whether a listener waits for the first patch."""
        return self.is_live and self.arrived_at is not None and self.launched_at is None


class SpeechPacing:
    """Playback clocks of all streams, and the order of their patches.

    The audio of a live stream is assumed to be played from the moment at which its first samples are sent, without gaps
    between segments. A patch may be launched when at most `lead` patches remain to be played before it. A launch waits
    up to one patch so that streams share a batch, because a batch costs little more than one row. The first `lead`
    patches of a stream are never delayed.

    Other streams are jobs. They share patches with listeners, unless a listener would be late if it waited for so large
    a patch: then they yield, except one that has waited for `_PATIENCE_S`. No stream yields to a lower priority.

    Args:
        lead: patches that may be ready ahead of the playback position, unless a stream has its own; 0: no stream is
            delayed.
        patch_samples: samples of a patch.
        sample_rate: samples per second.
    """

    def __init__(self, lead: int, *, patch_samples: int, sample_rate: int) -> None:
        self._lead = lead
        self._patch_samples = patch_samples
        self._sample_rate = sample_rate
        self._patch_s = patch_samples / sample_rate
        self._streams: dict[int, _Stream] = {}
        self._num_live = self._num_prioritized = 0
        self.num_underruns = 0  # how many patches were ready after their playback time

    def release(self) -> None:
        """Delay no stream from now on."""
        self._lead = 0
        for each in self._streams.values():
            each.lead, each.earliest = 0, -math.inf

    def open(self, stream: int, *, is_live: bool, lead: int | None = None, priority: int = 0) -> None:
        """Add a stream; only live streams are ever delayed. `lead`: None: the lead of all."""
        lead = self._lead if lead is None else lead
        slack_s = self._patch_s * min(1.0, (lead - 1) / 2)
        self._streams[stream] = _Stream(is_live, lead, priority, slack_s)
        self._num_live += is_live
        self._num_prioritized += priority != 0

    def close(self, stream: int) -> None:
        """Remove a stream; does nothing if it is unknown."""
        each = self._streams.pop(stream, None)
        if each is not None:
            self._num_live -= each.is_live
            self._num_prioritized -= each.priority != 0

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
        """Streams that wait for a slot and whose next patch may be launched, most urgent first.

        Jobs come after listeners, and while a listener waits for its first patch not at all, because their prompts
        would delay it.
        """
        streams = self._streams
        ready = [stream for stream in waiting if streams[stream].earliest <= now]
        # Without pacing in order of arrival.
        deadlines = {stream: self._deadline(streams[stream]) if self._lead else 0.0 for stream in ready}
        if not self._num_prioritized and self._num_live in (0, len(streams)):
            return sorted(ready, key=deadlines.__getitem__)
        first = {
            stream for stream in ready if streams[stream].is_live or self._is_overdue(streams[stream], now)
        }
        if len(first) < len(ready):
            starting = min((each.priority for each in streams.values() if each.is_starting), default=math.inf)
            ready = [each for each in ready if each in first or streams[each].priority < starting]
        return sorted(
            ready,
            key=lambda each: (self._rank(streams[each], now), each not in first, deadlines[each]),
        )

    def due(
        self,
        running: Sequence[int],
        now: float,
        *,
        is_crowded: bool = False,
        patch_s: Callable[[int], float] = lambda rows: 0.0,
    ) -> list[int]:
        """Running streams whose patch is to be launched now, earliest playback first.

        `is_crowded`: another stream waits for a slot. Then no stream is delayed, so that slots become free. `patch_s`:
        how long a patch of so many rows takes, 0 if unknown; equal for all sizes of one batch bucket, and for more rows
        than fit into a patch.
        """
        streams = self._streams
        found = [stream for stream in running if is_crowded or streams[stream].earliest <= now]
        # A patch is launched at the latest after the slack, if no other patch is launched before.
        if not is_crowded and all(
            (each := streams[stream]).earliest + each.slack_s > now for stream in found
        ):
            return []
        deadlines = {stream: self._deadline(streams[stream]) for stream in found}
        if self._num_prioritized:
            order = sorted(found, key=lambda each: (self._rank(streams[each], now), deadlines[each]))
        else:
            order = sorted(found, key=deadlines.__getitem__)
        all_s = _MARGIN * patch_s(len(order)) if self._num_live else 0.0
        return self._beside_listeners(order, running, now, all_s, patch_s) if all_s else order

    def _beside_listeners(
        self,
        order: list[int],
        running: Sequence[int],
        now: float,
        all_s: float,
        patch_s: Callable[[int], float],
    ) -> list[int]:
        """The streams of `order`, without as many as would make a listener late. `all_s`: seconds of all together."""
        streams = self._streams
        deadlines = {each: self._deadline(streams[each]) for each in running if streams[each].is_live}
        # A listener that arrives now waits at most for one patch of playback.
        first = min(deadlines.values(), default=math.inf)
        if all_s <= min(self._patch_s, first - now):
            return order
        urgent = {each for each, deadline in deadlines.items() if deadline - now < all_s}.intersection(order)
        best = min((streams[stream].priority for stream in urgent), default=-math.inf)
        chosen = [stream for stream in order if stream in urgent or streams[stream].priority < best]
        rest = [stream for stream in order if stream not in urgent and streams[stream].priority >= best]
        if not rest:
            return chosen
        if not chosen or self._is_overdue(streams[rest[0]], now):
            chosen.insert(0, rest.pop(0))
        room = 0.0 if urgent else min(self._patch_s, first - now)
        for stream in rest:
            if _MARGIN * patch_s(len(chosen) + 1) > max(room, _MARGIN * patch_s(len(chosen))):
                break
            chosen.append(stream)
        return chosen

    def next_time(
        self, running: Iterable[int], waiting: Iterable[int], now: float, admitted_at: float | None = None
    ) -> float:
        """When the first of the streams that are delayed now becomes due; inf if none does.

        `admitted_at`: time of the last `admissible`, if not `now`. Streams of `waiting` that became due since then
        count as well.
        """
        streams = self._streams
        times = [
            time for stream in running if (time := (each := streams[stream]).earliest + each.slack_s) > now
        ]
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

    def _is_overdue(self, each: _Stream, now: float) -> bool:
        """Whether the stream has waited for a patch for very long."""
        since = each.arrived_at if each.launched_at is None else each.launched_at
        return since is not None and now - since > _PATIENCE_S

    def _rank(self, each: _Stream, now: float) -> float:
        """The priority; overdue streams come first, so that none starves."""
        return -math.inf if self._is_overdue(each, now) else each.priority

    def _deadline(self, each: _Stream) -> float:
        """When the next patch must be played. A new stream's is its arrival, before all streams that are on time.

        Speech that is not live has the deadline of a listener whose patch has just become due.
        """
        if not each.is_live:
            since = each.arrived_at if each.launched_at is None else each.launched_at
            return -math.inf if since is None else since + self._lead * self._patch_s
        if each.launched_at is None:
            return -math.inf if each.arrived_at is None else each.arrived_at
        before = each.num_samples + each.in_flight * self._patch_samples
        start = each.launched_at if each.started_at is None else each.started_at
        return start + before / self._sample_rate

    def _earliest(self, each: _Stream) -> float:
        """When the next patch may be launched."""
        if not each.is_live or not each.lead or each.launched_at is None:
            return -math.inf
        if each.started_at is None:
            before = each.num_samples + each.in_flight * self._patch_samples
            return -math.inf if before <= (each.lead - 1) * self._patch_samples else math.inf
        return self._deadline(each) - each.lead * self._patch_s
