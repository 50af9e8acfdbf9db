"""Recorded prompts of thinker.safetensors; reading them compares positions and masks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from mingc.artifacts.parameters import ThinkerParameters
from mingc.dtypes import torch_dtype
from mingc.prompts.features import Grid
from mingc.prompts.positions import VisionSpan, compute_positions
from mingc.prompts.thinker_prompt import AUDIO, VISION, WORD, ThinkerPrompt

Ints = NDArray[np.int64]


def beginning(prompt: ThinkerPrompt, count: int) -> ThinkerPrompt:
    """Cut a prompt to its first `count` tokens."""
    embeds, num_media = prompt.media_embeds, int((prompt.media_rows < count).sum())
    return replace(
        prompt,
        input_ids=prompt.input_ids[:count],
        positions=prompt.positions[:, :count],
        embed_kind=prompt.embed_kind[:count],
        media_embeds=None if embeds is None else embeds[:num_media],
    )


def read_prompts(
    case: str, engines: Engines, log: ReferenceLog, parameters: ThinkerParameters
) -> list[ThinkerPrompt]:
    """Read the rows of a case without padding; compare the positions and masks that the case records."""
    ids = log.input(f"{case}.input_ids").astype(np.int64)
    mask_name = f"{case}.attention_mask"
    masks = log.input(mask_name).astype(bool) if mask_name in log else np.ones(ids.shape, bool)
    if len(ids) > 1:
        return [_text_prompt(row[mask]) for row, mask in zip(ids, masks, strict=True)]
    tokens = ids[0][masks[0]]
    kinds, embeds = _media(case, tokens, engines, log, parameters)
    positions, delta = compute_positions(
        len(tokens),
        _spans(case, tokens, log, parameters),
        merge_size=1,
        temporal_scale=parameters.temporal_position_scale,
    )
    log.ids(f"{case}.position_ids", positions[:, None])
    log.ids(f"{case}.rope_deltas", [delta])
    log.ids(f"{case}.image_mask", (kinds == VISION)[None])
    log.ids(f"{case}.audio_mask", (kinds == AUDIO)[None])
    return [
        ThinkerPrompt(
            input_ids=tokens,
            positions=positions,
            rope_delta=delta,
            embed_kind=kinds,
            media_embeds=embeds,
        )
    ]


def _text_prompt(tokens: Ints) -> ThinkerPrompt:
    return ThinkerPrompt(
        input_ids=tokens,
        positions=np.tile(np.arange(len(tokens)), (3, 1)),
        rope_delta=0,
        embed_kind=np.full(len(tokens), WORD),
    )


def _media(
    case: str, tokens: Ints, engines: Engines, log: ReferenceLog, parameters: ThinkerParameters
) -> tuple[Ints, torch.Tensor | None]:
    """Return the kind of each row (T,), and embeddings (M, D) of the rows that are not tokens."""
    kinds = np.full(len(tokens), WORD)
    rows = np.zeros((len(tokens), parameters.hidden_size), np.float32)
    for name, token in (("image", parameters.image_patch_token), ("video", parameters.frame_patch_token)):
        if f"{case}.{name}_embeds" in log:
            kinds[tokens == token] = VISION
            rows[tokens == token] = log.input(f"{case}.{name}_embeds")
    if f"{case}.audio_embeds" in log:
        places = log.input(f"{case}.audio_placeholder_loc_lens").reshape(-1, 2)
        log.input(f"{case}.audio_embeds_lengths")
        index = np.concatenate([np.arange(int(start), int(start + length)) for start, length in places])
        kinds[index] = AUDIO
        rows[index] = log.input(f"{case}.audio_embeds").reshape(-1, parameters.hidden_size)
    if not kinds.any():
        return kinds, None
    spec = engines.stage("thinker")["embed"].spec.input("embeds")
    return kinds, torch.from_numpy(rows[kinds != WORD]).to(engines.device, torch_dtype(spec.dtype))


def _spans(case: str, tokens: Ints, log: ReferenceLog, parameters: ThinkerParameters) -> list[VisionSpan]:
    """Find each run of patch tokens, with its grid in merged tokens; the merge is square and equal for all."""
    spans: list[VisionSpan] = []
    for name, token in (("image", parameters.image_patch_token), ("video", parameters.frame_patch_token)):
        if f"{case}.{name}_grid_thw" not in log:
            continue
        places = np.flatnonzero(tokens == token)
        grids = log.input(f"{case}.{name}_grid_thw").astype(np.int64)
        merge = round((int(grids.prod(axis=1).sum()) / len(places)) ** 0.5)
        done = 0
        for frames, height, width in grids:
            grid: Grid = (int(frames), int(height) // merge, int(width) // merge)
            spans.append(VisionSpan(start=int(places[done]), grid=grid))
            done += int(np.prod(grid))
    return sorted(spans, key=lambda span: span.start)
