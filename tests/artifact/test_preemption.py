"""Chats that lose their KV pages and get them again, on real engines: text, sound and usage as without.

In float32. What decode steps had written is prefilled again, in GEMMs of another shape, so logits differ by rounding.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_resources import wait_until_equal
from mingc_command import ENVIRONMENT
from numpy.typing import NDArray
from PIL import Image

from mingc.media.decoder_pool import DecoderPool
from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.runtime.request import AudioDelta, Done, Recorder, SamplingParams, SpeechParams, TextDelta, Usage
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.worker import StepOptions

ROUNDING = 2e-4  # of logits up to about 1, as in test_prefix_cache.py
SPOKEN, WITH_PICTURE, NUM_CHATS = 0, 1, 3
TOKENS = 176  # of KV pages: two answers do not fit


def picture() -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(4).integers(0, 255, (64, 96, 3), np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def chat(number: int) -> tuple[tuple[Message, ...], SamplingParams, SpeechParams | None]:
    media = [MediaPart(kind="image", data=picture(), where="part")] if number == WITH_PICTURE else []
    messages = (Message(role="user", parts=(*media, TextPart(text=f"Tell story {number}."))),)
    rules: Sequence[dict[str, Any]] = (
        {},
        {"temperature": 0.7, "top_k": 30, "min_tokens": 30},
        {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    )
    sampling = SamplingParams(max_tokens=70, ignore_eos=True, seed=number, **rules[number])
    return messages, sampling, SpeechParams(seed=3, max_steps=3) if number == SPOKEN else None


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    text: str
    logits: NDArray[np.float32]
    sound: NDArray[np.float32]
    usage: Usage


async def answer(service: OmniService, number: int) -> Answer:
    messages, sampling, speech = chat(number)
    recorder = Recorder()
    events = [
        event
        async for event in service.answer(
            lambda: service.prepare(messages), sampling, speech, recorder=recorder
        )
    ]
    deltas = [event for event in events if isinstance(event, TextDelta)]
    done = events[-1]
    assert isinstance(done, Done)
    return Answer(
        [delta.token for delta in deltas if delta.token is not None],
        "".join(delta.text for delta in deltas),
        np.stack(recorder.logits),
        np.concatenate([np.zeros(0), *(e.samples for e in events if isinstance(e, AudioDelta))]),
        done.usage,
    )


async def together(service: OmniService) -> list[Answer]:
    return list(await asyncio.gather(*(answer(service, number) for number in range(NUM_CHATS))))


@pytest.fixture(scope="module")
def plenty(eager_artifact: Path) -> list[Answer]:
    """Answers of one rank whose chats have all pages, sampled by the host."""
    answers, num_preempted = answers_of(eager_artifact, EngineOptions())
    assert num_preempted == 0
    return answers


@pytest.mark.parametrize("way", ["host samples", "overlapped chunks", "two ranks"])
def test_preempted_chats_answer_as_if_they_had_all_pages(
    way: str, plenty: list[Answer], request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    artifact: Path = request.getfixturevalue("two_rank_artifact" if way == "two ranks" else "eager_artifact")
    steps = StepOptions()
    if way == "overlapped chunks":
        steps = StepOptions(is_static=True, max_chunk=1, two_batch_overlap=True)
    scarce, num_preempted = answers_of(artifact, EngineOptions(steps=steps, max_total_tokens=TOKENS))
    assert num_preempted > 0
    for expected, preempted in zip(plenty, scarce, strict=True):
        assert (preempted.tokens, preempted.text) == (expected.tokens, expected.text)
        assert replace(preempted.usage, cached_tokens=0) == replace(expected.usage, cached_tokens=0)
        np.testing.assert_allclose(preempted.logits, expected.logits, atol=ROUNDING)
        np.testing.assert_allclose(preempted.sound, expected.sound, atol=1e-3)
    assert scarce[SPOKEN].sound.any()


def answers_of(artifact: Path, options: EngineOptions) -> tuple[list[Answer], int]:
    """Answers to all chats at once, and how often one was preempted."""
    service = open_service(artifact, options, media=DecoderPool())
    try:
        answers = asyncio.run(together(service))
        wait_until_equal({"KV pages": 0}, lambda: {"KV pages": service.held["KV pages"]})
        return answers, service.load.num_preempted
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
