"""thinker.safetensors: positions, prefill, KV pages, router choices and greedy continuations of recorded prompts.

Prompts run through the same worker and rank group as a server's, with pages that are not in order.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.model import ThinkerParameters
from mingc.runtime.golden.engines import Engines, to_numpy
from mingc.runtime.golden.ledger import Ledger
from mingc.runtime.preprocess.chat import AUDIO, VISION, WORD
from mingc.runtime.preprocess.image import Grid
from mingc.runtime.preprocess.positions import VisionSpan, compute_positions
from mingc.runtime.rank_group import RankGroup
from mingc.runtime.stages import LoadedStage
from mingc.runtime.thinker import DecodeStep, PrefillStep, ThinkerWorker
from mingc.runtime.thinker_start import make_worker

Ints = NDArray[np.int64]
_KV = re.compile(r"^(?P<case>.+)\.kv\.layer(?P<layer>\d+)_(?P<what>keys_rotated|values)$")
_UNEVEN_CHUNK = 7  # tokens; divides neither pages nor buckets


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Prompt:
    """A recorded prompt: `input_ids` (T,), `positions` (3, T), `embed_kind` (T,), `embeds` (T, D) or None."""

    input_ids: Ints
    positions: Ints
    rope_delta: int
    embed_kind: Ints
    embeds: torch.Tensor | None


class _Replay:
    """The ranks' workers and the pages of the prompts that run in them."""

    def __init__(self, engines: Engines, ledger: Ledger, parameters: ThinkerParameters) -> None:
        self._parameters = parameters
        shapes = [ledger.references[f"{case}.input_ids"].shape for case in ledger.cases("input_ids")]
        steps = [ledger.references[f"{case}.greedy_ids"].shape[1] for case in ledger.cases("greedy_ids")]
        longest = max(length for _, length in shapes) + max(steps, default=0)
        self._pages_each = -(-longest // parameters.page_size)
        num_pages = 1 + max(rows for rows, _ in shapes) * self._pages_each

        def start(stage: LoadedStage) -> ThinkerWorker:
            self._worker = make_worker(
                stage, engines.bundle.manifest, num_pages=num_pages, device=engines.device
            )
            return self._worker

        self._group: RankGroup | None = None
        if engines.world_size > 1:
            self._group = RankGroup(
                engines.bundle.root,
                engines.rank_devices(),
                lambda: engines.stage("thinker"),
                start,
                num_pages=num_pages,
                on_death=lambda error: None,  # the next step raises it
            )
        else:
            start(engines.stage("thinker"))
        self._runner: ThinkerWorker | RankGroup = self._group or self._worker
        self.max_chunk = self._worker.max_chunk

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def pages(self, row: int) -> Ints:
        """The pages of a prompt, last page first, so that rows in memory are not in token order."""
        first = 1 + row * self._pages_each
        return np.arange(first, first + self._pages_each)[::-1].copy()

    def prefill(self, prompt: _Prompt, row: int, chunk: int) -> list[NDArray[np.float32]]:
        """Logits (V,) of the last token of every chunk of at most `chunk` tokens."""
        logits = []
        for start in range(0, len(prompt.input_ids), chunk):
            part = slice(start, min(start + chunk, len(prompt.input_ids)))
            step = PrefillStep(
                input_ids=prompt.input_ids[part],
                positions=prompt.positions[:, part],
                embed_kind=prompt.embed_kind[part],
                embeds=None if prompt.embeds is None else prompt.embeds[part],
                start=start,
                pages=self.pages(row),
            )
            logits.append(to_numpy(self._runner.prefill(step))[0].astype(np.float32))
        return logits

    def greedy(self, prompts: Sequence[_Prompt], steps: int) -> tuple[Ints, NDArray[np.float32]]:
        """Continue all prompts together: ids (B, steps) and logits (B, steps, V)."""
        logits = [
            np.stack([self.prefill(prompt, row, self.max_chunk)[-1] for row, prompt in enumerate(prompts)])
        ]
        ids = [logits[0].argmax(axis=1)]
        lengths = np.array([len(prompt.input_ids) for prompt in prompts])
        deltas = np.array([prompt.rope_delta for prompt in prompts])
        pages = np.stack([self.pages(row) for row in range(len(prompts))])
        for _ in range(steps - 1):
            step = DecodeStep(input_ids=ids[-1], positions=lengths + deltas, lengths=lengths + 1, pages=pages)
            logits.append(to_numpy(self._runner.decode(step))[: len(prompts)].astype(np.float32))
            ids.append(logits[-1].argmax(axis=1))
            lengths = lengths + 1
        return np.stack(ids, axis=1), np.stack(logits, axis=1)

    def cached(self, name: str, num_tokens: int) -> NDArray[np.generic]:
        """(heads, num_tokens, head_dim) of the first prompt in token order, from the state `name`."""
        size = self._parameters.page_size
        rows = (self.pages(0)[:, None] * size + np.arange(size)).reshape(-1)[:num_tokens]
        held: NDArray[np.generic] = to_numpy(self._worker.state[name])[rows].swapaxes(0, 1)
        return held

    def experts(self, num_tokens: int) -> tuple[Ints, NDArray[np.float32]] | None:
        """Experts and their weights (layers, tokens, k) of the last chunk, each token's sorted by id."""
        routes = self._worker.routes
        if not routes:
            return None
        ids, weights = (torch.stack([each[index][:num_tokens] for each in routes]) for index in (0, 1))
        return _sorted_experts(to_numpy(ids), to_numpy(weights).astype(np.float32))


def replay(engines: Engines, ledger: Ledger) -> None:
    """Every case alone, in chunks, and rows of a batch together."""
    parameters = engines.parameters.thinker
    assert parameters is not None
    run = _Replay(engines, ledger, parameters)
    try:
        for case in ledger.cases("input_ids"):
            with ledger.case(case):
                prompts = _prompts(case, engines, ledger, parameters)
                if len(prompts) == 1:
                    _replay_prompt(case, prompts[0], run, ledger)
                _replay_greedy(case, prompts, run, ledger)
    finally:
        run.close()


def _replay_prompt(case: str, prompt: _Prompt, run: _Replay, ledger: Ledger) -> None:
    num_tokens = len(prompt.input_ids)
    whole = run.prefill(prompt, 0, run.max_chunk)
    ledger.tensor(f"{case}.logits_last", whole[-1][None])
    if num_tokens <= run.max_chunk:
        _check_experts(case, run.experts(num_tokens), ledger)
    for name in ledger.references:
        match = _KV.match(name)
        if match is None or match["case"] != case:
            continue
        kind = "k" if match["what"] == "keys_rotated" else "v"
        state = f"layers.{match['layer']}.attention.{kind}_pages"
        held = run.cached(state, num_tokens)
        # Rank 0 is this process: of sharded heads it has the first ones.
        ledger.tensor(name, held, reference=ledger.references[name][0, : len(held)])
    ledger.tensor(
        f"{case}.logits_last", run.prefill(prompt, 0, _UNEVEN_CHUNK)[-1][None], how="in uneven chunks"
    )
    if f"{case}.logits" in ledger:
        ledger.tensor(f"{case}.logits", np.stack(run.prefill(prompt, 0, 1))[None], how="token by token")


def _replay_greedy(case: str, prompts: Sequence[_Prompt], run: _Replay, ledger: Ledger) -> None:
    steps = ledger.references[f"{case}.greedy_ids"].shape[1] if f"{case}.greedy_ids" in ledger else 1
    ids, logits = run.greedy(prompts, steps)
    ledger.tensor(f"{case}.logits_last_valid", logits[:, 0])
    ledger.ids(f"{case}.greedy_ids", ids, from_engine=True)
    if f"{case}.greedy_ids" in ledger:
        same = (ids == ledger.references[f"{case}.greedy_ids"]).all()
        # After another token the logits are of another text: compare the steps before it.
        until = (
            steps if same else 1 + int((ids == ledger.references[f"{case}.greedy_ids"]).all(axis=0).argmin())
        )
        reference = ledger.references.get(f"{case}.greedy_logits")
        if reference is not None:
            how = "" if same else f"first {until} steps"
            ledger.tensor(f"{case}.greedy_logits", logits[:, :until], reference=reference[:, :until], how=how)


def _check_experts(case: str, found: tuple[Ints, NDArray[np.float32]] | None, ledger: Ledger) -> None:
    ids_name, weights_name = f"{case}.moe_topk_ids", f"{case}.moe_topk_weights"
    if ids_name not in ledger:
        return
    if found is None:
        ledger.skip(ids_name, "the prefill engine of this bundle does not give out its router's choices")
        return
    ids, weights = _sorted_experts(ledger.references[ids_name][:, 0], ledger.references[weights_name][:, 0])
    ledger.ids(ids_name, found[0], reference=ids, how="as sets", from_engine=True)
    if found[0].shape == ids.shape and (found[0] == ids).all():
        ledger.tensor(weights_name, found[1], reference=weights, how="by expert")


def _sorted_experts(
    ids: NDArray[np.generic], weights: NDArray[np.generic]
) -> tuple[Ints, NDArray[np.float32]]:
    order = np.argsort(ids, axis=-1)
    return (
        np.take_along_axis(ids, order, axis=-1).astype(np.int64),
        np.take_along_axis(weights, order, axis=-1).astype(np.float32),
    )


def _prompts(case: str, engines: Engines, ledger: Ledger, parameters: ThinkerParameters) -> list[_Prompt]:
    """The rows of a case without their padding, and what the case records about them compared."""
    ids = ledger.input(f"{case}.input_ids").astype(np.int64)
    mask_name = f"{case}.attention_mask"
    masks = ledger.input(mask_name).astype(bool) if mask_name in ledger else np.ones(ids.shape, bool)
    if len(ids) > 1:
        return [_text_prompt(row[mask]) for row, mask in zip(ids, masks, strict=True)]
    tokens = ids[0][masks[0]]
    kinds, embeds = _media(case, tokens, engines, ledger, parameters)
    positions, delta = compute_positions(
        len(tokens),
        _spans(case, tokens, ledger, parameters),
        merge_size=1,
        temporal_scale=parameters.temporal_position_scale,
    )
    ledger.ids(f"{case}.position_ids", positions[:, None])
    ledger.ids(f"{case}.rope_deltas", [delta])
    ledger.ids(f"{case}.image_mask", (kinds == VISION)[None])
    ledger.ids(f"{case}.audio_mask", (kinds == AUDIO)[None])
    return [_Prompt(input_ids=tokens, positions=positions, rope_delta=delta, embed_kind=kinds, embeds=embeds)]


def _text_prompt(tokens: Ints) -> _Prompt:
    return _Prompt(
        input_ids=tokens,
        positions=np.tile(np.arange(len(tokens)), (3, 1)),
        rope_delta=0,
        embed_kind=np.full(len(tokens), WORD),
        embeds=None,
    )


def _media(
    case: str, tokens: Ints, engines: Engines, ledger: Ledger, parameters: ThinkerParameters
) -> tuple[Ints, torch.Tensor | None]:
    """Which rows take an embedding, and the embeddings in these rows."""
    kinds = np.full(len(tokens), WORD)
    rows = np.zeros((len(tokens), parameters.hidden_size), np.float32)
    for name, token in (("image", parameters.image_patch_token), ("video", parameters.frame_patch_token)):
        if f"{case}.{name}_embeds" in ledger:
            kinds[tokens == token] = VISION
            rows[tokens == token] = ledger.input(f"{case}.{name}_embeds")
    if f"{case}.audio_embeds" in ledger:
        places = ledger.input(f"{case}.audio_placeholder_loc_lens").reshape(-1, 2)
        ledger.input(f"{case}.audio_embeds_lengths")
        index = np.concatenate([np.arange(int(start), int(start + length)) for start, length in places])
        kinds[index] = AUDIO
        rows[index] = ledger.input(f"{case}.audio_embeds").reshape(-1, parameters.hidden_size)
    if not kinds.any():
        return kinds, None
    spec = next(each for each in engines.stage("thinker")["embed"].spec.inputs if each.name == "embeds")
    return kinds, torch.from_numpy(rows).to(engines.device, getattr(torch, spec.dtype))


def _spans(case: str, tokens: Ints, ledger: Ledger, parameters: ThinkerParameters) -> list[VisionSpan]:
    """Each run of patch tokens with its grid, in merged tokens (the merge is square and the same everywhere)."""
    spans: list[VisionSpan] = []
    for name, token in (("image", parameters.image_patch_token), ("video", parameters.frame_patch_token)):
        if f"{case}.{name}_grid_thw" not in ledger:
            continue
        places = np.flatnonzero(tokens == token)
        grids = ledger.input(f"{case}.{name}_grid_thw").astype(np.int64)
        merge = round((int(grids.prod(axis=1).sum()) / len(places)) ** 0.5)
        done = 0
        for frames, height, width in grids:
            grid: Grid = (int(frames), int(height) // merge, int(width) // merge)
            spans.append(VisionSpan(start=int(places[done]), grid=grid))
            done += int(np.prod(grid))
    return sorted(spans, key=lambda span: span.start)
