"""Transcripts of a real artifact with random weights: each segment is answered alone, and nothing is left behind."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from held_resources import wait_until_equal
from preprocess_data import audio_parameters

from mingc.errors import CapacityError, RequestError
from mingc.media.decoder_pool import DecoderPool
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.media_decoder import MediaTask, SpeechSegment, TurnRules
from mingc.prompts.transcription import Transcript, transcription_message
from mingc.runtime.request import (
    Done,
    Recorder,
    SamplingParams,
    TextDelta,
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionRequest,
    TranscriptSegment,
)
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions

CLIP = (Path(__file__).parents[1] / "data" / "speech" / "three-sentences.ogg").read_bytes()
SAMPLING = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture
def service(eager_artifact: Path) -> Iterator[OmniService]:
    service = open_service(eager_artifact, EngineOptions(num_preprocess_threads=2), media=DecoderPool())
    before = service.held
    yield service
    wait_until_equal(before, lambda: service.held)
    asyncio.run(service.close(shutdown_timeout_s=1.0))


def request(**fields: Any) -> TranscriptionRequest:
    return TranscriptionRequest(
        **{
            "request_id": "t",
            "audio": CLIP,
            "where": "file",
            "sampling": SAMPLING,
            "rules": TurnRules(max_ms=30_000),
            **fields,
        }
    )


async def collect(events: AsyncIterator[TranscriptEvent]) -> list[TranscriptEvent]:
    return [event async for event in events]


def test_every_segment_is_answered_as_a_chat_of_its_own(service: OmniService) -> None:
    logits: list[np.ndarray] = []

    async def alone(segment: SpeechSegment) -> tuple[Transcript, tuple[int, ...], Done]:
        transcript, tokens = Transcript(None), []
        message = transcription_message(segment.features, "file", topic="ships")
        recorder = Recorder()
        async for event in service.answer(lambda: service.prepare([message]), SAMPLING, recorder=recorder):
            if isinstance(event, TextDelta):
                transcript.push(event.text)
                tokens += [] if event.token is None else [event.token]
            elif isinstance(event, Done):
                transcript.finish()
                logits[:] = recorder.logits
                return transcript, tuple(tokens), event
        raise AssertionError

    async def run() -> None:
        sampling = replace(SAMPLING, num_logprobs=0)
        events = await collect(service.transcribe(request(topic="ships", sampling=sampling)))
        found = [each for each in events if isinstance(each, TranscriptSegment)]
        task = MediaTask(kind="audio", where="file", max_bytes=0, audio=audio_parameters())
        reader = InProcessDecoder().read_speech(task, CLIP, TurnRules(max_ms=30_000))
        segments: list[SpeechSegment] = []
        while (part := await asyncio.to_thread(reader.read)) is not None:
            segments += part
        assert [(each.start_ms, each.end_ms) for each in found] == [
            (each.start_ms, each.end_ms) for each in segments
        ]
        service.forget_caches()
        prompt_tokens = 0
        shown = deque(
            entry for each in events if isinstance(each, TranscriptDelta) for entry in each.logprobs
        )
        for each, segment in zip(found, segments, strict=True):
            transcript, tokens, done = await alone(segment)
            assert (each.text, each.tokens) == (transcript.text, tokens)
            assert each.usage.prompt_tokens == done.usage.prompt_tokens
            rows = np.stack(logits).astype(np.float64)
            likely = rows[np.arange(len(tokens)), tokens] - np.log(np.exp(rows).sum(-1))
            assert each.avg_logprob == pytest.approx(likely.mean(), abs=1e-4)
            own = b""
            for token, logprob in zip(tokens, likely, strict=True):
                if shown and shown[0][0] == token:  # others have no part in the text
                    assert shown.popleft()[1].logprob == pytest.approx(logprob, abs=1e-4)
                    own += service.tokenizer.token_bytes(token) or b""
            assert own.decode(errors="replace").strip() == each.text
            prompt_tokens += done.usage.prompt_tokens
        assert not shown
        end = events[-1]
        assert isinstance(end, TranscriptDone) and abs(end.duration_ms - 6653) < 60
        assert end.usage.prompt_tokens == prompt_tokens and end.usage.completion_tokens == 3 * 12
        assert end.audio_tokens == sum(each.features.num_tokens for each in segments)
        text = "".join(each.text for each in events if isinstance(each, TranscriptDelta))
        assert "".join(text.split()) == "".join("".join(each.text for each in found).split())

    asyncio.run(run())


@pytest.mark.parametrize("num_events", [0, 1, 5])
def test_closing_the_iterator_cancels_all(service: OmniService, num_events: int) -> None:
    async def run() -> None:
        sampling = SamplingParams(max_tokens=4000, ignore_eos=True)
        events = service.transcribe(request(sampling=sampling))
        async with aclosing(events):
            for _ in range(num_events):
                await anext(events)
        task = asyncio.create_task(collect(service.transcribe(request(sampling=sampling))))
        await asyncio.sleep(0.05 * num_events)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(run())


def test_more_files_than_threads_wait_for_each_other(service: OmniService) -> None:
    async def run() -> list[list[TranscriptEvent]]:
        return await asyncio.gather(*(collect(service.transcribe(request())) for _ in range(5)))

    texts = {
        "".join(each.text for each in events if isinstance(each, TranscriptDelta))
        for events in asyncio.run(run())
    }
    assert len(texts) == 1


def test_a_running_transcript_goes_on_while_the_service_closes(eager_artifact: Path) -> None:
    service = open_service(eager_artifact, media=DecoderPool())

    async def run() -> None:
        events = service.transcribe(request())
        await anext(events)
        rest = asyncio.create_task(collect(events))
        closing = asyncio.create_task(service.close(shutdown_timeout_s=60.0))
        await asyncio.sleep(0)
        with pytest.raises(CapacityError):
            await collect(service.transcribe(request()))
        await closing
        assert isinstance((await rest)[-1], TranscriptDone)

    asyncio.run(run())


def test_a_service_without_media_refuses(eager_artifact: Path) -> None:
    service = open_service(eager_artifact, EngineOptions(loads_speech=False))

    async def run() -> None:
        with pytest.raises(RequestError) as caught:
            await collect(service.transcribe(request()))
        assert caught.value.where == "file"
        await service.close(shutdown_timeout_s=0)

    asyncio.run(run())
