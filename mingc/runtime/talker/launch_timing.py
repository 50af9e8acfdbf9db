"""Launch timing: estimates how long patches take, and decides when to launch the next one. Plain numbers; no torch."""

from __future__ import annotations

from collections.abc import Sequence

_MIN_LEAD_S = 0.003  # the host needs about 1 ms to launch 32 rows, and as long to acquire the GIL
_MAX_LEAD_S = 1.0
_LATE_S = 0.001  # a launch is late when less device work is left
_GROWTH = 1.02  # an estimate grows at most by this factor per patch


class PatchLatencyModel:
    """Estimates when launched patches will end. Times are in seconds of one clock.

    The estimate for a batch size is about the minimum of the last few dozen patches, because some patches wait for
    prompts, and the host observes some late.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._last_end = float("-inf")

    def observe(self, size: int, launched: float, ended: float) -> None:
        """Record when a patch of `size` rows was launched and when it ended. The device runs patches in order."""
        took = ended - max(launched, self._last_end)
        self._seconds[size] = min(took, _GROWTH * self._seconds.get(size, took))
        self._last_end = ended

    def seconds(self, size: int) -> float:
        """How long a patch of `size` rows takes; 0 if unknown."""
        return self._seconds.get(size, 0.0)

    def remaining_s(self, launched_patches: Sequence[tuple[int, float]], now: float) -> float:
        """Seconds until the last of these patches (size, time of launch; oldest first) ends; 0 if a size is unknown."""
        end = self._last_end
        for size, launched in launched_patches:
            if size not in self._seconds:
                return 0.0
            end = max(launched, end) + self._seconds[size]
        return max(0.0, end - now)


class LaunchTimingPolicy:
    """Chooses the lead: how long before the device runs out of work the next patch is launched.

    The lead doubles after a late launch, for example on a busy host, and decays slowly.

    Attributes:
        lead_s: the current lead.
    """

    def __init__(self) -> None:
        self.lead_s = _MIN_LEAD_S

    def observe(self, left_s: float, *, was_held: bool) -> None:
        """Record a launch with `left_s` of device work left. `was_held`: the launch waited until the lead."""
        was_late = was_held and left_s < _LATE_S
        lead_s = 2 * self.lead_s if was_late else 0.99 * self.lead_s
        self.lead_s = min(_MAX_LEAD_S, max(_MIN_LEAD_S, lead_s))
