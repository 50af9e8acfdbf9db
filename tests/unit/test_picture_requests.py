"""What a request for pictures asks of the thinker and of the sampler's memory."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_engines import HIDDEN
from fake_images import DIT, QUERIES, VAE, image_stages

from mingc.errors import RequestError
from mingc.prompts.conversation import Message, TextPart
from mingc.prompts.glyph import GlyphTokenizer
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.images.engines import ImageEngines, ImageSampler
from mingc.runtime.images.memory import ImageMemory
from mingc.runtime.images.worker import Drawing, ImageWorker, PicturePrompt
from mingc.runtime.request import ImageRequest
from mingc.runtime.request_stream import HiddenRowsItem
from mingc.runtime.service.drawing import ImagePipeline, negative_messages, picture_prompts, plan_batch

WIDTH, INNER = 4096, 8192
SAMPLER = replace(DIT, hidden_size=WIDTH, feed_forward_size=INNER)  # whose steps need more than the VAE
MEMORY = ImageMemory(sampler=SAMPLER, vae=VAE, itemsize=2, max_samples=8)


def pipeline(**parts: Any) -> ImagePipeline:
    return cast(ImagePipeline, SimpleNamespace(**{"memory": MEMORY, "num_queries": (1, 3), **parts}))


def said(role: Any, text: str) -> Message:
    return Message(role=role, parts=(TextPart(text=text),))


def test_a_negative_prompt_replaces_all_turns_but_not_the_instructions() -> None:
    turns = (said("system", "Be brief."), said("user", "a cat"), said("assistant", "?"), said("user", "big"))
    request = ImageRequest(request_id="x", messages=turns, negative_prompt="dogs")
    assert negative_messages(request) == (turns[0], said("user", "dogs"))


@pytest.mark.parametrize(
    ("texts", "ids"),
    [
        (("a cat", "dogs"), None),
        (('"a"', "dogs"), (b'Text "a". ', b"")),
        (("a cat", 'no "b"'), (b"", b'Text "b". ')),
    ],
)
def test_if_either_prompt_shows_a_text_both_have_rows_of_glyphs(texts: Any, ids: Any) -> None:
    """Spec: imagegen.md §2.2 (a byte b is b + 3, then 1 and zeros), §2.3: an empty text is the end token alone."""
    glyphs = GlyphTokenizer((), 16)
    hidden = [
        HiddenRowsItem(residual=torch.full((3, 2), n), delta=-torch.ones(3, 2), reused_tokens=0, begun_at=0)
        for n in (1.0, 2.0)
    ]
    prompts = picture_prompts(pipeline(glyphs=glyphs), hidden, texts)
    assert [each.residual[0, 0].item() for each in prompts] == [1, 2]
    assert all(torch.equal(each.delta, -torch.ones(3, 2)) for each in prompts)
    if ids is None:
        assert [each.glyph_ids for each in prompts] == [None, None]
        return
    for prompt, text in zip(prompts, ids, strict=True):
        expected = [*(byte + 3 for byte in text), 1]
        assert prompt.glyph_ids is not None
        assert prompt.glyph_ids.tolist() == expected + [0] * (16 - len(expected))


@pytest.mark.parametrize("guidance", [1.0, 2.0])
@pytest.mark.parametrize("has_reference", [False, True])
@pytest.mark.parametrize("num_glyphs", [None, 16])
def test_a_batch_has_as_many_pictures_as_fit(
    guidance: float, has_reference: bool, num_glyphs: int | None
) -> None:
    """To the byte: a picture of 256 × 256 has 16 · 16 tokens, and a step needs the same for each."""
    size, samples = (256, 256), 1 if guidance <= 1 else 2
    ids = None if num_glyphs is None else np.zeros(num_glyphs, np.int64)
    drawing = Drawing(
        size=size,
        num_steps=4,
        guidance=guidance,
        prompt=PicturePrompt(residual=torch.zeros(3, 2), delta=torch.zeros(3, 2), glyph_ids=ids),
        reference=np.zeros((*size, 3), np.uint8) if has_reference else None,
    )
    rows = samples * (16 * 16 * (1 + has_reference) + (20 if num_glyphs else 4))  # padded to fours
    picture = rows * ((6 * WIDTH + 3 * INNER) * 2 + 4 * WIDTH * 4)
    for count in range(1, 8 // samples + 1):
        assert plan_batch(pipeline(num_bytes=count * picture), drawing) == count
        if count > 1:
            assert plan_batch(pipeline(num_bytes=count * picture - 1), drawing) == count - 1
    assert plan_batch(pipeline(num_bytes=100 * picture), drawing) == 8 // samples
    scores = 3 * 4 * (32 * 32) ** 2  # of the VAE's attention, in float32
    small = replace(MEMORY, sampler=DIT)
    # Pictures are decoded one after the other.
    assert plan_batch(pipeline(memory=small, num_bytes=scores), drawing) == 8 // samples
    for short in (pipeline(num_bytes=picture - 1), pipeline(memory=small, num_bytes=scores - 1)):
        with pytest.raises(RequestError, match="a picture of 256×256 needs") as refused:
            plan_batch(short, drawing)
        error = refused.value
        assert (error.status, error.code, error.param) == (507, "insufficient_memory", "size")


def test_memory_is_planned_for_the_dtype_of_the_networks() -> None:
    """Weights are no measure of it: angles and scales are float32."""
    stage = image_stages()["image_dit"]
    spec = stage["end"].spec
    inputs = (replace(each, dtype="bfloat16") for each in spec.inputs)
    graphs = {**stage.graphs, "end": Graph(replace(spec, inputs=tuple(inputs)), {})}
    rough = LoadedStage("image_dit", graphs, {"angles_0": torch.zeros(4)})
    found = [ImageSampler(each, DIT, torch.device("cpu")).itemsize for each in (stage, rough)]
    assert found == [4, 2]


def test_two_devices_take_twice_the_pictures_with_guidance() -> None:
    """Each has one sample of a picture, so that a picture takes half as much of a device."""
    ask = {"num_caption": 8, "num_frames": 1}
    shared = replace(MEMORY, num_samplers=2)
    assert [MEMORY.max_pictures(samples) for samples in (1, 2)] == [8, 4]
    assert [shared.max_pictures(samples) for samples in (1, 2)] == [8, 8]
    alone = MEMORY.step_bytes((256, 256), 2, num_samples=2, **ask)
    assert shared.step_bytes((256, 256), 4, num_samples=2, **ask) == alone
    assert shared.step_bytes((256, 256), 4, num_samples=1, **ask) == alone


def test_a_reference_does_not_count_in_a_dynamic_shift() -> None:
    """Spec: imagegen.md §5; a picture of 256 × 256 has 16 · 16 tokens."""
    stages, sampler = image_stages(), replace(DIT, is_shift_dynamic=True)
    names = ("image_condition", "glyph", "image_dit", "image_vae")
    engines = ImageEngines(
        *(stages[name] for name in names), parameters=sampler, vae=VAE, device=torch.device("cpu")
    )
    drawing = Drawing(
        size=(256, 256),
        num_steps=4,
        guidance=2.0,
        prompt=PicturePrompt(residual=torch.zeros(QUERIES, HIDDEN), delta=torch.zeros(QUERIES, HIDDEN)),
        reference=np.zeros((256, 256, 3), np.uint8),
    )
    prepared = ImageWorker(engines).prepare(drawing)
    assert prepared.layout.num_noisy == 256 and len(prepared.layout.is_pad) == 512
    shift = math.exp(0.5)  # `base_shift` at `base_image_seq_len` 256
    expected = [shift * s / (1 + (shift - 1) * s) for s in (1, 2 / 3, 1 / 3, 0)] + [0]
    np.testing.assert_allclose(prepared.levels, expected, rtol=1e-6)
