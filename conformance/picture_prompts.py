"""imagegen_condition.safetensors: prompts of pictures, hidden rows of the thinker, and caption rows made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from conformance.thinker.runner import ThinkerRunner
from mingc.artifacts.parameters import (
    GlyphParameters,
    ImageConditionParameters,
    ThinkerParameters,
    VisionParameters,
)
from mingc.dtypes import torch_dtype
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.prompts.features import VisionFeatures
from mingc.prompts.glyph import GlyphTokenizer, glyph_text
from mingc.prompts.thinker_prompt import VISION, ThinkerPrompt
from mingc.runtime.request_stream import HiddenRowsItem
from mingc.verify.engine_run import to_numpy

_SCALE = 1e3  # of rows before a norm, so that its eps changes nothing


def replay_picture_prompts(engines: Engines, log: ReferenceLog, document: Mapping[str, Any]) -> None:
    """Replay every case from its messages to its caption, then the recorded batch of two."""
    _replay_glyph_texts(engines, log, document)
    arguments = document["condition"]
    cases = [case for case in arguments if f"{case}.condition" in log]
    texts = {case: arguments[case]["glyph_text"] for case in cases}
    glyphs = {case: _glyph_rows(case, texts[case], engines, log) for case in cases if texts[case]}
    conditions: dict[str, Tensor] = {}
    for case in cases:
        with log.case(case):
            conditions[case] = _condition(
                engines, *_before_norm(engines, log.input(f"{case}.query_hidden")[0])
            )
            _compare(case, conditions[case], glyphs.get(case), log, "recorded hidden rows")
    prompts: dict[str, ThinkerPrompt] = {}
    for case in cases:
        with log.case(case):
            prompts[case] = _prompt(case, arguments[case], engines, log)
    if not log.is_exact:
        log.skip("query_hidden", "low precision may select other experts than the reference")
        return
    hidden = _hidden_rows(engines, [*prompts.values()])
    for case, rows in zip(prompts, hidden, strict=True):
        with log.case(case):
            log.tensor(f"{case}.query_hidden", _normed(engines, rows)[None])
            conditions[case] = _condition(engines, rows.residual, rows.delta)
            _compare(case, conditions[case], glyphs.get(case), log, "from the messages")
    if "batch.caption" in log and engines.has("glyph"):
        with log.case("batch"):
            batch = arguments["batch"]
            shown = _encode(engines, batch["glyph_text"])
            both = [
                np.concatenate([to_numpy(conditions[c]), rows])
                for c, rows in zip(batch["rows"], shown, strict=True)
            ]
            log.tensor("batch.caption", np.stack(both))


def _replay_glyph_texts(engines: Engines, log: ReferenceLog, document: Mapping[str, Any]) -> None:
    for index, case in enumerate(document.get("glyph_text", ())):
        log.text(f"glyph_text {index}", glyph_text(case["prompt"]), case["text"])
    parameters = engines.find_parameters("glyph", GlyphParameters)
    if parameters is None:
        return
    tokenizer = GlyphTokenizer(parameters.added_tokens, parameters.max_length)
    for index, case in enumerate(document.get("byt5_tokenizer", {}).get("cases", ())):
        ids = tokenizer.encode(case["text"])[: len(case["ids"])]
        log.ids(f"byt5_tokenizer {index}", ids, reference=case["ids"])


def _prompt(case: str, arguments: Mapping[str, Any], engines: Engines, log: ReferenceLog) -> ThinkerPrompt:
    """Write the prompt of the case's messages; pictures are recorded embeddings."""
    thinker = engines.parameters_of("thinker", ThinkerParameters)
    vision = engines.find_parameters("vision_encoder", VisionParameters)
    tokenizer = engines.tokenizer("thinker")
    assert tokenizer is not None, "a thinker has a tokenizer"
    grids = log.input(f"{case}.ref_grid_thw").astype(int).tolist() if f"{case}.ref_grid_thw" in log else []
    pictures = [
        MediaPart(
            kind="image",
            data=VisionFeatures(patches=np.zeros((0, 0), np.float32), grid=(t, h, w)),
            where=case,
        )
        for t, h, w in grids
    ]
    processor = ChatProcessor(tokenizer, thinker, vision=vision, audio=None)
    parameters = engines.parameters_of("image_condition", ImageConditionParameters)
    message = Message(role="user", parts=(*pictures, TextPart(text=arguments["user_text"])))
    prepared, text = processor.prepare_picture([message], num_queries=parameters.num_queries)
    prompt = prepared.tokens
    log.text(f"{case}.prompt", text, arguments["prompt"])
    log.text(f"{case}.glyph_text", glyph_text(text), arguments["glyph_text"])
    log.ids(f"{case}.appended_ids", prompt.input_ids[None])
    log.ids(f"{case}.position_ids", prompt.positions[:, None])
    log.ids(f"{case}.image_mask", (prompt.embed_kind == VISION)[None])
    first, end = prompt.queries or (0, 0)
    log.ids(f"{case}.gen_mask", np.isin(np.arange(prompt.num_tokens), np.arange(first, end))[None])
    embeds = engines.stage("image_condition").weights["queries"]
    if grids:
        spec = engines.stage("thinker")["embed"].spec.input("embeds")
        media = torch.from_numpy(log.input(f"{case}.image_embeds").astype(np.float32))
        embeds = torch.cat([media.to(engines.device, torch_dtype(spec.dtype)), embeds])
    return replace(prompt, media_embeds=embeds)


def _hidden_rows(engines: Engines, prompts: Sequence[ThinkerPrompt]) -> list[HiddenRowsItem]:
    """The thinker's answers to all prompts together."""
    dim = engines.stage("thinker")["decode_attention"].spec.dim("B")
    rows = min(len(prompts), max(dim.buckets, default=dim.maximum))
    longest = max(prompt.num_tokens for prompt in prompts)
    parameters = engines.parameters_of("thinker", ThinkerParameters)
    run = ThinkerRunner(engines, parameters, rows=rows, longest=longest + 1)
    try:
        return [
            item
            for start in range(0, len(prompts), rows)
            for item in run.hidden_rows(prompts[start : start + rows])
        ]
    finally:
        run.close()


def _normed(engines: Engines, rows: HiddenRowsItem) -> NDArray[np.generic]:
    """The thinker's final norm (Q, D) of rows, in double precision."""
    norm = engines.stage("image_condition").weights["norm"].cpu().double()
    total = rows.residual.double() + rows.delta.double()
    return to_numpy(total * torch.rsqrt(total.square().mean(-1, keepdim=True)) * norm)


def _before_norm(engines: Engines, hidden: NDArray[np.generic]) -> tuple[Tensor, Tensor]:
    """A residual stream and a delta (Q, D) whose final norm is `hidden`."""
    norm = engines.stage("image_condition").weights["norm"].cpu().float()
    total = _SCALE * torch.from_numpy(hidden.astype(np.float32)) / norm
    return total, torch.zeros_like(total)


def _condition(engines: Engines, residual: Tensor, delta: Tensor) -> Tensor:
    graph = engines.stage("image_condition")["condition"]
    given = {"residual": residual, "delta": delta}
    inputs = {
        name: value.to(engines.device, torch_dtype(graph.spec.input(name).dtype))
        for name, value in given.items()
    }
    return graph.run(**inputs)["rows"]


def _glyph_rows(case: str, text: str, engines: Engines, log: ReferenceLog) -> NDArray[np.generic] | None:
    """Rows (L, C) of a text; None without the stage."""
    if not engines.has("glyph"):
        return None
    parameters = engines.parameters_of("glyph", GlyphParameters)
    log.ids(
        f"{case}.glyph.ids", GlyphTokenizer(parameters.added_tokens, parameters.max_length).encode(text)[None]
    )
    rows: NDArray[np.generic] = _encode(engines, [text])[0]
    return rows


def _encode(engines: Engines, texts: Sequence[str]) -> NDArray[np.generic]:
    """Rows (B, L, C) of texts."""
    graph = engines.stage("glyph")["encode"]
    parameters = engines.parameters_of("glyph", GlyphParameters)
    tokenizer = GlyphTokenizer(parameters.added_tokens, parameters.max_length)
    ids = np.zeros((engines.padded_size(graph, "B", len(texts)), parameters.max_length), np.int64)
    ids[:, 0] = 1  # an end token alone, in rows of padding
    ids[: len(texts)] = [tokenizer.encode(text) for text in texts]
    return to_numpy(graph.run(ids=engines.put(ids, graph, "ids"))["rows"])[: len(texts)]


def _compare(
    case: str, condition: Tensor, glyphs: NDArray[np.generic] | None, log: ReferenceLog, how: str
) -> None:
    rows = to_numpy(condition)
    log.tensor(f"{case}.condition", rows[None], how=how)
    if glyphs is not None or len(log.references[f"{case}.caption"][0]) == len(rows):
        log.tensor(
            f"{case}.caption", np.concatenate([rows, *([] if glyphs is None else [glyphs])])[None], how=how
        )
