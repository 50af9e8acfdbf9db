"""Edits of the logits of single rows before their tokens are sampled, and log probabilities of the raw logits.

Host and device edit with the same torch operations, in this order (each rule sees what the ones before it left):

1. repetition penalty: divides positive and multiplies negative logits of tokens in prompt and answer;
2. presence and frequency penalty: `logit -= frequency · count + presence · (count > 0)`, counts of the answer's tokens;
3. bias: added, so a bias of 100 is no absolute force; one of -100 bans;
4. mask of the answer's constraint: all other tokens become impossible.

`sample` follows with bans, temperature, top_k, top_p and min_p. A constraint is stronger than any ban: where it allows
nothing but banned tokens (the answer is complete, but shorter than `min_tokens`), they are sampled.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.step import Ints
from mingc.runtime.thinker.token_matcher import MaskWords

MAX_LOGPROBS = 20
_BAN = -100.0  # biases down to this ban


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LogitEdits:
    """Edits of k rows, as arrays. What no row needs is None.

    Attributes:
        penalties: (k, 3) float32: repetition, presence, frequency.
        bias_ids: (k, b) int64 tokens, padded with token 0.
        bias: (k, b) float32, padded with 0.
        mask: (k, ceil(V / 32)) int32, bits of allowed tokens.
    """

    penalties: NDArray[np.float32] | None
    bias_ids: Ints | None
    bias: NDArray[np.float32] | None
    mask: MaskWords | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SampleOptions:
    """What rank 0 does with the logits of a step besides sampling. Other ranks do not: they take its tokens.

    Attributes:
        with_logits: return the raw logits of all requests, too.
        logprob_rows: (n,) int64, requests of the step whose `top_logprobs` are returned.
        edited_rows: (k,) int64, requests of the step that `edits` are for.
        answers: of first tokens: answers of the k requests so far, which a preempted one has; None: of other tokens.
    """

    with_logits: bool = False
    logprob_rows: Ints | None = None
    edited_rows: Ints | None = None
    edits: LogitEdits | None = None
    answers: tuple[Ints, ...] | None = None


NO_OPTIONS = SampleOptions()


def needs_edits(params: SamplingParams, mask: MaskWords | None) -> bool:
    """Whether a row has rules that `sample` does not apply."""
    return bool(mask is not None or params.presence_penalty or params.frequency_penalty or params.logit_bias)


def logit_edits(
    params: Sequence[SamplingParams], banned: Sequence[Sequence[int]], masks: Sequence[MaskWords | None]
) -> LogitEdits:
    """Edits of rows with these rules. `banned`: tokens that `sample` bans in rows without a mask."""
    penalties = np.array(
        [(each.repetition_penalty, each.presence_penalty, each.frequency_penalty) for each in params],
        np.float32,
    )
    biases = [_biases(*row) for row in zip(params, masks, strict=True)]
    width = max(map(len, biases))
    ids, values = np.zeros((len(biases), width), np.int64), np.zeros((len(biases), width), np.float32)
    for row, pairs in enumerate(biases):
        for place, (token, bias) in enumerate(pairs):
            ids[row, place], values[row, place] = token, bias
    given = next((mask for mask in masks if mask is not None), None)
    return LogitEdits(
        penalties=penalties if np.any(penalties != (1.0, 0.0, 0.0)) else None,
        bias_ids=ids if width else None,
        bias=values if width else None,
        mask=None
        if given is None
        else np.stack(
            [
                np.full_like(given, -1) if mask is None else _without(mask, bans)
                for mask, bans in zip(masks, banned, strict=True)
            ]
        ),
    )


def _biases(params: SamplingParams, mask: MaskWords | None) -> list[tuple[int, float]]:
    """A bias that bans is finite beside a mask, which may allow nothing else."""
    bans = mask is None
    return [(token, -np.inf if bans and bias <= _BAN else bias) for token, bias in params.logit_bias]


def _without(mask: MaskWords, banned: Sequence[int]) -> MaskWords:
    """The mask without `banned` tokens, unless it allows nothing else."""
    left = mask.copy()
    bits = left.view(np.uint32)
    for token in banned:
        bits[token // 32] &= np.uint32(0xFFFFFFFF ^ 1 << token % 32)
    return left if left.any() else mask


def edit_logits(logits: Tensor, edits: LogitEdits, seen: Tensor | None, counts: Tensor | None) -> Tensor:
    """Edited logits (k, V) float32. Values that are not finite stay: they fail their row.

    Args:
        logits: (k, V) float32.
        seen: (k, V) bool, tokens of prompt and answer; needed if there are penalties, like `counts`.
        counts: (k, V) integers, tokens of the answer.
    """
    if edits.penalties is not None:
        assert seen is not None and counts is not None, "penalties need counts"
        repetition, presence, frequency = upload(edits.penalties, logits.device).unsqueeze(-1).unbind(1)
        penalized = torch.where(logits > 0, logits / repetition, logits * repetition)
        logits = torch.where(seen & (repetition != 1.0), penalized, logits)
        logits = logits - (frequency * counts + presence * (counts > 0))
    if edits.bias_ids is not None and edits.bias is not None:
        ids, bias = upload(edits.bias_ids, logits.device), upload(edits.bias, logits.device)
        logits = logits.scatter_add(1, ids, bias)
    if edits.mask is not None:
        words = upload(edits.mask, logits.device).unsqueeze(-1)
        bits = words >> torch.arange(32, dtype=torch.int32, device=logits.device)
        is_allowed = (bits & 1).bool().flatten(1)[:, : logits.shape[1]]
        logits = torch.where(is_allowed | ~logits.isfinite(), logits, -torch.inf)
    return logits


def top_logprobs(logits: Tensor, tokens: Tensor) -> Tensor:
    """Log probabilities of raw logits (k, V) float32: of `tokens` (k,), then of the most likely ones, then their ids.

    Returns: (k, 1 + 2 m) float32 with m = `MAX_LOGPROBS` or V; in descending order, equal ones in order of id.
    """
    num_top = min(MAX_LOGPROBS, logits.shape[1])
    logprobs = logits - logits.logsumexp(1, keepdim=True)
    # Integers in the order of the logits, then of the ids: `topk` gives no order to equal values.
    bits = (logits + 0.0).view(torch.int32)  # the two zeros are equal
    keys = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long() << 32
    top = (keys - torch.arange(logits.shape[1], device=logits.device)).topk(num_top).values
    ids = -top & 0xFFFFFFFF
    sampled = logprobs.gather(1, tokens.clamp_min(0).unsqueeze(1))
    return torch.cat([sampled, logprobs.gather(1, ids), ids.float()], dim=1)


def upload(values: NDArray[np.generic], device: torch.device) -> Tensor:
    """`values` on `device`, without waiting for work that was launched before."""
    tensor = torch.from_numpy(values)
    if device.type == "cuda":
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
