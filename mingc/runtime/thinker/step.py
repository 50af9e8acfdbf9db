"""Inputs of one thinker step: plain arrays, the same for all ranks, and their padding.

The loop builds them, `ranks.rank_group` sends them to other ranks, and `ThinkerWorker` runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.prompts.thinker_prompt import ThinkerPrompt

Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillStep:
    """Layer groups of one prefill chunk: the next n tokens of s prompts, concatenated.

    Attributes:
        input_ids: (n,) int64.
        positions: (3, n) int64.
        embed_kind: (n,) int64; 0 word embedding, 1 image gate, 2 audio gate.
        embeds: (n, D), set in rows of media tokens; None if the chunk has none.
        counts: (s,) int64, tokens of each prompt.
        starts: (s,) int64, tokens of each request before this chunk.
        pages: (s, P) int64, KV pages in token order, enough for start + count tokens, padded with 0.
        slots: (s,) int64, slots of the sampling state on the device; 0 if the host samples.
        ended: (k,) int64, prompts (0 to s - 1) that end here and whose first token the device samples; else None.
        sampling: (k, NUM_COLUMNS) float64, see `device_sampler`; None if `ended` is.
        first_group: first layer group to run, of `ThinkerWorker.num_layer_groups`. Earlier steps have run the groups
            before it for the same chunk, and no other chunk since. Only group 0 reads `embeds`.
        end_group: end of the range of layer groups; None for all that are left.
        skipped_ids: (k,) int64, tokens of the prompts between their previous chunk and `starts`, concatenated: their
            KV pages are reused. None if there are none.
        skipped_counts: (s,) int64, how many of them each prompt has; None if `skipped_ids` is.
    """

    input_ids: Ints
    positions: Ints
    embed_kind: Ints
    embeds: Tensor | None
    counts: Ints
    starts: Ints
    pages: Ints
    slots: Ints
    ended: Ints | None = None
    sampling: NDArray[np.float64] | None = None
    first_group: int = 0
    end_group: int | None = None
    skipped_ids: Ints | None = None
    skipped_counts: Ints | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeStep:
    """One token of each of n requests.

    Attributes:
        input_ids: (n,) int64; -1 for the token that the device sampled last for the request's slot.
        positions: (n,) int64.
        lengths: (n,) int64, tokens of each request including the new one.
        pages: (n, P) int64, KV pages in token order, padded with 0.
        slots: (n,) int64; None if the host samples.
        sampling: (n, NUM_COLUMNS) float64, see `device_sampler`; None if the host samples, or a `SampleStep` follows.
    """

    input_ids: Ints
    positions: Ints
    lengths: Ints
    pages: Ints
    slots: Ints | None = None
    sampling: NDArray[np.float64] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleStep:
    """Sampling of the tokens of the decode step before, which had no `sampling`.

    Attributes:
        slots: (n,) int64, those of the decode step.
        sampling: (n, NUM_COLUMNS) float64, see `device_sampler`.
    """

    slots: Ints
    sampling: NDArray[np.float64]


def padded(values: Ints, size: int) -> Tensor:
    """`values` padded with zeros to (size,) int64."""
    rows = np.zeros(size, np.int64)
    rows[: len(values)] = values
    return torch.from_numpy(rows)


def chunk_embeds(parts: Sequence[tuple[ThinkerPrompt, slice]]) -> Tensor | None:
    """Media embeddings of a chunk (n, D), zero in the rows of words; None when the chunk has no media."""
    given = next((prompt.media_embeds for prompt, _ in parts if prompt.media_embeds is not None), None)
    if given is None:
        return None
    embeds = given.new_zeros(sum(inside.stop - inside.start for _, inside in parts), given.shape[1])
    begin, has_media = 0, False
    for prompt, inside in parts:
        if prompt.media_embeds is not None:
            media_rows = prompt.media_rows
            first, end = np.searchsorted(media_rows, [inside.start, inside.stop])
            rows = torch.from_numpy(media_rows[first:end] - inside.start + begin)
            if embeds.is_cuda:
                rows = rows.pin_memory()  # so that the copy does not wait for earlier steps
            embeds[rows.to(embeds.device, non_blocking=True)] = prompt.media_embeds[first:end]
            has_media |= bool(end > first)
        begin += inside.stop - inside.start
    return embeds if has_media else None
