"""What `mingc audit` found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["equivalent", "intelligible", "different", "good", "bad"]
Outcome = Literal["good", "bad", "skipped", "noted"]
_SHOWN = ("sample_rate", "duration_s", "loudness_lufs", "clipped", "f0_hz", "s_per_character", "error_rate")
_JSON_ONLY = {"shown": False}  # and in the page


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that was expected of a server or a sound.

    Attributes:
        where: the server, group or sound.
        outcome: `noted` is neither good nor bad.
        found, expected: in words.
    """

    name: str
    where: str
    outcome: Outcome
    found: str
    expected: str = field(default="", metadata=_JSON_ONLY)


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureRow:
    """A distance between sounds of the same words; medians over all pairs.

    Attributes:
        within: between repetitions in a group; None: nothing was repeated.
        across: between the groups.
        limit: for `across`; 1.5 × `within` and at least what one hears, or a fixed one without repetitions.
    """

    figure: str
    unit: str
    within: float | None
    across: float
    limit: float
    is_off: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class SoundRow:
    """A sound, what it says and how it was transcribed; its figures by name, None for one that it does not have."""

    name: str
    group: str
    text: str
    transcript: str | None
    figures: Mapping[str, float | None]

    def cells(self) -> dict[str, object]:
        """What the console shows."""
        return {"name": self.name, "group": self.group} | {each: self.figures[each] for each in _SHOWN}


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditReport:
    """The result of `mingc audit`.

    Attributes:
        verdict: of two groups `equivalent` (they differ as repetitions do), `intelligible` (they say the same words,
            and sound different) or `different`; of a server alone `good` or `bad`.
        reasons: of the verdict.
        groups: what was compared or asked.
    """

    verdict: Verdict
    reasons: tuple[str, ...]
    notes: tuple[str, ...]
    groups: tuple[str, ...]
    figures: tuple[FigureRow, ...]
    checks: tuple[Check, ...]
    sounds: tuple[SoundRow, ...]
    command: str

    @property
    def is_bad(self) -> bool:
        """Whether somebody should look at it."""
        return self.verdict in ("different", "bad")
