"""Result of comparing one value with its reference. Plain data; imports neither numpy nor torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tensor", "ids", "text", "share", "scale", "audio"]
Outcome = Literal["pass", "FAIL", "expected difference", "not checked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One value compared with its reference.

    Attributes:
        name: the reference's file and name, and the variant when one reference is compared several times.
        kind: tensors are compared within a tolerance, ids and text must be identical, a share counts identical cases,
            a scale is the least-squares factor between all values and their references.
        error: worst relative error, max |a - b| / max |b|; for a share the fraction that differs, for a scale its
            distance from 1, for audio the difference of the figure.
        identical: set only for ids and text.
        tolerance: the largest error that passes.
        note: the waiver of an expected difference, or the reason why nothing was checked.
    """

    name: str
    kind: Kind
    error: float | None = None
    identical: bool | None = None
    tolerance: float | None = None
    outcome: Outcome
    note: str = ""

    def cells(self) -> dict[str, str]:
        """Columns of the console table; passed comparisons appear only in the JSON document."""
        if self.outcome == "pass":
            return {}
        if self.identical is not None:
            result = "identical" if self.identical else "different"
        elif self.error is None:
            result = ""
        else:
            result = f"{self.error:.1e}"
        limit = "" if self.tolerance is None else f"{self.tolerance:.0e}"
        return {
            "name": self.name,
            "outcome": self.outcome,
            "error": result,
            "tolerance": limit,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSummary:
    """Counts of one golden file: values compared, failed, used as inputs.

    `not_outputs` counts intermediate values that no engine returns.
    """

    file: str
    checked: int
    failed: int
    inputs: int
    not_outputs: int
    worst_error: float
    note: str = ""
