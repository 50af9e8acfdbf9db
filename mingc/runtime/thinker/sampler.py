"""Token sampling on the host: the reference of `device_sampler`, and in use when the worker does not sample.

The only randomness is one uniform number per token, derived from the seed of the request and the index of the token. So
the tokens of a request depend neither on other requests of the batch nor on the order of steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mingc.runtime.noise import philox_key
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.logit_edits import edit_logits, logit_edits, needs_edits
from mingc.runtime.thinker.token_matcher import MaskWords

_STREAM = 1  # second word of the Philox key, distinct from the noise of speech (mingc.runtime.noise)


@dataclass(slots=True)
class SamplerRow:
    """Sampling state of one request.

    Attributes:
        step: index of the next token; the first token of the answer has 0.
        seen: (V,) bool on the device of the logits, tokens of prompt and answer; None without penalties.
        counts: (V,) int32, how often tokens occur in the answer; None if `seen` is.
        stop_ids: tokens that end the answer.
    """

    params: SamplingParams
    seed: int
    step: int = 0
    seen: Tensor | None = None
    counts: Tensor | None = None
    stop_ids: tuple[int, ...] = ()

    @classmethod
    def begin(
        cls,
        params: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        vocab_size: int,
        device: torch.device,
        stop_ids: tuple[int, ...] = (),
    ) -> SamplerRow:
        row = cls(params, seed, stop_ids=stop_ids)
        if (params.repetition_penalty, params.presence_penalty, params.frequency_penalty) != (1.0, 0.0, 0.0):
            row.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            row.counts = torch.zeros(vocab_size, dtype=torch.int32, device=device)
            ids = torch.tensor(prompt_ids, dtype=torch.int64, device=device)
            row.seen[ids[(ids >= 0) & (ids < vocab_size)]] = True
        return row

    def banned(self, num_pending: int = 0) -> tuple[int, ...]:
        """Tokens that must not be sampled next, or after `num_pending` further tokens."""
        is_short = self.step + num_pending < self.params.min_tokens
        return tuple(dict.fromkeys((*(self.stop_ids if is_short else ()), *self.params.banned_tokens)))

    def advance(self, token: int) -> None:
        """Record the sampled token."""
        self.step += 1
        if self.seen is not None and self.counts is not None:
            self.seen[token] = True
            self.counts[token] += 1


def uniform(seed: int, step: int) -> float:
    """Uniform number in [0, 1) for (seed, step): Philox keyed by the seed, counter = step."""
    bits = np.random.Philox(key=philox_key(seed, _STREAM), counter=[step, 0, 0, 0])
    return float(np.random.Generator(bits).random())


def sample(
    logits: Tensor, rows: Sequence[SamplerRow], masks: Sequence[MaskWords | None] | None = None
) -> list[int | None]:
    """Sample the next token of each row; None for a row whose logits are not finite.

    Rules in order: those of `logit_edits`, bans, temperature, top_k, top_p, min_p (spec: thinker.md §7).

    Args:
        logits: (B, V) float32 with B ≥ len(rows); further rows are padding.
        masks: bits of the tokens that each row's constraint allows; None: all rows are free.
    """
    logits = logits[: len(rows)]
    masks = masks or [None] * len(rows)
    if any(
        row.seen is not None or row.banned() or needs_edits(row.params, mask)
        for row, mask in zip(rows, masks, strict=True)
    ):
        edited = [
            _edited(logits[i], row, mask) for i, (row, mask) in enumerate(zip(rows, masks, strict=True))
        ]
        logits = torch.stack(edited)
    highest, greedy = logits.max(dim=-1)  # a NaN anywhere in a row becomes its maximum
    is_finite = torch.isfinite(highest).tolist()
    ids: list[int | None] = [
        token if finite else None for token, finite in zip(greedy.tolist(), is_finite, strict=True)
    ]
    for i, row in enumerate(rows):
        if ids[i] is not None and row.params.draws:
            ids[i] = _sample_row(logits[i], row.params, uniform(row.seed, row.step))
    return ids


def _edited(logits: Tensor, row: SamplerRow, mask: MaskWords | None) -> Tensor:
    """Logits (V,) after edits and bans."""
    if row.seen is not None or needs_edits(row.params, mask):
        seen, counts = (None if each is None else each[None] for each in (row.seen, row.counts))
        logits = edit_logits(logits[None], logit_edits([row.params], [row.banned()], [mask]), seen, counts)[0]
    return _ban(logits, row.banned() if mask is None else ())


def _ban(logits: Tensor, banned: Sequence[int]) -> Tensor:
    """Logits (V,) in which `banned` tokens have no probability."""
    if not banned:
        return logits
    return logits.index_fill(0, torch.tensor(banned, device=logits.device), -torch.inf)


def _sample_row(logits: Tensor, params: SamplingParams, point: float) -> int:
    """Sample a token from logits (V,): the position of `point` in the cumulative probabilities of the kept tokens."""
    top_k = params.top_k if 0 < params.top_k < logits.shape[0] else logits.shape[0]
    values, ids = torch.topk(logits, top_k, sorted=True)
    # `values` are in descending order, so the kept tokens are a prefix.
    probabilities = torch.softmax((values - values[0]) / params.temperature, dim=-1)
    keep = torch.ones_like(probabilities, dtype=torch.bool)
    if params.top_p < 1.0:
        keep &= probabilities.cumsum(0) - probabilities < params.top_p
    if params.min_p > 0.0:
        keep &= probabilities >= params.min_p * probabilities[0]
    keep[0] = True
    # Tokens are in order of id, because the order of equal probabilities would depend on rounding.
    kept, order = ids[keep].sort()
    cumulative = probabilities[keep][order].cumsum(0)
    index = int(torch.searchsorted(cumulative, point * cumulative[-1], right=True))
    last = int((cumulative < cumulative[-1]).sum())
    return int(kept[min(index, last)])
