"""Prompts with media, as the service gives them to the thinker: each media token has its own input's embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fake_engines import HIDDEN
from fake_omni import collect, make_service, run
from fake_thinker import thinker_parameters
from preprocess_data import audio_parameters, noise_image, png, tokenizer, vision_parameters, wav

from mingc.artifacts.parameters import ThinkerParameters
from mingc.errors import RequestError
from mingc.media.audio import load_audio
from mingc.media.decoding import InProcessDecoder
from mingc.media.image import load_image
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import MediaPart, Message, TextPart, TokensPart
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.request import ChatRequest, Done, SamplingParams
from mingc.runtime.service.omni import OmniService

VISION, AUDIO = (
    1,
    2,
)  # values of embed_kind: the router gates of image and audio tokens (spec: thinker.md §2.3)


class FakeEncoder:
    """Takes all media in one call."""

    max_batch_tokens = 1

    def padded_tokens(self, features: Sequence[object]) -> int:
        return 1


class FakeVisionEncoder(FakeEncoder):
    """Embeddings of a picture: its number of pixels, then the index of the token."""

    def encode(self, features: Sequence[VisionFeatures]) -> list[torch.Tensor]:
        merged = vision_parameters().merge_size ** 2
        return [rows(len(each.pixels), len(each.pixels) // merged) for each in features]


class FakeAudioEncoder(FakeEncoder):
    """Embeddings of a clip: minus its number of frames, then the index of the token."""

    def encode(self, features: Sequence[AudioFeatures]) -> list[torch.Tensor]:
        return [rows(-len(each.mel), each.num_tokens) for each in features]


def rows(value: float, count: int) -> torch.Tensor:
    return torch.tensor([[value, index] + [0.0] * (HIDDEN - 2) for index in range(count)])


def image(height: int, width: int) -> MediaPart:
    return MediaPart(kind="image", data=png(noise_image(height, width)), where="image")


def clip(seconds: float) -> MediaPart:
    samples = np.sin(np.arange(int(16000 * seconds), dtype=np.float32) / 20)
    return MediaPart(kind="audio", data=wav(samples, 16000), where="clip")


A, B, X, Y = image(64, 64), image(64, 96), clip(0.3), clip(0.5)
CASES: dict[str, list[MediaPart]] = {
    "image": [A],
    "audio": [X],
    "image, audio": [A, X],
    "audio, image": [X, A],
    "two of each, mixed": [X, A, Y, B],
    "two of each, in turn": [B, A, Y, X],
}


def make_media_service() -> tuple[OmniService, ThinkerParameters]:
    thinker = thinker_parameters(tokenizer().token_id)
    processor = ChatProcessor(
        tokenizer(),
        thinker,
        vision=vision_parameters(),
        audio=audio_parameters(),
        max_tokens=4096,
        decoder=InProcessDecoder(),
    )
    service = make_service(
        processor=processor,
        vision=EncoderLoop("vision_encoder", FakeVisionEncoder()),
        audio=EncoderLoop("audio_encoder", FakeAudioEncoder()),
    )
    return service, thinker


def test_a_prompt_that_is_too_long_is_refused_before_the_encoders_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, _ = make_media_service()
    calls: list[object] = []
    for encoder in (FakeVisionEncoder, FakeAudioEncoder):
        monkeypatch.setattr(encoder, "encode", lambda _, features: calls.append(features))
    request = ChatRequest(
        request_id="r",
        messages=(Message(role="user", parts=(A, X, TextPart(text="word " * 240))),),
        sampling=SamplingParams(max_tokens=3),
    )
    # The context of the service is shorter than that of the processor, which refuses nothing here.
    monkeypatch.setattr(service.thinker.scheduler, "max_context", 200)
    with pytest.raises(RequestError) as error:
        run(service, collect(service.chat(request)))
    assert error.value.code == "context_length_exceeded" and not calls


@pytest.mark.parametrize("case", CASES)
def test_every_media_token_has_the_embedding_and_the_gate_of_its_own_input(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = CASES[case]
    service, thinker = make_media_service()
    prompts: list[ThinkerPrompt] = []
    assert service.thinker is not None
    submit = service.thinker.submit

    def note(prompt: ThinkerPrompt, *arguments: Any, **options: Any) -> int:
        prompts.append(prompt)
        return submit(prompt, *arguments, **options)

    monkeypatch.setattr(service.thinker, "submit", note)
    request = ChatRequest(
        request_id="r",
        messages=(Message(role="user", parts=(*parts, TextPart(text="What is this?"))),),
        sampling=SamplingParams(max_tokens=3),
    )
    assert isinstance(run(service, collect(service.chat(request)))[-1], Done)

    (prompt,) = prompts
    assert prompt.media_embeds is not None
    given = iter(prompt.media_embeds.tolist())
    embeds = [next(given) if kind else None for kind in prompt.embed_kind]
    assert next(given, None) is None, "an embedding that no token takes"
    is_image = prompt.input_ids == thinker.image_patch_token
    is_audio = prompt.input_ids == thinker.audio_patch_token
    assert prompt.embed_kind.tolist() == np.select([is_image, is_audio], [VISION, AUDIO], 0).tolist()
    # Runs of media tokens, one per input, in the order of the message.
    found = [[] for _ in parts]
    index = -1
    for at, embedding in enumerate(embeds):
        if embedding is not None:
            index += embeds[at - 1] is None
            found[index].append(embedding)
    for part, mine in zip(parts, found, strict=True):
        assert mine == expected_embeddings(part)


def test_media_of_a_conversation_are_decoded_once_and_turns_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, _ = make_media_service()
    decoded: list[str] = []
    decode = InProcessDecoder.run
    monkeypatch.setattr(
        InProcessDecoder,
        "run",
        lambda self, task, data: (decoded.append(task.kind), decode(self, task, data))[1],
    )

    def request(*messages: Message) -> ChatRequest:
        return ChatRequest(request_id="r", messages=messages, sampling=SamplingParams(max_tokens=3))

    async def converse() -> None:
        picture, sound = [await service.decode_media(part) for part in (A, X)]
        assert decoded == ["image", "audio"]
        turns = [
            Message(role="user", parts=(picture, sound)),
            Message(role="assistant", parts=(TokensPart(ids=(40, 41)),)),
            Message(role="user", parts=(TextPart(text="And this?"), sound)),
        ]
        sizes = await service.count_tokens(request(*turns))
        assert len(sizes) == 4
        for first in (0, 2):
            done = (await collect(service.chat(request(*turns[first:]))))[-1]
            assert isinstance(done, Done)
            assert done.usage.prompt_tokens == sizes[0] + sum(sizes[first + 1 :])
        assert decoded == ["image", "audio"]
        with pytest.raises(RequestError) as refused:
            await service.decode_media(replace(X, data=b"no sound"))
        assert refused.value.where == X.where

    run(service, converse())


def expected_embeddings(part: MediaPart) -> list[list[float]]:
    """What the fake encoders return for this input alone."""
    if part.kind == "image":
        features = load_image(part.data, vision_parameters(), part.where)
        return FakeVisionEncoder().encode([features])[0].tolist()
    return FakeAudioEncoder().encode([load_audio(part.data, audio_parameters(), part.where)])[0].tolist()
