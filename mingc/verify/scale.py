"""Least-squares scale factor between values and references: a tight check where per-value tolerances are loose.

Rounding errors have random signs and hardly move a fitted factor; a wrong scale moves it by its full error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Array = NDArray[np.generic]

# Systematic error that rounding may leave; engines of the tiny checkpoint in bfloat16 stay within 0.005.
_LIMIT = 1e-2
_ERRORS = 3.0  # further allowance, in standard errors of the fit


@dataclass(frozen=True, kw_only=True, slots=True)
class Scale:
    """A fitted factor and its allowed distance from 1."""

    factor: float
    allowed: float

    @property
    def is_off(self) -> bool:
        return not abs(self.factor - 1) <= self.allowed

    def describe(self) -> str:
        return f"{self.factor:.3f} times the reference; allowed: 1 ± {self.allowed:.3f}"


def fit_scale(value: Array, reference: Array) -> Scale | None:
    """The scale of finite values of any shape; None when the reference is all zeros."""
    given, expected = value.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    size = float(expected @ expected)
    if not size:
        return None
    # A vector rotated by a small angle is shorter along the reference by about the square of the angle.
    lost = float(np.square(given - expected).sum()) / size
    allowed = _LIMIT + _ERRORS * (lost / len(expected)) ** 0.5 + lost
    return Scale(factor=float(given @ expected) / size, allowed=allowed)


class SublayerFit:
    """Fits the outputs of a layer's two sublayers, attention and feed-forward, to the recorded residual update."""

    def __init__(self) -> None:
        self._products: Floats = np.zeros((3, 3))
        self._count = 0

    def add(self, attention: Array, feed_forward: Array, recorded: Array) -> None:
        """Add tokens (T, D): the output of each sublayer, and the recorded sum of both."""
        rows = np.stack([each.astype(np.float64).ravel() for each in (attention, feed_forward, recorded)])
        self._products += rows @ rows.T
        self._count += rows.shape[1]

    def scales(self) -> Iterator[tuple[str, Scale]]:
        """The scale of each sublayer by name; nothing with too few values for a fit."""
        if self._count <= 2:
            return
        inverse = np.linalg.pinv(self._products[:2, :2])
        found = inverse @ self._products[:2, 2]
        size = float(self._products[2, 2])
        rest = max(0.0, size - float(found @ self._products[:2, 2]))
        errors = np.sqrt(rest / (self._count - 2) * np.diag(inverse).clip(0))
        for name, share, error in zip(("attention", "feed_forward"), found, errors, strict=True):
            # The fit is reference / value; a scale is value / reference.
            factor = 1 / float(share) if share else float("inf")
            yield (
                name,
                Scale(
                    factor=factor, allowed=_LIMIT + _ERRORS * float(error) + (rest / size if size else 0.0)
                ),
            )


def worst_scale(scales: Mapping[str, Scale]) -> tuple[str, Scale]:
    """Name and scale of the one that exceeds its allowance the most."""
    return max(scales.items(), key=lambda each: abs(each[1].factor - 1) - each[1].allowed)
