"""What came out of comparing one value with its reference. Plain data, no numpy and no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal["tensor", "ids", "text", "share", "scale"]
Outcome = Literal["pass", "FAIL", "expected difference", "not checked"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One value held against its reference.

    Attributes:
        name: the reference's file and name, with what was done where one reference serves twice.
        kind: tensors are compared within a tolerance, ids and text must be identical, a share counts identical cases,
            a scale is the factor by which all values together are as large as their references.
        error: worst relative error, max |a - b| / max |b|; of a share the part that differs, of a
            scale how far it is from 1.
        identical: of ids and text.
        tolerance: the largest error that passes.
        note: why a difference is expected, or why nothing was checked.
    """

    name: str
    kind: Kind
    error: float | None = None
    identical: bool | None = None
    tolerance: float | None = None
    outcome: Outcome
    note: str = ""

    def cells(self) -> dict[str, str]:
        """The comparison in three columns, for people."""
        if self.identical is not None:
            result = "identical" if self.identical else "different"
        elif self.error is None:
            result = ""
        else:
            limit = "" if self.tolerance is None else f" of {self.tolerance:.0e}"
            result = f"{self.error:.1e}{limit}"
        outcome = f"{self.outcome}: {self.note}" if self.note else self.outcome
        return {"name": self.name, "error": result, "outcome": outcome}


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSummary:
    """One golden file: how many of its values were held against what.

    `inputs` were fed in; `not_outputs` are intermediate values that no engine gives out.
    """

    file: str
    checked: int
    failed: int
    inputs: int
    not_outputs: int
    worst_error: float
    note: str = ""
