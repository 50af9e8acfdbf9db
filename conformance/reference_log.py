"""Comparison log of one golden file: names that may be absent, waivers, and values that are not compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from mingc.errors import ConfigError
from mingc.numerics.relative_error import relative_error
from mingc.verify.comparison import Outcome
from mingc.verify.comparison_log import Array, ComparisonLog
from mingc.verify.scale import Scale

_STEPS = 4  # consecutive engine steps in the references, each from the output of the one before
_MAX_QUANTIZATION_ERROR = 0.5  # relative to the largest value; a larger error is a wrong result


class _References(dict[str, Array]):
    """Arrays of a golden file by name; a missing name raises ConfigError."""

    def __init__(self, file: str, arrays: Mapping[str, Array]) -> None:
        super().__init__(arrays)
        self._file = file

    def __missing__(self, name: str) -> Array:
        raise ConfigError(f"{self._file} lacks {name}", where="--reference", fix="pass a complete golden set")


class ReferenceLog(ComparisonLog):
    """Compares values with the references of a golden file.

    A comparison by name does nothing when the file lacks the name. A comparison with a waiver that fails, although
    the shape is right and every value finite, becomes an expected difference.

    Args:
        references: the file's arrays by name; empty for JSON files, whose references are passed per call.
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
        super().__init__(file, _References(file, references), tolerance=tolerance, is_exact=is_exact)
        self._quantization = quantization

    def __contains__(self, name: str) -> bool:
        return name in self.references

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
        if reference is None and name not in self.references:
            return
        super().tensor(name, value, reference=reference, how=how, tolerance=tolerance)
        row = self.comparisons[-1]
        # A note says that the scale of all values is off, which quantization does not explain.
        if row.error is None:
            return
        if not waiver and tolerance is None and not row.note and row.error <= self._quantized_limit():
            waiver = f"quantized weights change an engine's outputs by up to {self._quantization:.2f}"
        self._waive(waiver)

    def ids(
        self,
        name: str,
        value: ArrayLike,
        *,
        reference: ArrayLike | None = None,
        how: str = "",
        waiver: str = "",
    ) -> None:
        if reference is None and name not in self.references:
            return
        super().ids(name, value, reference=reference, how=how)
        if np.shape(value) == np.shape(self.references[name] if reference is None else reference):
            self._waive(waiver)

    def scale(self, name: str, scale: Scale, *, how: str) -> None:
        """Compare a fitted factor with its allowance."""
        note = scale.describe() if scale.is_off else ""
        outcome: Outcome = "FAIL" if scale.is_off else "pass"
        self._add(
            name, how, "scale", outcome, error=abs(scale.factor - 1), tolerance=scale.allowed, note=note
        )

    def text(self, name: str, value: str | Sequence[str], reference: str | Sequence[str]) -> None:
        """Compare strings."""
        same = value == reference if isinstance(value, str) else list(value) == list(reference)
        note = "" if same else f"{value!r} is not {reference!r}"[:200]
        self._add(name, "", "text", "pass" if same else "FAIL", identical=same, note=note)

    def expect_difference(self, name: str, value: ArrayLike, why: str) -> None:
        """Record a reference of another variant, which this implementation does not reproduce."""
        if name not in self.references:
            return
        self._compared.add(name)
        error = relative_error(np.asarray(value), self.references[name])
        self._add(name, "", "tensor", "expected difference", error=error, note=why)

    def skip(self, name: str, why: str) -> None:
        """Record that `name` was not checked."""
        self._add(name, "", "text", "not checked", note=why)

    def _waive(self, why: str) -> None:
        """Turn the last comparison into an expected difference if it failed; without a reason do nothing."""
        row = self.comparisons[-1]
        if why and row.outcome == "FAIL":
            self.comparisons[-1] = replace(row, outcome="expected difference", note=why)

    def _quantized_limit(self) -> float:
        """Return the largest error that quantized weights may cause."""
        if not self._quantization:
            return 0.0
        return min(self._tolerance + _STEPS * self._quantization, _MAX_QUANTIZATION_ERROR)
