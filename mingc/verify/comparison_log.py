"""Comparison log: values that are compared with references, and the result of each comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mingc.errors import MingcError
from mingc.media.dsp.audio_comparison import AudioDifference
from mingc.numerics.relative_error import relative_error
from mingc.verify.comparison import Comparison, FileSummary, Kind, Outcome
from mingc.verify.scale import fit_scale

Array = NDArray[np.generic]

_LOOSE = 1e-2  # above this tolerance the scale of all values is bounded as well


class ComparisonLog:
    """Compares values with references and records every result.

    Args:
        file: name of the recorded file, or of the way in which its values were computed.
        references: recorded arrays by name.
        tolerance: largest relative error of engine outputs.
        is_exact: whether engines compute in float32, where rounding changes no routing decision and no token.

    Attributes:
        note: remark of the summary.
    """

    def __init__(
        self, file: str, references: Mapping[str, Array], *, tolerance: float, is_exact: bool
    ) -> None:
        self.file = file
        self.references = references
        self.is_exact = is_exact
        self.note = ""
        self.comparisons: list[Comparison] = []
        self._tolerance = tolerance
        self._compared: set[str] = set()
        self._inputs: set[str] = set()

    def input(self, name: str) -> Array:
        """Return the reference `name`, and count it as an engine input."""
        self._inputs.add(name)
        return self.references[name]

    def tensor(
        self,
        name: str,
        value: ArrayLike,
        *,
        reference: ArrayLike | None = None,
        how: str = "",
        tolerance: float | None = None,
    ) -> None:
        """Compare within a tolerance; above a tolerance of 1e-2 compare the scale of all values as well."""
        given, expected = np.asarray(value), self._expected(name, reference)
        limit = self._tolerance if tolerance is None else tolerance
        error = relative_error(given, expected)
        scale = fit_scale(given, expected) if limit > _LOOSE and math.isfinite(error) else None
        if scale is not None and scale.is_off:
            self._add(name, how, "tensor", "FAIL", error=error, tolerance=limit, note=scale.describe())
        else:
            self._add(name, how, "tensor", _outcome(error <= limit), error=error, tolerance=limit)

    def ids(self, name: str, value: ArrayLike, *, reference: ArrayLike | None = None, how: str = "") -> None:
        """Compare integers, which must be identical."""
        given, expected = np.asarray(value), self._expected(name, reference)
        same = given.shape == expected.shape and bool((given == expected).all())
        self._add(name, how, "ids", _outcome(same), identical=same)

    def is_near(self, value: ArrayLike, reference: ArrayLike) -> NDArray[np.bool_]:
        """Test which rows (…) of values (…, D) are within the tolerance, relative to the largest reference."""
        given, expected = np.asarray(value, np.float64), np.asarray(reference, np.float64)
        limit = self._tolerance * np.abs(expected).max(initial=0.0)
        return np.asarray(np.abs(given - expected).max(axis=-1) <= limit)  # False for NaN

    def share(self, name: str, *, same: int, total: int, minimum: float, note: str = "") -> None:
        """Record counted cases: a fraction of at least `minimum` must be identical."""
        missing = 1 - same / total if total else 0.0
        outcome = _outcome(missing <= 1 - minimum + 1e-9)
        note = f"{same} of {total} identical{'; ' if note else ''}{note}"
        self._add(name, "", "share", outcome, error=missing, tolerance=round(1 - minimum, 4), note=note)

    def rule(self, name: str, holds: bool, what: str) -> None:
        """Record whether a rule holds."""
        self._compared.add(name)
        self._add(name, "", "text", _outcome(holds), identical=holds, note=what)

    def audio(self, name: str, differences: Sequence[AudioDifference], *, how: str = "") -> None:
        """Record every property of a wave that was compared with a recorded one."""
        for each in differences:
            self._add(
                f"{name} {each.figure}",
                how,
                "audio",
                _outcome(not each.is_off),
                error=each.difference,
                tolerance=each.limit,
                note=each.describe() if each.is_off else "",
            )

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record a MingcError of the block as a failure of `name`, so that other cases are still replayed."""
        try:
            yield
        except MingcError as error:
            self._add(name, "", "text", "FAIL", note=f"{type(error).__name__}: {error.message}")

    def not_outputs(self) -> list[str]:
        """List the references that were neither compared nor used as inputs."""
        return [name for name in self.references if name not in self._compared | self._inputs]

    def summary(self) -> FileSummary:
        """Counts for the report."""
        checked = [each for each in self.comparisons if each.outcome != "not checked"]
        bounded = [
            each.error
            for each in checked
            if each.error is not None and each.tolerance is not None and each.kind != "audio"
        ]
        return FileSummary(
            file=self.file,
            checked=len(checked),
            failed=sum(each.outcome == "FAIL" for each in checked),
            inputs=len(self._inputs - self._compared),
            not_outputs=len(self.not_outputs()),
            worst_error=max(bounded, default=0.0),
            note=self.note,
        )

    def _expected(self, name: str, reference: ArrayLike | None) -> Array:
        """Return the reference that the caller gives, else the recorded one; `name` counts as compared."""
        self._compared.add(name)
        return self.references[name] if reference is None else np.asarray(reference)

    def _add(
        self,
        name: str,
        how: str,
        kind: Kind,
        outcome: Outcome,
        *,
        error: float | None = None,
        identical: bool | None = None,
        tolerance: float | None = None,
        note: str = "",
    ) -> None:
        if error is not None and not math.isfinite(error):  # JSON has no infinity
            error, note = None, note or "shapes differ, or a value is not finite"
        stem = self.file.removesuffix(".safetensors").removesuffix(".json")
        self.comparisons.append(
            Comparison(
                name=f"{stem}: {name}{f' ({how})' if how else ''}",
                kind=kind,
                error=error,
                identical=identical,
                tolerance=tolerance,
                outcome=outcome,
                note=note,
            )
        )


def _outcome(passes: bool) -> Outcome:
    return "pass" if passes else "FAIL"
