"""Least-squares scale factor between values and references: a tight check where per-value tolerances are loose.

Rounding errors have random signs and hardly move a fitted factor; a wrong scale moves it by its full error.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


def fitted_scale(factor: float, *, error: float, lost: float) -> Scale:
    """Give a fitted factor its allowance.

    Args:
        error: standard error of the fit.
        lost: squared residual of the fit, relative to the squared reference. Values rotated by a small angle are
            shorter along the reference by about the square of the angle.
    """
    return Scale(factor=factor, allowed=_LIMIT + _ERRORS * error + lost)


def fit_scale(value: Array, reference: Array) -> Scale | None:
    """Fit the scale of finite values of any shape; None when the reference is all zeros."""
    given, expected = value.astype(np.float64).ravel(), reference.astype(np.float64).ravel()
    size = float(expected @ expected)
    if not size:
        return None
    lost = float(np.square(given - expected).sum()) / size
    return fitted_scale(float(given @ expected) / size, error=(lost / len(expected)) ** 0.5, lost=lost)
