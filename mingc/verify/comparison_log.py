"""The references of one golden file and what was found for each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mingc.errors import ConfigError, MingcError
from mingc.numerics.relative_error import relative_error
from mingc.verify.comparison import Comparison, FileSummary, Kind, Outcome
from mingc.verify.scale import Scale, fit_scale

Array = NDArray[np.generic]

_WIDE = 1e-2  # a tolerance above this is one of roundings: beside it the scale of all values is bounded
_STEPS = 4  # of an engine that run one after the other in the references, each from what the last has given
_MOST_QUANTIZED = 0.5  # of the largest value: what is further off is another answer


class _References(dict[str, Array]):
    """Arrays of a golden file by name. Asking for one that is not there raises ConfigError."""

    def __init__(self, file: str, arrays: Mapping[str, Array]) -> None:
        super().__init__(arrays)
        self._file = file

    def __missing__(self, name: str) -> Array:
        raise ConfigError(f"{self._file} lacks {name}", where="--reference", fix="take a whole golden set")


class ComparisonLog:
    """Compares values with the references of `file` and keeps every result.

    Args:
        references: the file's arrays by name; empty for JSON files, whose references are passed in.
        tolerance: relative error that engine outputs may have.
        is_exact: whether engines compute in float32, where roundings decide nothing.
        quantization: what quantized weights take from an engine's outputs, as the manifest says; 0 when none are. The
            references are of other weights: what is off by no more than a few times this is an expected difference.
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
        """The reference `name`, to be fed into an engine. Raises: ConfigError when the file lacks it."""
        self._inputs.add(name)
        return self.references[name]

    def cases(self, suffix: str) -> list[str]:
        """Names before `.suffix`, in the file's order."""
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
        excuse: str = "",
    ) -> None:
        """Compare within a tolerance, where that is wide also the scale of all values together.

        Nothing happens when neither the file nor the caller has a reference. With an `excuse` a finite value that is
        further off is an expected difference.
        """
        if reference is None and name not in self.references:
            return
        expected = self.references[name] if reference is None else np.asarray(reference)
        self._compared.add(name)
        limit = self._tolerance if tolerance is None else tolerance
        error = relative_error(np.asarray(value), expected)
        scale = fit_scale(np.asarray(value), expected) if limit > _WIDE and math.isfinite(error) else None
        if scale is not None and scale.is_off:
            outcome: Outcome = "expected difference" if excuse else "FAIL"
            note = excuse or scale.told()
            self._add(name, how, "tensor", outcome, error=error, tolerance=limit, note=note)
            return
        if not excuse and tolerance is None and error <= self._quantized_limit():
            excuse = (
                f"the weights are quantized, which takes {self._quantization:.2f} from an engine's outputs"
            )
        if error <= limit or not excuse or not math.isfinite(error):
            self._add(name, how, "tensor", "pass" if error <= limit else "FAIL", error=error, tolerance=limit)
        else:
            self._add(name, how, "tensor", "expected difference", error=error, tolerance=limit, note=excuse)

    def scale(self, name: str, scale: Scale, *, how: str) -> None:
        """Hold a fitted factor to what it may be."""
        note = scale.told() if scale.is_off else ""
        outcome: Outcome = "FAIL" if scale.is_off else "pass"
        error = abs(scale.factor - 1)
        self._add(name, how, "scale", outcome, error=error, tolerance=scale.allowed, note=note)

    def _quantized_limit(self) -> float:
        """How far quantized weights may lead in all."""
        if not self._quantization:
            return 0.0
        return min(self._tolerance + _STEPS * self._quantization, _MOST_QUANTIZED)

    def ids(
        self,
        name: str,
        value: ArrayLike,
        *,
        reference: ArrayLike | None = None,
        how: str = "",
        excuse: str = "",
    ) -> None:
        """Compare integers, which must be identical; with an `excuse` others are an expected difference."""
        if reference is None and name not in self.references:
            return
        expected = self.references[name] if reference is None else np.asarray(reference)
        self._compared.add(name)
        given = np.asarray(value)
        same = given.shape == expected.shape and bool((given == expected).all())
        if same or not excuse or given.shape != expected.shape:
            self._add(name, how, "ids", "pass" if same else "FAIL", identical=same)
        else:
            self._add(name, how, "ids", "expected difference", identical=False, note=excuse)

    def is_near(self, value: ArrayLike, reference: ArrayLike) -> NDArray[np.bool_]:
        """Which rows (…) of values (…, D) are within the tolerance of the largest of all references."""
        given, expected = np.asarray(value, np.float64), np.asarray(reference, np.float64)
        limit = self._tolerance * np.abs(expected).max(initial=0.0)
        return np.asarray(np.abs(given - expected).max(axis=-1) <= limit)  # of NaN False

    def text(self, name: str, value: str | Sequence[str], reference: str | Sequence[str]) -> None:
        """Compare strings."""
        same = value == reference if isinstance(value, str) else list(value) == list(reference)
        note = "" if same else f"{value!r} is not {reference!r}"[:200]
        self._add(name, "", "text", "pass" if same else "FAIL", identical=same, note=note)

    def share(self, name: str, *, same: int, total: int, minimum: float, note: str = "") -> None:
        """Compare counted cases: at least `minimum` of them must be identical."""
        missing = 1 - same / total if total else 0.0
        outcome: Outcome = "pass" if missing <= 1 - minimum + 1e-9 else "FAIL"
        note = f"{same} of {total} identical{'; ' if note else ''}{note}"
        self._add(name, "", "share", outcome, error=missing, tolerance=round(1 - minimum, 4), note=note)

    def differs(self, name: str, value: ArrayLike, why: str) -> None:
        """Report a reference that records another variant, which this implementation does not follow."""
        if name not in self.references:
            return
        self._compared.add(name)
        error = relative_error(np.asarray(value), self.references[name])
        self._add(name, "", "tensor", "expected difference", error=error, note=why)

    def claim(self, name: str, holds: bool, what: str) -> None:
        """Record that a rule holds, or does not."""
        self._compared.add(name)
        self._add(name, "", "text", "pass" if holds else "FAIL", identical=holds, note=what)

    def skip(self, name: str, why: str) -> None:
        self._add(name, "", "text", "not checked", note=why)

    @contextmanager
    def case(self, name: str) -> Iterator[None]:
        """A block whose MingcError counts as a failure of `name`, so that other cases are still replayed."""
        try:
            yield
        except MingcError as error:
            self._add(name, "", "text", "FAIL", note=f"{type(error).__name__}: {error.message}")

    def not_outputs(self) -> list[str]:
        """References that were neither compared nor fed in."""
        return [name for name in self.references if name not in self._compared | self._inputs]

    def summary(self, note: str = "") -> FileSummary:
        checked = [each for each in self.comparisons if each.outcome != "not checked"]
        bounded = [each.error for each in checked if each.error is not None and each.tolerance is not None]
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
            error, note = None, note or "another shape, or not finite"
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
