"""By which factor values are as large as their references: narrow where the bounds of single values are wide.

Roundings point anywhere, so they hardly move a factor fitted by least squares. A wrong scale moves it by all that it is
wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Array = NDArray[np.generic]

# What roundings may leave of systematic error; engines of the tiny checkpoint in bfloat16 are within 0.005.
_LIMIT = 1e-2
_ERRORS = 3.0  # standard errors of a fit that it may be off besides


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A fitted factor, and how far from 1 it may be."""

    factor: float
    allowed: float

    @property
    def is_off(self) -> bool:
        return not abs(self.factor - 1) <= self.allowed

    def told(self) -> str:
        return f"{self.factor:.3f} times the reference, allowed is 1 within {self.allowed:.3f}"


def fit_scale(value: Array, reference: Array) -> Scale | None:
    """Of finite values of any shape; None when the reference is all zeros."""
    given, expected = value.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    size = float(expected @ expected)
    if not size:
        return None
    # What has lost its direction by an angle is shorter along the reference by about the square of it.
    lost = float(np.square(given - expected).sum()) / size
    allowed = _LIMIT + _ERRORS * (lost / len(expected)) ** 0.5 + lost
    return Scale(factor=float(given @ expected) / size, allowed=allowed)


class HalvesFit:
    """Fits what both halves of a layer add to the stream to what is recorded that the layer adds."""

    def __init__(self) -> None:
        self._products: Floats = np.zeros((3, 3))
        self._count = 0

    def add(self, attention: Array, feed_forward: Array, recorded: Array) -> None:
        """More tokens: what each half adds and what both should (T, D)."""
        rows = np.stack([each.astype(np.float64).ravel() for each in (attention, feed_forward, recorded)])
        self._products += rows @ rows.T
        self._count += rows.shape[1]

    def scales(self) -> Iterator[tuple[str, Scale]]:
        """Of each half by name, when there are more numbers than are fitted."""
        if self._count <= 2:
            return
        inverse = np.linalg.pinv(self._products[:2, :2])
        found = inverse @ self._products[:2, 2]
        size = float(self._products[2, 2])
        rest = max(0.0, size - float(found @ self._products[:2, 2]))
        errors = np.sqrt(rest / (self._count - 2) * np.diag(inverse).clip(0))
        for name, share, error in zip(("attention", "feed_forward"), found, errors, strict=True):
            # The record is so many times what was given: the reverse of a value's scale.
            factor = 1 / float(share) if share else float("inf")
            yield (
                name,
                Scale(
                    factor=factor, allowed=_LIMIT + _ERRORS * float(error) + (rest / size if size else 0.0)
                ),
            )


def worst_scale(scales: Mapping[str, Scale]) -> tuple[str, Scale]:
    """The one that is furthest beyond what is allowed, with its name."""
    return max(scales.items(), key=lambda each: abs(each[1].factor - 1) - each[1].allowed)
