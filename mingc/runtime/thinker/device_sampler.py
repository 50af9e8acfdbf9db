"""Batched token sampling on the device, without host synchronization, so that a CUDA graph can contain it.

The rules, their order and the one uniform number per token are those of `mingc.runtime.thinker.sampler`, the reference.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.runtime.request import SamplingParams

NOT_FINITE = -1  # instead of a token id, for a row whose logits are not finite
MAX_BANNED = 20  # tokens of one row that must not be sampled
_NUM_RULES = 6
NUM_COLUMNS = _NUM_RULES + MAX_BANNED


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


def sample_greedy(logits: Tensor) -> Tensor:
    """The most likely tokens (B,) int64 of logits (B, V); `NOT_FINITE` for a row with NaN or inf."""
    highest, ids = logits.max(dim=-1)  # a NaN anywhere in a row becomes its maximum
    return torch.where(torch.isfinite(highest), ids, NOT_FINITE)


def sample_tokens(logits: Tensor, sampling: Tensor, seen: Tensor) -> Tensor:
    """Sample the next token of each row with its own parameters.

    Args:
        logits: (B, V) float32.
        sampling: (B, NUM_COLUMNS) float32.
        seen: (B, V) bool, tokens of prompt and answer, for the repetition penalty.

    Returns: (B,) int64; `NOT_FINITE` for a row with NaN or inf.
    """
    rules, banned = sampling[:, :_NUM_RULES], sampling[:, _NUM_RULES:]
    temperature, top_k, top_p, min_p, penalty, point = rules.unsqueeze(-1).unbind(1)
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen & (penalty != 1.0), penalized, logits)
    # Added up, as padding stands for token 0, which may be banned as well.
    num_bans = torch.zeros_like(logits).scatter_add(
        1, (banned.long() - 1).clamp_min(0), (banned > 0).to(logits)
    )
    logits = logits.masked_fill(num_bans > 0, float("-inf"))
    greedy = sample_greedy(logits)
    values, ids = logits.sort(dim=-1, descending=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    is_in_top_k = (rank < top_k) | (top_k < 1.0)
    scaled = (values - values[:, :1]) / torch.where(temperature > 0.0, temperature, 1.0)
    # In descending order, so the kept tokens are a prefix.
    probabilities = torch.softmax(scaled.masked_fill(~is_in_top_k, float("-inf")), dim=-1)
    is_beyond_top_p = probabilities.cumsum(-1) - probabilities >= top_p
    keep = is_in_top_k & ~(is_beyond_top_p & (top_p < 1.0)) & (probabilities >= min_p * probabilities[:, :1])
    keep = keep | (rank == 0)
    # In order of id, as on the host: the order of probabilities would depend on rounding for equally likely tokens.
    kept = torch.zeros_like(probabilities).scatter(1, ids, probabilities * keep)
    cumulative = kept.cumsum(-1)
    total = cumulative[:, -1:]
    index = (cumulative <= point * total).sum(-1)
    sampled = torch.minimum(index, (cumulative < total).sum(-1))
    is_random = ((temperature > 0.0) & (top_k != 1.0)).squeeze(1)
    return torch.where(is_random & (greedy != NOT_FINITE), sampled, greedy)
