"""From a user's text and pictures to caption rows, on real engines: every value as the official code has it."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collector import Collector
from eager_export import joined
from mingc_command import DATA, ENVIRONMENT
from PIL import Image
from safetensors.torch import load_file, save_file
from stage_checks import assert_close
from torch import Tensor

from conformance.check import GOLDEN_FILES, replay_file
from conformance.engines import Engines
from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.parameters import (
    GlyphParameters,
    ImageConditionParameters,
    ThinkerParameters,
    VisionParameters,
)
from mingc.errors import RequestError
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import MediaPart, Message, TextPart, TokensPart
from mingc.prompts.glyph import GlyphTokenizer, glyph_text
from mingc.prompts.prompt_writer import PicturePrompt
from mingc.prompts.thinker_prompt import VISION, ThinkerPrompt
from mingc.prompts.tokenizer import load_tokenizer
from mingc.runtime.encoders.encoder import VisionEncoder
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import HiddenRowsItem
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.pipelines import picture_embeds
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.worker import StepOptions

GOLDEN = load_file(DATA / "imagegen" / "imagegen_condition.safetensors")
ARGUMENTS = json.loads((DATA / "imagegen" / "imagegen.json").read_text("utf-8"))["condition"]
CASES = [case for case in ARGUMENTS if case != "batch"]
CPU = torch.device("cpu")
LIMIT = 5e-6  # README of the golden set, §6


def messages(case: str) -> list[Message]:
    pictures = [MediaPart(kind="image", data=png(name), where=name) for name in ARGUMENTS[case]["images"]]
    return [Message(role="user", parts=(*pictures, TextPart(text=ARGUMENTS[case]["user_text"])))]


def png(name: str) -> bytes:
    file = io.BytesIO()
    Image.fromarray(GOLDEN[name].numpy()).save(file, format="PNG")
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class Stages:
    """What makes prompts and rows, over the engines of an artifact."""

    artifact: Artifact
    processor: ChatProcessor
    queries: Tensor
    num_queries: tuple[int, ...]

    def prompt(self, case: str) -> PicturePrompt:
        return self.processor.prepare_picture(messages(case), num_queries=self.num_queries)

    def embedded(self, case: str) -> ThinkerPrompt:
        """The prompt with the embeddings of its pictures and of the queries."""
        prepared, _ = self.prompt(case)
        encoded: dict[int, list[Future[Tensor]]] = {}
        if prepared.media.vision:
            parameters = self.artifact.manifest.parameters_of("vision_encoder", VisionParameters)
            encoder = VisionEncoder(load_stage(self.artifact, "vision_encoder", CPU), parameters, CPU)
            found = encoder.encode(prepared.media.vision)
            assert_close(torch.cat(found), GOLDEN[f"{case}.image_embeds"], LIMIT)
            encoded[VISION] = [Future() for _ in found]
            for future, value in zip(encoded[VISION], found, strict=True):
                future.set_result(value)
        embeds = asyncio.run(picture_embeds(prepared.tokens, encoded, self.queries, CPU))
        return replace(prepared.tokens, media_embeds=embeds)


@pytest.fixture(scope="module")
def stages(image_artifact: Path) -> Stages:
    artifact = open_artifact(image_artifact)
    manifest = artifact.manifest
    processor = ChatProcessor(
        load_tokenizer(artifact, "thinker"),
        manifest.parameters_of("thinker", ThinkerParameters),
        vision=manifest.parameters_of("vision_encoder", VisionParameters),
        audio=None,
        decoder=InProcessDecoder(),
    )
    parameters = manifest.parameters_of("image_condition", ImageConditionParameters)
    queries = load_stage(artifact, "image_condition", CPU).weights["queries"]
    return Stages(artifact, processor, queries, parameters.num_queries)


@pytest.fixture(scope="module")
def prompts(stages: Stages) -> Mapping[str, ThinkerPrompt]:
    return {case: stages.embedded(case) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_prompts_equal_the_goldens(case: str, stages: Stages, prompts: Mapping[str, ThinkerPrompt]) -> None:
    prepared, text = stages.prompt(case)
    prompt = prompts[case]
    assert text == ARGUMENTS[case]["prompt"]
    assert glyph_text(text) == ARGUMENTS[case]["glyph_text"]
    assert prompt.queries is not None
    block = ARGUMENTS[case]["n_query"] + 2
    assert prompt.input_ids.tolist() == GOLDEN[f"{case}.appended_ids"][0].tolist()
    assert prompt.input_ids[:-block].tolist() == GOLDEN[f"{case}.input_ids"][0].tolist()
    assert np.array_equal(prompt.positions, GOLDEN[f"{case}.position_ids"][:, 0].numpy())
    assert np.array_equal(prompt.embed_kind == VISION, GOLDEN[f"{case}.image_mask"][0].numpy())
    assert not set(prompt.embed_kind.tolist()) - {0, VISION}
    marked = np.flatnonzero(GOLDEN[f"{case}.gen_mask"][0].numpy())
    assert prompt.queries == (marked[0], marked[-1] + 1) and len(marked) == ARGUMENTS[case]["n_query"]
    grids = [list(item.grid) for item in prepared.media.vision]
    assert grids == GOLDEN[f"{case}.ref_grid_thw"].tolist() if grids else f"{case}.ref_grid_thw" not in GOLDEN
    assert prompt.media_embeds is not None
    assert_close(prompt.media_embeds, GOLDEN[f"{case}.inputs_embeds"][0][prompt.media_rows], LIMIT)


def test_the_text_of_a_prompt_has_all_turns_and_a_placeholder_for_each_picture(stages: Stages) -> None:
    """Quotes in any turn count, whatever the parts of messages are (spec: imagegen.md §2.1, thinker.md §6.1)."""
    picture = MediaPart(kind="image", data=png("raw1"), where="picture")
    answer = TokensPart(ids=tuple(stages.processor.tokenize('It says "No"')))
    talk = [
        Message(role="system", parts=(TextPart(text="Draw well."),)),
        Message(role="user", parts=(TextPart(text="See "), picture, TextPart(text="<IMAGE>"))),
        Message(role="assistant", parts=(answer,)),
        Message(role="user", parts=(TextPart(text="Go"),)),
    ]
    _, text = stages.processor.prepare_picture(talk, num_queries=stages.num_queries)
    assert text == (
        "<role>SYSTEM</role>Draw well.\n\ndetailed thinking off<|role_end|>"
        "<role>HUMAN</role>See <IMAGE><IMAGE><|role_end|>"
        '<role>ASSISTANT</role>It says "No"<|role_end|><role>HUMAN</role>Go<|role_end|><role>ASSISTANT</role>'
    )


def test_several_scales_have_a_block_each_and_the_last_one_is_read(stages: Stages) -> None:
    prepared, _ = stages.processor.prepare_picture(messages("t2i"), num_queries=(4, 9))
    prompt, recorded = prepared.tokens, GOLDEN["t2i.input_ids"].shape[1]
    start, patch, end = GOLDEN["t2i.appended_ids"][0, [recorded, recorded + 1, -1]].tolist()
    ids = [start, *[patch] * 4, end, start, *[patch] * 9, end]
    assert prompt.input_ids[recorded:].tolist() == ids
    assert prompt.queries == (recorded + 7, recorded + 16)
    # §1.3: the columns of a block of s² are centred on its position p, the next token has p + 1.
    p = recorded + 1
    columns = [recorded, p - 1, p, p + 1, p + 2, p + 1, p + 2, *range(p + 3 - 4, p + 3 + 5), p + 4]
    assert prompt.positions[2, recorded:].tolist() == columns
    heights = [recorded, p, p, p, p, p + 1, p + 2, *[p + 3] * 9, p + 4]
    assert prompt.positions[0, recorded:].tolist() == prompt.positions[1, recorded:].tolist() == heights


def test_a_conversation_that_leaves_no_room_for_the_queries_is_refused(stages: Stages) -> None:
    manifest = stages.artifact.manifest
    for case, code in (("t2i", "context_length_exceeded"), ("edit", "media_too_large")):
        for room, fits in ((1, True), (0, False), (-17, False)):
            processor = ChatProcessor(
                load_tokenizer(stages.artifact, "thinker"),
                manifest.parameters_of("thinker", ThinkerParameters),
                vision=manifest.parameters_of("vision_encoder", VisionParameters),
                audio=None,
                max_tokens=GOLDEN[f"{case}.appended_ids"].shape[1] + room,
                decoder=InProcessDecoder(),
            )
            try:
                processor.prepare_picture(messages(case), num_queries=stages.num_queries)
                found = None
            except RequestError as error:
                found = error.code
            assert found == (None if fits else code)


@contextmanager
def served(artifact: Path, steps: StepOptions) -> Iterator[ThinkerLoop]:
    service = open_service(artifact, EngineOptions(max_total_tokens=2048, steps=steps, loads_speech=False))
    try:
        assert service.thinker is not None
        yield service.thinker
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))


def rows_of(collector: Collector) -> HiddenRowsItem:
    (item,) = collector.wait(len)
    assert isinstance(item, HiddenRowsItem), item
    return item


def draw(loop: ThinkerLoop, prompts: Sequence[ThinkerPrompt]) -> list[HiddenRowsItem]:
    """The rows of several prompts, which run together."""
    collectors = [Collector() for _ in prompts]
    for prompt, collector in zip(prompts, collectors, strict=True):
        loop.submit_queries(prompt, collector.put, keys=loop.page_keys(prompt))
    return [rows_of(collector) for collector in collectors]


def check_hidden(case: str, rows: HiddenRowsItem, stages: Stages) -> None:
    """The final norm, here in double precision, of what the thinker hands out."""
    norm = load_stage(stages.artifact, "image_condition", CPU).weights["norm"].double()
    total = (rows.residual + rows.delta).double()
    hidden = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * norm
    assert_close(hidden.float(), GOLDEN[f"{case}.query_hidden"][0], LIMIT)


WAYS: dict[str, dict[str, Any]] = {
    "host samples": {},
    "device samples, small chunks": {"is_static": True, "max_chunk": 32},
    "two batches": {"is_static": True, "max_chunk": 32, "two_batch_overlap": True},
}


@pytest.mark.parametrize("way", WAYS)
def test_hidden_rows_equal_the_goldens_and_chats_beside_them_are_unchanged(
    way: str, image_artifact: Path, stages: Stages, prompts: Mapping[str, ThinkerPrompt]
) -> None:
    chat = stages.processor.prepare(messages("t2i")).tokens
    sampling = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.9)

    def ask(loop: ThinkerLoop) -> Collector:
        collector = Collector()
        loop.submit(chat, sampling, 3, collector.put, recorder=collector.recorder)
        return collector

    with served(image_artifact, StepOptions(**WAYS[way])) as loop:
        alone = ask(loop)
        expected = alone.tokens()
        beside = ask(loop)
        together = draw(loop, [*prompts.values()])
        assert beside.tokens() == expected
        for one, other in zip(alone.recorder.logits, beside.recorder.logits, strict=True):
            np.testing.assert_allclose(one, other, atol=2e-4)
        again = draw(loop, [prompts["two_refs"]])
    for case, rows in zip(prompts, together, strict=True):
        check_hidden(case, rows, stages)
    check_hidden("two_refs", again[0], stages)


def test_ranks_hand_out_the_same_rows(
    image_artifact: Path,
    two_rank_artifact: Path,
    stages: Stages,
    prompts: Mapping[str, ThinkerPrompt],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    artifact = joined(image_artifact, two_rank_artifact)
    with served(artifact, StepOptions(max_chunk=32, two_batch_overlap=True)) as loop:
        for case, rows in zip(prompts, draw(loop, [*prompts.values()]), strict=True):
            check_hidden(case, rows, stages)


def test_captions_equal_the_goldens(
    image_artifact: Path, stages: Stages, prompts: Mapping[str, ThinkerPrompt]
) -> None:
    """Condition rows, then glyph rows; in the batch also of the text that quotes nothing."""
    engine = load_stage(stages.artifact, "image_condition", CPU)["condition"]
    glyphs = load_stage(stages.artifact, "glyph", CPU)["encode"]
    parameters = stages.artifact.manifest.parameters_of("glyph", GlyphParameters)
    tokenizer = GlyphTokenizer(parameters.added_tokens, parameters.max_length)
    with served(image_artifact, StepOptions()) as loop:
        hidden = dict(zip(prompts, draw(loop, [*prompts.values()]), strict=True))
        pair = draw(loop, [prompts[case] for case in ARGUMENTS["batch"]["rows"]])

    def condition(rows: HiddenRowsItem) -> Tensor:
        return engine.run(residual=rows.residual, delta=rows.delta)["rows"]

    def shown(*texts: str) -> Tensor:
        return glyphs.run(ids=torch.from_numpy(np.stack([*map(tokenizer.encode, texts)])))["rows"]

    for case, rows in hidden.items():
        caption = condition(rows)
        assert_close(caption, GOLDEN[f"{case}.condition"][0], LIMIT)
        if text := ARGUMENTS[case]["glyph_text"]:
            caption = torch.cat([caption, shown(text)[0]])
        assert_close(caption, GOLDEN[f"{case}.caption"][0], LIMIT)
    batch = torch.stack([condition(rows) for rows in pair])
    captions = torch.cat([batch, shown(*ARGUMENTS["batch"]["glyph_text"])], dim=1)
    assert_close(captions, GOLDEN["batch.caption"], LIMIT)


def test_conformance_compares_every_value(image_artifact: Path, tmp_path: Path) -> None:
    """All rows pass, and with other reference values all fail but those of values that are inputs as well."""
    (file,) = [each for each in GOLDEN_FILES if each.name.endswith("imagegen_condition.safetensors")]
    engines = Engines(open_artifact(image_artifact))
    with torch.inference_mode():
        log = replay_file(engines, DATA, file)
    assert {row.outcome for row in log.comparisons} == {"pass"}
    tensors = [row for row in log.comparisons if row.kind == "tensor"]
    assert len(tensors) == 2 * 2 * len(CASES) + len(CASES) + 1 and len(log.comparisons) > 100
    (tmp_path / "imagegen").mkdir()
    compared = log._compared - log._inputs
    others = {
        name: value.logical_not() if value.dtype == torch.bool else value + 1 if name in compared else value
        for name, value in GOLDEN.items()
    }
    save_file({**GOLDEN, **{name: others[name] for name in compared & {*GOLDEN}}}, tmp_path / file.name)
    document = json.loads((DATA / "imagegen" / "imagegen.json").read_text("utf-8"))
    for case in document["glyph_text"]:
        case["text"] += "x"
    for case in document["byt5_tokenizer"]["cases"]:
        case["ids"] = [each + 1 for each in case["ids"]]
    for case in document["condition"].values():
        if "prompt" in case:
            case["prompt"] += "x"
    (tmp_path / "imagegen" / "imagegen.json").write_text(json.dumps(document), "utf-8")
    with torch.inference_mode():
        log = replay_file(engines, tmp_path, file)
    passed = {row.name.partition(": ")[2] for row in log.comparisons if row.outcome == "pass"}
    assert passed == {f"{case}.{kind}" for case in CASES for kind in ("query_hidden", "glyph_text")}
