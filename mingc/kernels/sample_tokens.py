"""Sampling of the next token of each row: repetition penalty, banned tokens, temperature, top_k, top_p and min_p.

top_k and top_p keep the first of the tokens sorted by logit. The torch reference sorts the vocabulary; the kernel only
finds the last token kept: by a histogram of the logits, then by a search in one bin (spec: thinker.md §7).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mingc.kernels.dispatch import use_triton_float32

NOT_FINITE = -1  # instead of a token id, for a row whose logits are not finite
MAX_BANNED = 20  # tokens of one row that must not be sampled
NUM_RULES = 6  # columns of `sampling` before the banned tokens
NUM_COLUMNS = NUM_RULES + MAX_BANNED
_MAX_VOCAB = (1 << 19) - 1  # whose probabilities, added up as integers, fit into 64 bits


def sample_tokens(logits: Tensor, sampling: Tensor, seen: Tensor) -> Tensor:
    """Sample the next token of each row with its own parameters; on a GPU with kernels, without a sort.

    Equal logits rank in order of id. The kernel adds probabilities exactly, the reference in float32: their tokens
    differ where the uniform number lies within this rounding error of the border between two tokens.

    Args:
        logits: (B, V) float32, also of engines that compute in bfloat16: their logits are bfloat16 values.
        sampling: (B, NUM_COLUMNS) float32: temperature, top_k, top_p, min_p, repetition penalty, uniform number;
            then one more than each banned token, padded with 0.
        seen: (B, V) bool, tokens of prompt and answer, for the repetition penalty.

    Returns: (B,) int64; `NOT_FINITE` for a row with NaN or inf.
    """
    if use_triton_float32(logits) and logits.shape[1] <= _MAX_VOCAB:
        from mingc.kernels.triton import sample_tokens as gpu

        sampled: Tensor = gpu.sample_tokens(logits, sampling, seen, NUM_RULES)
        return sampled
    return sort_and_sample(logits, sampling, seen)


def sample_greedy(logits: Tensor) -> Tensor:
    """The most likely tokens (B,) int64 of logits (B, V); `NOT_FINITE` for a row with NaN or inf."""
    highest, ids = logits.max(dim=-1)  # a NaN anywhere in a row becomes its maximum
    return torch.where(torch.isfinite(highest), ids, NOT_FINITE)


def sort_and_sample(logits: Tensor, sampling: Tensor, seen: Tensor) -> Tensor:
    """The reference of `sample_tokens`, on any device."""
    rules, banned = sampling[:, :NUM_RULES], sampling[:, NUM_RULES:]
    temperature, top_k, top_p, min_p, penalty, point = rules.unsqueeze(-1).unbind(1)
    penalized = torch.where(logits > 0, logits / penalty, logits * penalty)
    logits = torch.where(seen & (penalty != 1.0), penalized, logits)
    # Added up, as padding stands for token 0, which may be banned as well.
    num_bans = torch.zeros_like(logits).scatter_add(
        1, (banned.long() - 1).clamp_min(0), (banned > 0).to(logits)
    )
    logits = logits.masked_fill(num_bans > 0, float("-inf"))
    greedy = sample_greedy(logits)
    values, ids = logits.sort(dim=-1, descending=True, stable=True)
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
