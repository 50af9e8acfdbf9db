"""Logits → token ids, each row by its own rules and its own noise.

The only randomness is one uniform number a token, made from the request's seed and the token's index: what a
request gets depends neither on its neighbours in the batch nor on the order of the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mingc.runtime.noise import philox_key
from mingc.runtime.request import SamplingParams

_STREAM = 1  # second word of the key, apart from the noise of speech (mingc.runtime.noise)


@dataclass(slots=True)
class SamplerRow:
    """The sampling state of one request.

    Attributes:
        step: index of the token to be chosen, 0 for the first one of the answer.
        seen: (V,) bool on the logits' device, tokens of prompt and answer; kept only for a repetition penalty.
    """

    params: SamplingParams
    seed: int
    step: int = 0
    seen: Tensor | None = None

    @classmethod
    def begin(
        cls,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> SamplerRow:
        row = cls(params, seed)
        if params.repetition_penalty != 1.0:
            row.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            ids = torch.tensor(prompt_ids, dtype=torch.int64, device=device)
            row.seen[ids[(ids >= 0) & (ids < vocab_size)]] = True
        return row

    def advance(self, token: int) -> None:
        """Record the chosen token."""
        self.step += 1
        if self.seen is not None:
            self.seen[token] = True


def uniform(seed: int, step: int) -> float:
    """A number in [0, 1) that belongs to (seed, step): Philox keyed by the seed, counter = step."""
    bits = np.random.Philox(key=philox_key(seed, _STREAM), counter=[step, 0, 0, 0])
    return float(np.random.Generator(bits).random())


def sample(logits: Tensor, rows: Sequence[SamplerRow]) -> list[int | None]:
    """The next token of each row; None for a row whose logits are not finite.

    The rules in order: repetition penalty, temperature, top_k, top_p, min_p (spec: thinker.md §7).

    Args:
        logits: (B, V) float32 with B ≥ len(rows); rows beyond are padding.
    """
    logits = logits[: len(rows)]
    if any(row.seen is not None for row in rows):
        logits = torch.stack([_penalize(logits[i], row) for i, row in enumerate(rows)])
    highest, greedy = logits.max(dim=-1)  # a NaN anywhere in a row becomes its maximum
    is_finite = torch.isfinite(highest).tolist()
    ids: list[int | None] = [
        token if fine else None for token, fine in zip(greedy.tolist(), is_finite, strict=True)
    ]
    for i, row in enumerate(rows):
        if ids[i] is not None and row.params.draws:
            ids[i] = _draw(logits[i], row.params, uniform(row.seed, row.step))
    return ids


def _penalize(logits: Tensor, row: SamplerRow) -> Tensor:
    """(V,) logits with those of seen tokens divided (positive) or multiplied (negative) by the penalty."""
    if row.seen is None:
        return logits
    penalty = row.params.repetition_penalty
    lowered = torch.where(logits > 0, logits / penalty, logits * penalty)
    return torch.where(row.seen, lowered, logits)


def _draw(logits: Tensor, params: SamplingParams, point: float) -> int:
    """A token of (V,) logits: the place of `point` in the cumulated probabilities of what the rules keep."""
    top_k = params.top_k if 0 < params.top_k < logits.shape[0] else logits.shape[0]
    values, ids = torch.topk(logits, top_k, sorted=True)
    # Highest first, so the largest probability is the first one and the kept ones are a prefix.
    probabilities = torch.softmax((values - values[0]) / params.temperature, dim=-1)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if params.top_p < 1.0:
        keep &= probabilities.cumsum(0) - probabilities < params.top_p
    if params.min_p > 0.0:
        keep &= probabilities >= params.min_p * probabilities[0]
    keep[0] = True
    # By id: in the order of probabilities, rounding would exchange the places of tokens that are equally likely.
    kept, order = ids[keep].sort()
    cumulated = probabilities[keep][order].cumsum(0)
    index = int(torch.searchsorted(cumulated, point * cumulated[-1], right=True))
    last = int((cumulated < cumulated[-1]).sum())
    return int(kept[min(index, last)])
