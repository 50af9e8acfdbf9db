"""Fit of a layer's two sublayers to a recorded residual update: which of them has a wrong scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from mingc.verify.scale import Array, Scale, fitted_scale


class SublayerFit:
    """Fits the outputs of a layer's two sublayers, attention and feed-forward, to the recorded residual update."""

    def __init__(self) -> None:
        self._products: NDArray[np.float64] = np.zeros((3, 3))
        self._count = 0

    def add(self, attention: Array, feed_forward: Array, recorded: Array) -> None:
        """Add tokens (T, D): the output of each sublayer, and the recorded sum of both."""
        rows = np.stack([each.astype(np.float64).ravel() for each in (attention, feed_forward, recorded)])
        self._products += rows @ rows.T
        self._count += rows.shape[1]

    def scales(self) -> Iterator[tuple[str, Scale]]:
        """Yield name and scale of each sublayer; nothing with too few values for a fit."""
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
            yield name, fitted_scale(factor, error=float(error), lost=rest / size if size else 0.0)


def worst_scale(scales: Mapping[str, Scale]) -> tuple[str, Scale]:
    """Name and value of the scale that exceeds its allowance the most."""
    return max(scales.items(), key=lambda each: abs(each[1].factor - 1) - each[1].allowed)
