"""What `mingc audit` found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Verdict = Literal["equivalent", "intelligible", "different", "good", "bad"]
Outcome = Literal["good", "bad", "skipped", "noted"]
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
    """Figures of one sound; None: it has no such figure."""

    name: str
    group: str
    sample_rate: int
    duration_s: float
    loudness_lufs: float | None
    rms: float = field(metadata=_JSON_ONLY)
    peak: float = field(metadata=_JSON_ONLY)
    clipped: float
    longest_pause_s: float = field(metadata=_JSON_ONLY)
    centroid_hz: float
    bandwidth_hz: float = field(metadata=_JSON_ONLY)
    f0_hz: float | None
    f0_range_semitones: float | None = field(metadata=_JSON_ONLY)
    s_per_character: float | None
    error_rate: float | None
    drift_timbre_db: float | None = field(metadata=_JSON_ONLY)
    drift_loudness_lu: float | None = field(metadata=_JSON_ONLY)
    drift_pitch_semitones: float | None = field(metadata=_JSON_ONLY)
    drift_speaker: float | None = field(metadata=_JSON_ONLY)
    text: str = field(metadata=_JSON_ONLY)
    transcript: str | None = field(metadata=_JSON_ONLY)


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
