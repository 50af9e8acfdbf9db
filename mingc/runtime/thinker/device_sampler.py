"""Sampling rules of requests as the numbers that a step on the device reads (`mingc.kernels.sample_tokens`).

The rules, their order and the one uniform number per token are those of `mingc.runtime.thinker.sampler`, the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mingc.kernels.sample_tokens import MAX_BANNED
from mingc.runtime.request import SamplingParams


def sampling_columns(params: SamplingParams, point: float, banned: Sequence[int] = ()) -> tuple[float, ...]:
    """One row of `sampling`: temperature, top_k, top_p, min_p, repetition penalty, uniform number; then one more than
    each banned token, padded with 0. All are exact in float32.
    """
    return (
        params.temperature if params.draws else 0.0,
        float(params.top_k),
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        point,
        *(float(token + 1) for token in banned),
        *(0.0,) * (MAX_BANNED - len(banned)),
    )


def needs_sampling(sampling: NDArray[np.float64]) -> bool:
    """Whether any row of `sampling` (n, NUM_COLUMNS) needs more than greedy sampling."""
    temperature, top_k, _, _, penalty, _, *banned = sampling.T
    is_random = (temperature > 0.0) & (top_k != 1.0)
    return bool((is_random | (penalty != 1.0)).any() or np.any(banned))
