"""Encoder cache in a served artifact: recorded media sent again are not encoded again, and the answers are the same."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mingc.artifacts.artifact import open_artifact
from mingc.runtime.prompt import ThinkerPrompt
from mingc.runtime.request import SamplingParams, TextDelta
from mingc.runtime.service.builder import EngineOptions, open_service
from mingc.runtime.service.omni import OmniService
from mingc.verify.served.cases import read_goldens
from mingc.verify.served.conversion import decoded_messages

CASES = ("image", "two images", "video", "audio", "image, audio")


@dataclass
class Watched:
    """A service, the number of media in every call of its encoders, and the prompts that its thinker got."""

    service: OmniService
    calls: list[int] = field(default_factory=list)
    prompts: list[ThinkerPrompt] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    logits: NDArray[np.float32]

    def equals(self, other: Answer) -> bool:
        """Whether tokens and logits are the same to the last bit."""
        return self.tokens == other.tokens and np.array_equal(self.logits, other.logits)


def watch(service: OmniService, monkeypatch: pytest.MonkeyPatch) -> Watched:
    watched = Watched(service)
    chat = service._chat
    assert chat is not None and chat.vision is not None and chat.audio is not None
    for loop in (chat.vision, chat.audio):
        encode = loop._encoder.encode

        def note(features: Any, encode: Any = encode) -> Any:
            watched.calls.append(len(features))
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
            eager_artifact, EngineOptions(prefix_cache=False, loads_speech=False, encoder_cache=max_bytes)
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
        events = service.answer(lambda: service.prepare(messages), params, records_logits=True)
        deltas = [event async for event in events if isinstance(event, TextDelta) and event.token is not None]
        return Answer(
            [each.token for each in deltas if each.token is not None],
            np.stack([each.logits for each in deltas if each.logits is not None]),
        )

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

    async def both() -> list[Answer]:
        return await asyncio.gather(*(chats.answer(cached.service, "image") for _ in range(2)))

    expected = chats.ask(plain.service, "image")
    found = asyncio.run(both())
    assert cached.calls == [1]
    assert [each.tokens for each in found] == 2 * [expected.tokens]
    assert plain.service.load.encoder_misses == plain.service.load.encoder_hits == 0
