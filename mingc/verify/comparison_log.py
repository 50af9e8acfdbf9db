"""Comparison log of one golden file: its references and the result of each comparison."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mingc.errors import ConfigError, MingcError
from mingc.numerics.relative_error import relative_error
from mingc.verify.audio_comparison import AudioDifference
from mingc.verify.comparison import Comparison, FileSummary, Kind, Outcome
from mingc.verify.scale import Scale, fit_scale

Array = NDArray[np.generic]

_LOOSE = 1e-2  # above this tolerance the scale of all values is bounded as well
_STEPS = 4  # consecutive engine steps in the references, each from the output of the one before
_MAX_QUANTIZATION_ERROR = 0.5  # relative to the largest value; a larger error is a wrong result


class _References(dict[str, Array]):
    """Arrays of a golden file by name; a missing name raises ConfigError."""

    def __init__(self, file: str, arrays: Mapping[str, Array]) -> None:
        super().__init__(arrays)
        self._file = file

    def __missing__(self, name: str) -> Array:
        raise ConfigError(f"{self._file} lacks {name}", where="--reference", fix="pass a complete golden set")


class ComparisonLog:
    """Compares values with the references of `file` and records every result.

    Args:
        references: the file's arrays by name; empty for JSON files, whose references are passed per call.
        tolerance: largest relative error of engine outputs.
        is_exact: whether engines compute in float32, where rounding changes no routing decision and no token.
        quantization: error of engine outputs by weight quantization, from the manifest; 0 without quantized weights.
            References come from unquantized weights: errors up to a few times this are expected differences.
    """

    def __init__(
        self,
        file: str,
        references: Mapping[str, Array],
        *,
        tolerance: float,
        is_exact: bool,
        quantization: float = 0.0,
    ) -> None:
        self.file = file
        self.references: Mapping[str, Array] = _References(file, references)
        self.comparisons: list[Comparison] = []
        self._tolerance = tolerance
        self.is_exact = is_exact
        self._quantization = quantization
        self._compared: set[str] = set()
        self._inputs: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return name in self.references

    def input(self, name: str) -> Array:
        """The reference `name` as an engine input. Raises: ConfigError when the file lacks it."""
        self._inputs.add(name)
        return self.references[name]

    def cases(self, suffix: str) -> list[str]:
        """Prefixes of the names that end with `.suffix`, in the file's order."""
        ending = f".{suffix}"
        return [name.removesuffix(ending) for name in self.references if name.endswith(ending)]

    def tensor(
        self,
        name: str,
        value: ArrayLike,
        *,
        reference: ArrayLike | None = None,
        how: str = "",
        tolerance: float | None = None,
        waiver: str = "",
    ) -> None:
        """Compare within a tolerance; above a tolerance of 1e-2 compare the scale of all values as well.

        Does nothing when neither the file nor the caller has a reference. With a `waiver`, a finite value outside the
        tolerance is an expected difference.
        """
        if reference is None and name not in self.references:
            return
        expected = self.references[name] if reference is None else np.asarray(reference)
        self._compared.add(name)
        limit = self._tolerance if tolerance is None else tolerance
        error = relative_error(np.asarray(value), expected)
        scale = fit_scale(np.asarray(value), expected) if limit > _LOOSE and math.isfinite(error) else None
        if scale is not None and scale.is_off:
            outcome: Outcome = "expected difference" if waiver else "FAIL"
            note = waiver or scale.describe()
            self._add(name, how, "tensor", outcome, error=error, tolerance=limit, note=note)
            return
        if not waiver and tolerance is None and error <= self._quantized_limit():
            waiver = f"quantized weights change an engine's outputs by up to {self._quantization:.2f}"
        if error <= limit or not waiver or not math.isfinite(error):
            self._add(name, how, "tensor", "pass" if error <= limit else "FAIL", error=error, tolerance=limit)
        else:
            self._add(name, how, "tensor", "expected difference", error=error, tolerance=limit, note=waiver)

    def scale(self, name: str, scale: Scale, *, how: str) -> None:
        """Compare a fitted factor with its allowance."""
        note = scale.describe() if scale.is_off else ""
        outcome: Outcome = "FAIL" if scale.is_off else "pass"
        error = abs(scale.factor - 1)
        self._add(name, how, "scale", outcome, error=error, tolerance=scale.allowed, note=note)

    def _quantized_limit(self) -> float:
        """The largest error that quantized weights may cause."""
        if not self._quantization:
            return 0.0
        return min(self._tolerance + _STEPS * self._quantization, _MAX_QUANTIZATION_ERROR)

    def ids(
        self,
        name: str,
        value: ArrayLike,
        *,
        reference: ArrayLike | None = None,
        how: str = "",
        waiver: str = "",
    ) -> None:
        """Compare integers, which must be identical; with a `waiver`, a difference is expected."""
        if reference is None and name not in self.references:
            return
        expected = self.references[name] if reference is None else np.asarray(reference)
        self._compared.add(name)
        given = np.asarray(value)
        same = given.shape == expected.shape and bool((given == expected).all())
        if same or not waiver or given.shape != expected.shape:
            self._add(name, how, "ids", "pass" if same else "FAIL", identical=same)
        else:
            self._add(name, how, "ids", "expected difference", identical=False, note=waiver)

    def is_near(self, value: ArrayLike, reference: ArrayLike) -> NDArray[np.bool_]:
        """Which rows (…) of values (…, D) are within the tolerance, relative to the largest reference."""
        given, expected = np.asarray(value, np.float64), np.asarray(reference, np.float64)
        limit = self._tolerance * np.abs(expected).max(initial=0.0)
        return np.asarray(np.abs(given - expected).max(axis=-1) <= limit)  # False for NaN

    def text(self, name: str, value: str | Sequence[str], reference: str | Sequence[str]) -> None:
        """Compare strings."""
        same = value == reference if isinstance(value, str) else list(value) == list(reference)
        note = "" if same else f"{value!r} is not {reference!r}"[:200]
        self._add(name, "", "text", "pass" if same else "FAIL", identical=same, note=note)

    def share(self, name: str, *, same: int, total: int, minimum: float, note: str = "") -> None:
        """Record counted cases: a fraction of at least `minimum` must be identical."""
        missing = 1 - same / total if total else 0.0
        outcome: Outcome = "pass" if missing <= 1 - minimum + 1e-9 else "FAIL"
        note = f"{same} of {total} identical{'; ' if note else ''}{note}"
        self._add(name, "", "share", outcome, error=missing, tolerance=round(1 - minimum, 4), note=note)

    def expect_difference(self, name: str, value: ArrayLike, why: str) -> None:
        """Record a reference of another variant, which this implementation does not reproduce."""
        if name not in self.references:
            return
        self._compared.add(name)
        error = relative_error(np.asarray(value), self.references[name])
        self._add(name, "", "tensor", "expected difference", error=error, note=why)

    def rule(self, name: str, holds: bool, what: str) -> None:
        """Record whether a rule holds."""
        self._compared.add(name)
        self._add(name, "", "text", "pass" if holds else "FAIL", identical=holds, note=what)

    def audio(self, name: str, differences: Sequence[AudioDifference], *, how: str = "") -> None:
        """Record every property of a wave that was compared with a recorded one."""
        for each in differences:
            outcome: Outcome = "FAIL" if each.is_off else "pass"
            note = each.describe() if each.is_off else ""
            self._add(
                f"{name} {each.figure}",
                how,
                "audio",
                outcome,
                error=each.difference,
                tolerance=each.limit,
                note=note,
            )

    def skip(self, name: str, why: str) -> None:
        """Record that `name` was not checked."""
        self._add(name, "", "text", "not checked", note=why)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """Record a MingcError of the block as a failure of `name`, so that other cases are still replayed."""
        try:
            yield
        except MingcError as error:
            self._add(name, "", "text", "FAIL", note=f"{type(error).__name__}: {error.message}")

    def not_outputs(self) -> list[str]:
        """Names of references that were neither compared nor used as inputs."""
        return [name for name in self.references if name not in self._compared | self._inputs]

    def summary(self, note: str = "") -> FileSummary:
        """Counts of this file for the report."""
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
            note=note,
        )

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
