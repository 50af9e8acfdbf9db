"""Prefix cache on real engines: answers that reuse pages equal those that do not, in float32 on a CPU.

Pages of prompts give the same bits. Pages of answers were written by decode steps, whose GEMMs have another shape than
those of the chunk that would compute them again, so that the next turn of a chat differs by rounding.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from held_resources import wait_until_equal
from mingc_command import ENVIRONMENT
from numpy.typing import NDArray
from PIL import Image

from mingc.media.decoder_pool import DecoderPool
from mingc.prompts.conversation import MediaPart, Message, TextPart, TokensPart
from mingc.prompts.prompt_writer import PreparedPrompt
from mingc.runtime.request import Done, Recorder, SamplingParams, TextDelta
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.worker import StepOptions

PAGE = 16
ROUNDING = 2e-4
# Of logits up to about 1; what decode steps of another batch size differ by, too (test_isolation.py).
TEXT = "Please say in a few words what you can see here, and what is said. "


def picture(seed: int, width: int = 96, height: int = 64) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def clip(frequency: float) -> bytes:
    file = io.BytesIO()
    wave = 0.2 * np.sin(2 * np.pi * frequency * np.arange(24000) / 16000)
    soundfile.write(file, wave.astype(np.float32), 16000, format="WAV")
    return file.getvalue()


@cache
def video() -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=4)
        stream.height, stream.width, stream.pix_fmt = 64, 96, "bgr0"
        for index in range(8):
            pixels = np.random.default_rng(index).integers(0, 255, (64, 96, 3), np.uint8)
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, 4)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def conversation(*parts: tuple[str, bytes], text: str = TEXT) -> tuple[Message, ...]:
    media = [MediaPart(kind=kind, data=data, where="part") for kind, data in parts]  # type: ignore[arg-type]
    return (Message(role="user", parts=(*media, TextPart(text=text))),)


CONVERSATIONS = {
    "text": conversation(text=4 * TEXT),
    "image": conversation(("image", picture(1))),
    "audio": conversation(("audio", clip(330))),
    "video": conversation(("video", video())),
    "image and audio": conversation(("image", picture(2)), ("audio", clip(500))),
    "several chunks": conversation(text=8 * TEXT),
}


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logits: NDArray[np.float32]
    prompt_tokens: int
    cached_tokens: int

    def equals(self, other: Answer) -> bool:
        """Whether tokens and logits are the same to the last bit."""
        return self.tokens == other.tokens and np.array_equal(self.logits, other.logits)


async def answer(
    service: OmniService, prompt: PreparedPrompt, *, max_tokens: int = 12, **sampling: Any
) -> Answer:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **sampling)
    recorder = Recorder()
    events = [event async for event in service.answer(lambda: prompt, params, recorder=recorder)]
    deltas = [event for event in events if isinstance(event, TextDelta) and event.token is not None]
    done = events[-1]
    assert isinstance(done, Done)
    return Answer(
        [delta.token for delta in deltas if delta.token is not None],
        np.stack(recorder.logits),
        done.usage.prompt_tokens,
        done.usage.cached_tokens,
    )


def ask(service: OmniService, prompt: PreparedPrompt, **options: Any) -> Answer:
    return asyncio.run(answer(service, prompt, **options))


def next_turn(prompt: PreparedPrompt, tokens: list[int]) -> PreparedPrompt:
    """The prompt that goes on after an answer, at the positions that the answer had."""
    first = prompt.tokens
    added = np.array([*tokens, *range(50, 70)])
    places = np.arange(first.num_tokens, first.num_tokens + len(added)) + first.rope_delta
    following = replace(
        first,
        input_ids=np.concatenate([first.input_ids, added]),
        positions=np.concatenate([first.positions, np.tile(places, (3, 1))], axis=1),
        embed_kind=np.concatenate([first.embed_kind, np.zeros(len(added), np.int64)]),
    )
    return PreparedPrompt(tokens=following, media=prompt.media)


def full_pages(num_tokens: int) -> int:
    """Tokens of a prompt whose pages can be reused: the last token is always computed."""
    return (num_tokens - 1) // PAGE * PAGE


WAYS = {"host sampling": StepOptions(), "device sampling": StepOptions(is_static=True)}


@pytest.fixture(
    scope="module", params=["host sampling", pytest.param("device sampling", marks=pytest.mark.exhaustive)]
)
def services(
    eager_artifact: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[OmniService, OmniService]]:
    """A service without and one with a prefix cache."""
    opened = []
    for is_cached in (False, True):
        options = EngineOptions(prefix_cache=is_cached, steps=WAYS[request.param], loads_speech=False)
        opened.append(open_service(eager_artifact, options, media=DecoderPool()))
    yield opened[0], opened[1]
    for service in opened:
        asyncio.run(service.close(shutdown_timeout_s=1.0))


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_prompt_again_has_the_same_answer(services: tuple[OmniService, OmniService], name: str) -> None:
    plain, cached = services
    cached.forget_caches()
    prompt = plain.prepare(CONVERSATIONS[name])
    expected = ask(plain, prompt)
    assert expected.cached_tokens == 0 and len(expected.tokens) == 12
    answers = [ask(cached, prompt), ask(cached, cached.prepare(CONVERSATIONS[name]))]
    assert [each.cached_tokens for each in answers] == [0, full_pages(expected.prompt_tokens)]
    assert all(each.equals(expected) for each in answers)
    wait_until_equal({"KV pages": 0}, lambda: {"KV pages": cached.held["KV pages"]})


@pytest.mark.parametrize("name", ["text", "image and audio"])
def test_the_next_turn_has_the_same_answer(services: tuple[OmniService, OmniService], name: str) -> None:
    plain, cached = services
    prompt = plain.prepare(CONVERSATIONS[name])
    first = ask(cached, prompt, max_tokens=40)
    following = next_turn(prompt, first.tokens)
    expected, found = ask(plain, following), ask(cached, following)
    assert found.cached_tokens == full_pages(first.prompt_tokens + len(first.tokens))
    assert found.tokens == expected.tokens
    np.testing.assert_allclose(found.logits, expected.logits, atol=ROUNDING)


def second_turn(first: tuple[Message, ...], answer: Sequence[int]) -> tuple[Message, ...]:
    return (
        *first,
        Message(role="assistant", parts=(TokensPart(ids=tuple(answer)),)),
        *conversation(text="And?"),
    )


@pytest.mark.parametrize("name", ["text", "image and audio", "several chunks"])
def test_a_conversation_finds_the_pages_of_an_answer_up_to_its_cut(
    services: tuple[OmniService, OmniService], name: str
) -> None:
    """The prompt has the ids of the answer, of which the client may have heard a part."""
    plain, cached = services
    cached.forget_caches()
    prompt = plain.prepare(CONVERSATIONS[name])
    tokens = ask(cached, prompt, max_tokens=40).tokens
    for cut in (39, 23, 1):
        following = plain.prepare(second_turn(CONVERSATIONS[name], tokens[:cut]))
        ids, start = following.tokens.input_ids.tolist(), prompt.tokens.num_tokens
        assert ids[: start + cut] == [*prompt.tokens.input_ids, *tokens[:cut]]
        expected, found = ask(plain, following), ask(cached, following)
        assert found.cached_tokens == (start + cut) // PAGE * PAGE
        assert found.tokens == expected.tokens
        np.testing.assert_allclose(found.logits, expected.logits, atol=ROUNDING)


def test_images_share_nothing(services: tuple[OmniService, OmniService]) -> None:
    """Prompts of equal ids; what comes before the image is shared."""
    plain, cached = services
    cached.forget_caches()
    prompts = [plain.prepare(conversation(("image", picture(seed)))) for seed in (1, 2)]
    assert np.array_equal(prompts[0].tokens.input_ids, prompts[1].tokens.input_ids)
    expected = [ask(plain, prompt) for prompt in prompts]
    assert not expected[0].equals(expected[1])
    found = [ask(cached, prompt) for prompt in (*prompts, *prompts)]
    assert all(each.equals(wanted) for each, wanted in zip(found, (*expected, *expected), strict=True))
    before_image = int(np.flatnonzero(prompts[0].tokens.embed_kind)[0])
    assert (
        found[1].cached_tokens
        == before_image // PAGE * PAGE
        < found[2].cached_tokens
        == found[3].cached_tokens
    )


def test_many_at_once_in_a_small_pool(eager_artifact: Path) -> None:
    """Requests that join and leave, and more pages than there are: each has the answer that it has alone."""
    plain = open_service(
        eager_artifact, EngineOptions(prefix_cache=False, loads_speech=False), media=DecoderPool()
    )
    prompts = [plain.prepare(CONVERSATIONS[name]) for name in CONVERSATIONS if name != "several chunks"]
    prompts += [plain.prepare(conversation(("image", picture(seed)), text=f"{seed}")) for seed in range(3)]
    expected = [ask(plain, prompt) for prompt in prompts]
    options = EngineOptions(max_total_tokens=PAGE * 34, max_running=4, loads_speech=False)
    small = open_service(eager_artifact, options, media=DecoderPool())

    async def leave(prompt: PreparedPrompt) -> None:
        events = small.answer(lambda: prompt, SamplingParams(max_tokens=90, ignore_eos=True))
        async for event in events:
            if isinstance(event, TextDelta):
                break
        await events.aclose()  # type: ignore[attr-defined]

    async def run() -> None:
        for _ in range(2):
            leaving = [asyncio.create_task(leave(prompt)) for prompt in prompts[:2]]
            found = await asyncio.gather(*[answer(small, prompt) for prompt in prompts])
            await asyncio.gather(*leaving)
            for each, wanted in zip(found, expected, strict=True):
                assert each.tokens == wanted.tokens
                np.testing.assert_allclose(each.logits, wanted.logits, atol=ROUNDING)
        load = small.load
        assert load.evicted_pages > 20 and load.reused_tokens > 100

    try:
        asyncio.run(run())
        wait_until_equal({"KV pages": 0}, lambda: {"KV pages": small.load.kv_pages_used})
    finally:
        for service in (plain, small):
            asyncio.run(service.close(shutdown_timeout_s=1.0))


def test_ranks_reuse_the_same_pages(two_rank_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 chooses the pages, the others get page tables."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    service = open_service(two_rank_artifact, EngineOptions(loads_speech=False), media=DecoderPool())
    try:
        for name in ("text", "image and audio"):
            prompt = service.prepare(CONVERSATIONS[name])
            first, again = ask(service, prompt), ask(service, prompt)
            assert again.equals(first)
            assert again.cached_tokens == full_pages(first.prompt_tokens)
            following = service.prepare(second_turn(CONVERSATIONS[name], first.tokens[:11]))
            found = ask(service, following)
            assert found.cached_tokens == (first.prompt_tokens + 11) // PAGE * PAGE
            service.forget_caches()
            expected = ask(service, following)
            assert (found.tokens, expected.cached_tokens) == (expected.tokens, 0)
            np.testing.assert_allclose(found.logits, expected.logits, atol=ROUNDING)
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
