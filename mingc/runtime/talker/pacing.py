"""Pacing of speech: when the next patch of a stream may be launched, and which streams come first.

Speech for a listener is generated only a few patches ahead of its playback, which leaves device time to others. Imports
no torch. All times are seconds of one clock, which the caller reads.

The talker loop calls it under its lock. Not thread-safe.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ListenerState = Literal["starting", "playing", "late", "paused"]
LISTENER_STATES: tuple[ListenerState, ...] = ("starting", "playing", "late", "paused")
_PATIENCE_S = 3.0  # speech that has waited so long takes part in the next patch beside listeners
_MARGIN = 1.5  # a patch may take so many times its estimate: the model's other stages share the device

# What a step compares of every stream: its priority; its last launch or its arrival; when its next patch may be
# launched (inf: not yet known); when it is launched although no other stream is due; when it must be ready; the same
# again, inf for jobs.
_COLUMNS = ("priority", "since", "earliest", "latest", "deadline", "playback")


@dataclass(slots=True, eq=False)
class _Stream:
    """Speech of one request.

    Attributes:
        row: its place in the columns.
        is_live: whether it is played while it is generated.
        lead: patches that may be ready ahead of its playback; 0: no limit.
        priority: streams with a lower one come first.
        slack_s: how long a launch waits for others; at least one patch of the lead must remain for generating it.
        arrived_at: time of its first segment, or of the first one since it had none left.
        num_waiting: how many segments have no slot yet.
        launched_at: time of its last launch.
        started_at: when playback started, shifted by every stall since.
        num_samples: how many samples of all segments are ready.
        in_flight: how many patches are launched and not ready.
        is_running: whether a segment has a slot, and not all of its patches are launched.
        is_paused: whether its client does not read.
        was_paused: whether it was paused since the last patch; a late patch then does not count as an underrun.
        earliest: when its next patch may be launched if it is running and not paused.
    """

    row: int
    is_live: bool
    lead: int
    priority: int
    slack_s: float
    arrived_at: float | None = None
    num_waiting: int = 0
    launched_at: float | None = None
    started_at: float | None = None
    num_samples: int = 0
    in_flight: int = 0
    is_running: bool = False
    is_paused: bool = False
    was_paused: bool = False
    earliest: float = -math.inf

    @property
    def since(self) -> float:
        """Since when it waits for a patch; inf if it does not."""
        if self.arrived_at is None:
            return math.inf
        return self.arrived_at if self.launched_at is None else max(self.arrived_at, self.launched_at)

    @property
    def is_playing(self) -> bool:
        """Whether a listener has heard it."""
        return self.is_live and self.started_at is not None

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
        self._is_released = False
        self._patch_samples = patch_samples
        self._sample_rate = sample_rate
        self._patch_s = patch_samples / sample_rate
        self._streams: dict[int, _Stream] = {}
        self._by_row = [0] * 64
        self._free_rows = list(range(63, -1, -1))
        self._columns = {name: np.full(64, math.inf) for name in _COLUMNS}
        self._unread: set[int] = set()
        self._num_live = self._num_prioritized = 0
        self.num_underruns = 0  # how many patches were ready after their playback time

    @property
    def unread(self) -> Collection[int]:
        """The streams with more to speak that are delayed because none of their patches has been sent yet."""
        return self._unread

    def release(self) -> None:
        """Delay no stream from now on."""
        self._lead, self._is_released = 0, True
        for each in self._streams.values():
            each.lead = 0
            self._update(each)

    def open(self, stream: int, *, is_live: bool, lead: int | None = None, priority: int = 0) -> None:
        """Add a stream; only live streams are ever delayed. `lead`: None: the lead of all."""
        lead = self._lead if lead is None or self._is_released else lead
        slack_s = self._patch_s * min(1.0, (lead - 1) / 2)
        if not self._free_rows:
            size = len(self._by_row)
            self._columns = {
                name: np.append(column, np.full(size, math.inf)) for name, column in self._columns.items()
            }
            self._free_rows += range(2 * size - 1, size - 1, -1)
            self._by_row += [0] * size
        each = _Stream(self._free_rows.pop(), is_live, lead, priority, slack_s)
        self._streams[stream], self._by_row[each.row] = each, stream
        self._num_live += is_live
        self._num_prioritized += priority != 0

    def close(self, stream: int) -> None:
        """Remove a stream; does nothing if it is unknown."""
        each = self._streams.pop(stream, None)
        if each is not None:
            each.is_running, each.num_waiting = False, 0
            self._update(each)
            self._free_rows.append(each.row)
            self._num_live -= each.is_live
            self._num_prioritized -= each.priority != 0

    def arrive(self, stream: int, now: float) -> None:
        """Record that a segment of the stream has arrived."""
        each = self._streams[stream]
        if not each.is_running and not each.num_waiting:
            each.arrived_at = now
        each.num_waiting += 1
        self._update(each)

    def begin_segment(self, stream: int) -> None:
        """Record that a segment of the stream has a slot."""
        each = self._streams[stream]
        each.is_running = True
        each.num_waiting -= 1
        self._update(each)

    def begin_playback(self, stream: int, now: float) -> None:
        """Record that the first audio of the stream is sent. Does nothing for a later call or an unknown stream."""
        each = self._streams.get(stream)
        if each is not None and each.started_at is None:
            each.started_at = now
            self._update(each)

    def launch(self, streams: Iterable[int], now: float, ending: Collection[int] = ()) -> None:
        """Record that the next patch of each stream was launched, the last one of its segment if it is `ending`."""
        for stream in streams:
            each = self._streams[stream]
            each.launched_at = now
            each.in_flight += 1
            each.is_running = stream not in ending
            self._update(each)

    def deliver(self, stream: int, num_samples: int, now: float) -> None:
        """Record that the oldest patch in flight of the stream is ready, with `num_samples`."""
        each = self._streams[stream]
        # Its next patch is due as before, because this one has counted while it was in flight.
        has_changed = num_samples != self._patch_samples or not each.num_samples
        if each.is_live and each.started_at is not None:
            stalled_s = now - self._played_at(each, each.started_at)
            if stalled_s > 0.0:
                each.started_at += stalled_s  # a player waits for the patch and continues from there
                self.num_underruns += not each.was_paused
                has_changed = True
        each.was_paused = each.is_paused
        each.num_samples += num_samples
        each.in_flight -= 1
        if has_changed:
            self._update(each)

    def end_segment(self, stream: int) -> None:
        """Record that a segment of the stream has ended; its surplus patches in flight are discarded."""
        each = self._streams[stream]
        each.in_flight = 0
        each.is_running = each.is_paused = False
        self._update(each)

    def pause(self, stream: int) -> None:
        """Launch no patch of the stream until it is resumed or its segment ends: its client does not read."""
        each = self._streams[stream]
        each.is_paused = each.was_paused = True
        self._update(each)

    def resume(self, stream: int) -> None:
        """Record that the client of the stream reads again."""
        each = self._streams[stream]
        each.is_paused = False
        self._update(each)

    def admissible(self, waiting: Iterable[int], now: float) -> list[int]:
        """Streams that wait for a slot and whose next patch may be launched, most urgent first.

        Jobs come after listeners, and while a listener waits for its first patch not at all, because their prompts
        would delay it.
        """
        streams = self._streams
        ready = [stream for stream in waiting if streams[stream].earliest <= now]
        if not ready:
            return []
        overdue = {each for each in ready if now - streams[each].since > _PATIENCE_S}
        columns = self._columns
        # Paced speech that is being played is due at a finite time.
        is_short = np.isfinite(columns["earliest"]) & (columns["playback"] < now + self._patch_s / 2)
        if is_short.any():
            best = columns["priority"][is_short].min()
            ready = [
                each
                for each in ready
                if streams[each].is_playing or each in overdue or streams[each].priority < best
            ]
        # Without pacing in order of arrival.
        deadlines = {stream: self._deadline(streams[stream]) if self._lead else 0.0 for stream in ready}
        if not self._num_prioritized and self._num_live in (0, len(streams)):
            return sorted(ready, key=deadlines.__getitem__)
        first = overdue.union(stream for stream in ready if streams[stream].is_live)
        if len(first) < len(ready):
            starting = min((each.priority for each in streams.values() if each.is_starting), default=math.inf)
            ready = [each for each in ready if each in first or streams[each].priority < starting]
        # Overdue streams come first, so that none starves.
        rank = {each: -math.inf if each in overdue else streams[each].priority for each in ready}
        return sorted(ready, key=lambda each: (rank[each], each not in first, deadlines[each]))

    @property
    def due_at(self) -> float:
        """When the first running stream waits no longer for others to share its patch; inf if all are held."""
        return float(self._columns["latest"].min())

    def due(
        self,
        now: float,
        *,
        is_crowded: bool = False,
        max_rows: int | None = None,
        patch_s: Callable[[int], float] = lambda rows: 0.0,
    ) -> list[int]:
        """At most `max_rows` running streams whose patch is to be launched now, earliest playback first.

        `is_crowded`: another stream waits for a slot. Then no stream is delayed, so that slots become free. `patch_s`:
        how long a patch of so many rows takes, 0 if unknown; equal for all sizes of one batch bucket, and for more rows
        than fit into a patch.
        """
        if not is_crowded and self.due_at > now:
            return []
        earliest = self._columns["earliest"]
        rows = np.flatnonzero(earliest < math.inf if is_crowded else earliest <= now)
        keys = [self._columns["deadline"][rows]]
        if self._num_prioritized:  # overdue streams come first, so that none starves
            keys.append(np.where(self._is_overdue(rows, now), -math.inf, self._columns["priority"][rows]))
        rows = rows[np.lexsort(keys)]
        all_s = _MARGIN * patch_s(len(rows)) if self._num_live else 0.0
        if all_s:
            rows = self._beside_listeners(rows, now, all_s, max_rows, patch_s)
        return [self._by_row[row] for row in rows[:max_rows].tolist()]

    def _is_overdue(self, rows: NDArray[np.intp], now: float) -> NDArray[np.bool_]:
        """Whether the streams have waited for a patch for very long."""
        is_overdue: NDArray[np.bool_] = now - self._columns["since"][rows] > _PATIENCE_S
        return is_overdue

    def _beside_listeners(
        self,
        rows: NDArray[np.intp],
        now: float,
        all_s: float,
        max_rows: int | None,
        patch_s: Callable[[int], float],
    ) -> NDArray[np.intp]:
        """The streams of `rows`, without as many as would make a listener late. `all_s`: seconds of all together.

        Listeners that are not due have more than one patch of playback left.
        """
        playback, priority = self._columns["playback"][rows], self._columns["priority"][rows]
        # A listener that arrives now waits at most for one patch of playback.
        room = min(self._patch_s, playback.min(initial=math.inf) - now)
        if all_s <= room:
            return rows
        is_urgent = playback - now < all_s
        is_first = is_urgent
        if is_urgent.any():
            is_first, room = is_urgent | (priority < priority[is_urgent].min()), 0.0
        chosen, rest = rows[is_first], rows[~is_first]
        if len(rest) and (not len(chosen) or self._is_overdue(rest[:1], now)):
            chosen, rest = np.append(rest[:1], chosen), rest[1:]
        rest, num_more = rest[:max_rows], 0
        while num_more < len(rest):
            count = len(chosen) + num_more
            if _MARGIN * patch_s(count + 1) > max(room, _MARGIN * patch_s(count)):
                break
            num_more += 1
        return np.append(chosen, rest[:num_more])

    def next_time(self, waiting: Iterable[int], since: float) -> float:
        """When the first stream is due, or one of `waiting` may begin that might not at `since`; inf if none will.

        `waiting`: streams without a slot.
        """
        return min(
            [self.due_at, *(time for each in waiting if (time := self._streams[each].earliest) > since)]
        )

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
        if not each.is_live:
            return each.since + self._lead * self._patch_s
        if each.launched_at is None:
            return -math.inf if each.arrived_at is None else each.arrived_at
        before = each.num_samples + each.in_flight * self._patch_samples
        start = each.launched_at if each.started_at is None else each.started_at
        return start + before / self._sample_rate

    def _update(self, each: _Stream) -> None:
        """Store when the next patch may be launched and must be played."""
        deadline = self._deadline(each)
        if not each.is_live or not each.lead or each.launched_at is None:
            each.earliest = -math.inf
        elif each.started_at is None:
            before = each.num_samples + each.in_flight * self._patch_samples
            each.earliest = -math.inf if before <= (each.lead - 1) * self._patch_samples else math.inf
        else:
            each.earliest = deadline - each.lead * self._patch_s
        earliest = each.earliest if each.is_running and not each.is_paused else math.inf
        columns, row = self._columns, each.row
        columns["priority"][row] = each.priority
        columns["since"][row] = each.since
        columns["earliest"][row] = earliest
        columns["latest"][row] = earliest + each.slack_s
        columns["deadline"][row] = deadline
        columns["playback"][row] = deadline if each.is_live else math.inf
        if (each.is_running or each.num_waiting) and each.earliest == math.inf and each.num_samples:
            self._unread.add(self._by_row[row])
        else:
            self._unread.discard(self._by_row[row])
