"""Sampling on the device: the state of each slot, and the rules of a request as numbers that a step reads.

The rules, their order and the uniform number of each token follow the reference, `mingc.runtime.thinker.sampler`.
Rules that few requests have are edits of their rows (`logit_edits`), launched between the layers and the sampling.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.kernels.sample_tokens import MAX_BANNED, sample_greedy, sort_and_sample
from mingc.runtime.distributed.process_group import broadcast_from_rank0_
from mingc.runtime.engines.base import Graph
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.logit_edits import LogitEdits, edit_logits, upload
from mingc.runtime.thinker.step import Ints, PrefillStep

log = logging.getLogger("mingc.engine")

_MAX_COUNT = 32767  # of int16


class DeviceSampler:
    """Samples tokens. Holds for each slot the last sampled token, and which tokens occur in prompt and answer.

    Also how often each token occurs in the answer, for requests whose logits are edited at every token.

    A CUDA graph may capture all methods with `inputs`, which have `slots` (B,); padding has slot 0.

    Args:
        graph: graph `sample` of the artifact; None: sampling sorts the vocabulary.
    """

    def __init__(self, graph: Graph | None, *, num_slots: int, vocab_size: int, device: torch.device) -> None:
        if graph is None and device.type == "cuda":
            log.warning("sampling sorts the vocabulary: the artifact has no graph sample; export again")
        self._graph = graph
        self._device = device
        self._last = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._seen = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self._counts = torch.zeros(num_slots, vocab_size, dtype=torch.int16, device=device)
        self._yes = torch.ones((), dtype=torch.bool, device=device)

    def mark_skipped(self, step: PrefillStep) -> None:
        """Mark the tokens that chunks skip as seen, for repetition penalties; `mark_chunk` marks the others."""
        if step.skipped_ids is None or step.skipped_counts is None:
            return
        ends = np.cumsum(step.skipped_counts)
        for slot, start, count, end in zip(step.slots, step.starts, step.skipped_counts, ends, strict=True):
            if count:
                seen = self._seen[slot]
                if count == start:
                    seen.zero_()  # forget the earlier request of the slot
                seen.index_fill_(0, upload(step.skipped_ids[end - count : end], self._device), True)

    def mark_chunk(self, inputs: Mapping[str, Tensor]) -> None:
        """Mark the tokens of a chunk as seen, for repetition penalties. Clears the marks of prompts that start here."""
        slots, is_continued = inputs["slots"], (inputs["starts"] > 0).unsqueeze(1)
        self._seen.index_copy_(0, slots, self._seen.index_select(0, slots) & is_continued)
        rows = inputs["row_slots"]  # slot 0 for padding
        self._seen.index_put_((rows, inputs["input_ids"]), self._yes)

    def take(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """The tokens (B,) of a decode step, with the last sampled token in place of -1. Marks them as seen."""
        slots, ids = inputs["slots"], inputs["input_ids"]
        ids = torch.where(ids >= 0, ids, self._last.index_select(0, slots))
        self._seen.index_put_((slots, ids), self._yes)
        return ids

    def begin_counts(self, slots: Ints, answers: Sequence[Ints]) -> None:
        """Count the tokens of the answers so far."""
        for slot, answer in zip(slots, answers, strict=True):
            row = self._counts[slot].zero_()
            if len(answer):
                ids, counts = np.unique(answer, return_counts=True)
                counted = upload(counts.clip(max=_MAX_COUNT).astype(np.int16), self._device)
                row.index_copy_(0, upload(ids, self._device), counted)

    def edit_(self, logits: Tensor, rows: Tensor, slots: Tensor, edits: LogitEdits) -> None:
        """Edit `rows` (k,) of `logits` in place, whose requests have `slots` (k,)."""
        has_penalties = edits.penalties is not None
        seen = self._seen.index_select(0, slots) if has_penalties else None
        counts = self._counts.index_select(0, slots) if has_penalties else None
        logits.index_copy_(0, rows, edit_logits(logits.index_select(0, rows), edits, seen, counts))

    def count(self, tokens: Tensor, slots: Tensor) -> None:
        """Count sampled tokens (k,) of the answers of `slots` (k,)."""
        flat = self._counts.view(-1)
        places = slots * self._counts.shape[1] + tokens.clamp_min(0)
        counts = flat.index_select(0, places)
        flat.index_copy_(0, places, counts + (counts < _MAX_COUNT).to(counts.dtype))

    def sample(self, logits: Tensor, inputs: Mapping[str, Tensor], *, is_random: bool) -> Tensor:
        """Sample tokens (B,) from `logits` (B, V), the same on all ranks; they become the last tokens of `slots`."""
        slots = inputs["slots"]
        if is_random:
            seen = self._seen.index_select(0, slots)
            if self._graph is None:
                sampled = sort_and_sample(logits, inputs["sampling"], seen)
            else:
                outputs = self._graph.run(logits=logits.contiguous(), sampling=inputs["sampling"], seen=seen)
                sampled = outputs["tokens"]
        else:
            sampled = sample_greedy(logits)
        broadcast_from_rank0_(sampled)
        self._last.index_copy_(0, slots, sampled.clamp_min(0))
        return sampled


def sampling_columns(
    params: SamplingParams, point: float, banned: Sequence[int] = (), *, is_edited: bool = False
) -> tuple[float, ...]:
    """One row of `sampling`, in numbers that float32 represents exactly. Edits include the repetition penalty.

    The columns are temperature, top_k, top_p, min_p, repetition penalty and uniform number, then every banned token
    plus one, padded with 0.
    """
    return (
        params.temperature if params.draws else 0.0,
        float(params.top_k),
        params.top_p,
        params.min_p,
        1.0 if is_edited else params.repetition_penalty,
        point,
        *(float(token + 1) for token in banned),
        *(0.0,) * (MAX_BANNED - len(banned)),
    )


def needs_sampling(sampling: NDArray[np.float64]) -> bool:
    """Whether any row of `sampling` (n, NUM_COLUMNS) needs more than greedy sampling."""
    temperature, top_k, _, _, penalty, _, *banned = sampling.T
    is_random = (temperature > 0.0) & (top_k != 1.0)
    return bool((is_random | (penalty != 1.0)).any() or np.any(banned))
