"""Logits → token ids on the device, for a whole batch at once and without waiting for it: what a CUDA graph can hold.

The rules, their order and the one uniform number a token are those of `mingc.runtime.thinker.sampler`, which is the
reference.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.runtime.request import SamplingParams

NOT_FINITE = -1  # in the place of a token whose logits are not finite
NUM_COLUMNS = 6


def sampling_columns(params: SamplingParams, point: float) -> tuple[float, ...]:
    """A request's row of `sampling`: temperature, top_k, top_p, min_p, repetition penalty, uniform number."""
    return (
        params.temperature if params.draws else 0.0,
        float(params.top_k),
        params.top_p,
        params.min_p,
        params.repetition_penalty,
        point,
    )


def needs_sampling(sampling: NDArray[np.float64]) -> bool:
    """Whether any row of `sampling` (n, NUM_COLUMNS) wants more than the likeliest token."""
    temperature, top_k, *_, penalty, _ = sampling.T
    return bool((((temperature > 0.0) & (top_k != 1.0)) | (penalty != 1.0)).any())


def sample_greedy(logits: Tensor) -> Tensor:
    """(B,) int64 of (B, V) logits; `NOT_FINITE` for a row with NaN or inf."""
    highest, ids = logits.max(dim=-1)  # a NaN anywhere in a row becomes its maximum
    return torch.where(torch.isfinite(highest), ids, NOT_FINITE)


def sample_tokens(logits: Tensor, sampling: Tensor, seen: Tensor) -> Tensor:
    """The next token of each row by its own rules.

    Args:
        logits: (B, V) float32.
        sampling: (B, NUM_COLUMNS) float32.
        seen: (B, V) bool, tokens of prompt and answer.

    Returns: (B,) int64; `NOT_FINITE` for a row with NaN or inf.
    """
    temperature, top_k, top_p, min_p, penalty, point = sampling.unsqueeze(-1).unbind(1)
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen & (penalty != 1.0), lowered, logits)
    likeliest = sample_greedy(logits)
    values, ids = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    is_within = (rank < top_k) | (top_k < 1.0)
    scaled = (values - values[:, :1]) / torch.where(temperature > 0.0, temperature, 1.0)
    # Highest first, so the largest probability is the first one and the kept ones are a prefix.
    probabilities = torch.softmax(scaled.masked_fill(~is_within, float("-inf")), dim=-1)
    is_enough = probabilities.cumsum(-1) - probabilities >= top_p
    keep = is_within & ~(is_enough & (top_p < 1.0)) & (probabilities >= min_p * probabilities[:, :1])
    keep = keep | (rank == 0)
    # By id, as the host does: places of tokens that are equally likely but for rounding must not depend on it.
    kept = torch.zeros_like(probabilities).scatter(1, ids, probabilities * keep)
    cumulated = kept.cumsum(-1)
    total = cumulated[:, -1:]
    index = (cumulated <= point * total).sum(-1)
    drawn = torch.minimum(index, (cumulated < total).sum(-1))
    is_drawn = ((temperature > 0.0) & (top_k != 1.0)).squeeze(1)
    return torch.where(is_drawn & (likeliest != NOT_FINITE), drawn, likeliest)
