"""The error measure of every comparison."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch

    Array = NDArray[np.generic] | torch.Tensor


def relative_error(value: Array, reference: Array) -> float:
    """max |value - reference| / max |reference|; the absolute error when the reference is zero.

    Infinite for NaN, inf or a different shape, 0 for empty arrays.
    """
    if tuple(value.shape) != tuple(reference.shape):
        return float("inf")
    given, expected = _float64(value), _float64(reference)
    if not expected.size:
        return 0.0
    if not np.isfinite(given).all():
        return float("inf")
    scale = float(np.abs(expected).max())
    error = float(np.abs(given - expected).max())
    return error / scale if scale else error


def _float64(value: Array) -> NDArray[np.float64]:
    """A copy on the host. torch converts tensors, as numpy has no bfloat16."""
    if isinstance(value, np.ndarray):
        return value.astype(np.float64)
    converted: NDArray[np.float64] = value.detach().cpu().double().numpy()
    return converted
