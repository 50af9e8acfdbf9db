"""Encoders in a served artifact: media sent again are not encoded again, those of several requests share calls.

Answers are compared with those of a server that encodes everything, one request after the other.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mingc.artifacts.artifact import open_artifact
from mingc.media.decoder_pool import DecoderPool
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.request import Recorder, SamplingParams, TextDelta
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.verify.served.cases import read_goldens
from mingc.verify.served.conversion import decoded_messages

CASES = ("image", "two images", "video", "audio", "image, audio")


@dataclass
class Watched:
    """A service, the number of media in every call of its encoders, and the prompts that its thinker got."""

    service: OmniService
    calls: list[int] = field(default_factory=list)
    prompts: list[ThinkerPrompt] = field(default_factory=list)
    may_return: threading.Event = field(default_factory=threading.Event)  # from a call


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logits: NDArray[np.float32]

    def equals(self, other: Answer) -> bool:
        """Whether tokens and logits are the same to the last bit."""
        return self.tokens == other.tokens and np.array_equal(self.logits, other.logits)


def watch(service: OmniService, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(service)
    watched.may_return.set()
    chat = service._chat
    assert chat is not None and chat.vision is not None and chat.audio is not None
    for loop in (chat.vision, chat.audio):
        encode = loop._encoder.encode

        def note(features: Any, encode: Any = encode) -> Any:
            watched.calls.append(len(features))
            assert watched.may_return.wait(60)
            return encode(features)

        monkeypatch.setattr(loop._encoder, "encode", note)
    submit = chat.loop.submit

    def note_prompt(prompt: ThinkerPrompt, *arguments: Any, **options: Any) -> int:
        watched.prompts.append(prompt)
        return submit(prompt, *arguments, **options)

    monkeypatch.setattr(chat.loop, "submit", note_prompt)
    return watched


@pytest.fixture(scope="module")
def services(eager_artifact: Path) -> Iterator[tuple[OmniService, OmniService]]:
    """A service without and one with an encoder cache; neither has a prefix cache, which would hide it."""
    opened = [
        open_service(
            eager_artifact,
            EngineOptions(prefix_cache=False, loads_speech=False, encoder_cache=max_bytes),
            media=DecoderPool(),
        )
        for max_bytes in (0, EngineOptions().encoder_cache)
    ]
    yield opened[0], opened[1]
    for service in opened:
        asyncio.run(service.close(shutdown_timeout_s=1.0))


class Chats:
    """The recorded chats of an artifact."""

    def __init__(self, root: Path) -> None:
        artifact = open_artifact(root)
        assert artifact.manifest.served_goldens is not None
        self._goldens = read_goldens(artifact.path(artifact.manifest.served_goldens))

    async def answer(self, service: OmniService, name: str) -> Answer:
        (case,) = (each for each in self._goldens.cases if each.name == name)
        params = SamplingParams(max_tokens=6, ignore_eos=True)
        messages = decoded_messages(case, self._goldens.tensors)
        recorder = Recorder()
        events = service.answer(lambda: service.prepare(messages), params, recorder=recorder)
        deltas = [event async for event in events if isinstance(event, TextDelta) and event.token is not None]
        return Answer(
            [each.token for each in deltas if each.token is not None],
            np.stack(recorder.logits),
        )

    async def together(self, watched: Watched, first: str, names: Sequence[str]) -> list[Answer]:
        """Answers to all; `names` are sent while the encoder is in its call for the media of `first`."""
        service, queue = watched.service, "media in the vision_encoder"
        watched.may_return.clear()
        tasks = [asyncio.create_task(self.answer(service, first))]
        try:
            async with asyncio.timeout(60):
                for count, name in enumerate(names, start=1):
                    while service.held[queue] < count or not watched.calls:
                        await asyncio.sleep(0.001)
                    tasks.append(asyncio.create_task(self.answer(service, name)))
                while service.held[queue] <= len(names):
                    await asyncio.sleep(0.001)
        finally:
            watched.may_return.set()
        return await asyncio.gather(*tasks)

    def ask(self, service: OmniService, name: str) -> Answer:
        return asyncio.run(self.answer(service, name))


@pytest.fixture(scope="module")
def chats(eager_artifact: Path) -> Chats:
    return Chats(eager_artifact)


@pytest.mark.parametrize("name", CASES)
def test_media_sent_again_are_not_encoded_again(
    name: str, services: tuple[OmniService, OmniService], chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cached = (watch(each, monkeypatch) for each in services)
    cached.service.forget_caches()
    before = cached.service.load
    expected = [chats.ask(plain.service, name) for _ in range(2)]
    assert sum(plain.calls) > 0 and len(plain.calls) % 2 == 0
    first = chats.ask(cached.service, name)
    once, load = sum(cached.calls), cached.service.load
    assert 2 * once == sum(plain.calls)
    embeds = cached.prompts[0].media_embeds
    assert embeds is not None and load.encoder_cache_bytes == embeds.numel() * embeds.itemsize
    assert load.encoder_misses - before.encoder_misses == once and load.encoder_hits == before.encoder_hits
    with torch.inference_mode():
        embeds.zero_()  # what a request does to its embeddings is its own affair
    second = chats.ask(cached.service, name)
    assert sum(cached.calls) == once
    assert cached.service.load.encoder_hits - load.encoder_hits == once
    assert all(each.equals(expected[0]) for each in (expected[1], first, second))
    for prompt in (cached.prompts[1], *plain.prompts):
        assert prompt.media_embeds is not None and torch.equal(
            prompt.media_embeds, plain.prompts[0].media_embeds
        )


def test_two_at_once_encode_their_image_once(
    services: tuple[OmniService, OmniService], chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, cached = (watch(each, monkeypatch) for each in services)
    cached.service.forget_caches()
    expected = chats.ask(plain.service, "image")

    async def both() -> list[Answer]:
        return await asyncio.gather(*(chats.answer(cached.service, "image") for _ in range(2)))

    found = asyncio.run(both())
    assert cached.calls == [1]
    assert [each.tokens for each in found] == 2 * [expected.tokens]
    assert plain.service.load.encoder_misses == plain.service.load.encoder_hits == 0


def test_images_and_videos_of_several_requests_share_a_call(
    services: tuple[OmniService, OmniService], chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has the embeddings that it has alone."""
    names = ("image", "video", "image")  # 6, 8 and 6 tokens: the first two fill a bucket of 16
    watched = watch(services[0], monkeypatch)
    expected = [chats.ask(watched.service, name) for name in ("image", *names)]
    alone = {prompt.input_ids.tobytes(): prompt.media_embeds for prompt in watched.prompts}
    watched.calls.clear()
    watched.prompts.clear()
    found = asyncio.run(chats.together(watched, "image", names))
    assert watched.calls == [1, 2, 1]
    for prompt in watched.prompts:
        embeds = alone[prompt.input_ids.tobytes()]
        assert embeds is not None and prompt.media_embeds is not None
        torch.testing.assert_close(prompt.media_embeds, embeds, atol=1e-6, rtol=0)
    assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_requests_that_leave_take_nothing_from_another(
    services: tuple[OmniService, OmniService], chats: Chats, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = watch(services[1], monkeypatch)
    watched.service.forget_caches()
    expected = chats.ask(services[0], "image")

    async def run() -> Answer:
        held = watched.service.held
        watched.may_return.clear()
        first = asyncio.create_task(chats.answer(watched.service, "image"))
        async with asyncio.timeout(60):
            while not watched.calls:
                await asyncio.sleep(0.001)
            second = asyncio.create_task(chats.answer(watched.service, "image"))
            leaving = asyncio.create_task(chats.answer(watched.service, "video"))
            while watched.service.held["requests"] < 3 or watched.service.load.encoder_hits == hits:
                await asyncio.sleep(0.001)
            while watched.service.held["media in the vision_encoder"] < 2:
                await asyncio.sleep(0.001)
        first.cancel()
        leaving.cancel()
        await asyncio.gather(first, leaving, return_exceptions=True)
        watched.may_return.set()
        answer = await second
        async with asyncio.timeout(60):
            while watched.service.held != held:
                await asyncio.sleep(0.001)
        return answer

    hits = watched.service.load.encoder_hits
    found = asyncio.run(run())
    assert found.tokens == expected.tokens
    assert watched.calls == [1], "the video of the request that left is not encoded"
