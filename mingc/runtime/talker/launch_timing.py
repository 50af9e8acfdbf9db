"""How long patches take and when to launch the next, as far as the host sees it. Plain numbers; no torch."""

from __future__ import annotations

from collections.abc import Sequence

_LEAST_LEAD_S = 0.003  # the host needs about 1 ms to launch 32 rows, and as long to get Python's lock
_MOST_LEAD_S = 1.0
_CLOSE_S = 0.001
_FORGOTTEN = 1.02  # a patch may be taken for longer than the one before by this factor


class PatchLatencyModel:
    """Learns from each patch when the ones under way will have ended. Times are in seconds, of one clock.

    What is learnt for a batch size is about the least of the last few dozen patches: some have waited for prompts, or
    the host has looked late.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last_end = float("-inf")

    def observe(self, size: int, launched: float, ended: float) -> None:
        """A patch of `size` rows, launched then, has ended; the device makes one after the other."""
        took = ended - max(launched, self._last_end)
        self._seconds[size] = min(took, _FORGOTTEN * self._seconds.get(size, took))
        self._last_end = ended

    def remaining_s(self, under_way: Sequence[tuple[int, float]], now: float) -> float:
        """Until the last of these patches (size, launched; the oldest first) has ended; 0 when a size is new."""
        end = self._last_end
        for size, launched in under_way:
            if size not in self._seconds:
                return 0.0
            end = max(launched, end) + self._seconds[size]
        return max(0.0, end - now)


class LaunchTimingPolicy:
    """How long before the device runs dry the next patch is to be launched.

    Longer when it was close, as on a host that is busy with other things, and slowly less again.
    """

    def __init__(self) -> None:
        self.lead_s = _LEAST_LEAD_S

    def observe(self, left_s: float, *, was_held: bool) -> None:
        """A patch was launched while the device had this much left to do; held: not before it was time to."""
        was_close = was_held and left_s < _CLOSE_S
        wanted = 2 * self.lead_s if was_close else 0.99 * self.lead_s
        self.lead_s = min(_MOST_LEAD_S, max(_LEAST_LEAD_S, wanted))
