"""Text and speech in two services: the events equal those of one service that does both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from held_resources import service_resources, wait_until_equal, wait_until_free

from mingc.deploy.remote_speech import RemoteSpeechService, SegmentCall, SpeechInfo, _Segments
from mingc.errors import RequestError, WorkerError
from mingc.prompts.conversation import Message, TextPart
from mingc.runtime.noise import PhiloxNoise, ShiftedNoise
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    Done,
    Event,
    SamplingParams,
    SpeechParams,
    SpeechRequest,
    TextDelta,
)
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.text.spoken_piece import SpokenPiece

CHAT = ChatRequest(
    request_id="chat",
    messages=(Message(role="user", parts=(TextPart(text="Say it."),)),),
    sampling=SamplingParams(max_tokens=110, seed=4, temperature=1.0, ignore_eos=True),
    speech=SpeechParams(voice="DB30", max_steps=2),
)
CALL = SegmentCall(text="", index=0, params=SpeechParams(), seed=1)


@dataclass
class Services:
    joint: OmniService
    text: OmniService
    calls: list[SegmentCall]
    num_open: int = 0
    fails_at: int | None = None

    def remote(self) -> RemoteSpeechService:
        info = SpeechInfo(
            service=self.joint.info,
            max_segment_length=self.joint.max_segment_length,
            speech_text=self.joint.speech_text,
        )
        return RemoteSpeechService(
            self.text, info, speak=self.speak, speech=self.joint.speech, voices=self.joint
        )

    async def speak(self, call: SegmentCall) -> AsyncGenerator[Event]:
        self.calls.append(call)
        if call.index == self.fails_at:
            raise WorkerError("the speech replica of this request ended")
        self.num_open += 1
        try:
            noise = ShiftedNoise(PhiloxNoise(call.seed), call.index)
            piece = SpokenPiece(call.text, call.text_end)
            async with aclosing(self.joint.speak([piece], call.params, noise)) as events:
                async for event in events:
                    yield event
        finally:
            self.num_open -= 1


@pytest.fixture(scope="module")
def opened(eager_artifact: Path) -> Iterator[tuple[OmniService, OmniService]]:
    joint = open_service(eager_artifact)
    text = open_service(eager_artifact, EngineOptions(loads_speech=False))
    yield joint, text
    for service in (joint, text):
        asyncio.run(service.close(shutdown_timeout_s=1.0))


@pytest.fixture
def services(opened: tuple[OmniService, OmniService]) -> Services:
    """With engines that have ended the work of the test before."""

    def num_streams() -> dict[str, int]:
        held = opened[0].held
        return {name: held[name] for name in ("chats", "speech streams", "patches in flight")}

    wait_until_equal({"chats": 0, "speech streams": 0, "patches in flight": 0}, num_streams)
    return Services(*opened, calls=[])


async def collect(events: AsyncGenerator[Event]) -> list[Event]:
    return [event async for event in events]


def parts(events: list[Event]) -> tuple[str, list[AudioDelta], Done]:
    text = "".join(event.text for event in events if isinstance(event, TextDelta))
    end = events[-1]
    assert isinstance(end, Done)
    return text, [event for event in events if isinstance(event, AudioDelta)], end


def test_a_spoken_chat_equals_that_of_one_service(services: Services) -> None:
    async def run() -> tuple[list[Event], list[Event]]:
        return await collect(services.joint.chat(CHAT)), await collect(services.remote().chat(CHAT))

    joint, apart = map(parts, asyncio.run(run()))
    assert apart[0] == joint[0]
    assert len(services.calls) > 1, "the answer has several segments"
    assert [call.index for call in services.calls] == list(range(len(services.calls)))
    assert len(apart[1]) == len(joint[1])
    said = [call.text for call in services.calls]
    for patches in (joint[1], apart[1]):
        begins = [True, *(patch.is_segment_end for patch in patches[:-1])]
        assert [patch.segment_text is not None for patch in patches] == begins
        assert [patch.segment_text for patch in patches if patch.segment_text] == said
        ends = [patch.text_end for patch in patches if patch.text_end is not None]
        assert ends == [call.text_end for call in services.calls] and ends[-1] == len(joint[0])
    for got, expected in zip(apart[1], joint[1], strict=True):
        np.testing.assert_allclose(got.samples, expected.samples, atol=2e-4)
    assert (apart[2].finish_reason, apart[2].usage) == (joint[2].finish_reason, joint[2].usage)


@pytest.mark.parametrize("starts_early", [True, False])
def test_speech_of_a_text_that_is_written_equals_that_of_one_service(
    services: Services, starts_early: bool
) -> None:
    request = SpeechRequest(request_id="1", text="", speech=SpeechParams(voice="DB30", seed=4, max_steps=2))

    async def deltas() -> AsyncGenerator[str]:
        text = "These are words enough, and they are a sentence. This is another of eight words, no more."
        for start in range(0, len(text), 3):
            yield text[start : start + 3]

    def stream(service: OmniService | RemoteSpeechService) -> list[Event]:
        return asyncio.run(collect(service.stream_speech(request, deltas(), starts_early=starts_early)))

    joint, apart = parts(stream(services.joint)), parts(stream(services.remote()))
    assert [call.index for call in services.calls] == list(range(len(services.calls)))
    assert len(services.calls) == 2 and services.calls[0].text.endswith(",") is starts_early
    for got, expected in zip(apart[1], joint[1], strict=True):
        np.testing.assert_allclose(got.samples, expected.samples, atol=2e-4)
    assert (apart[2].finish_reason, apart[2].usage) == (joint[2].finish_reason, joint[2].usage)


def test_the_remote_speech_of_no_words_and_of_a_text_that_breaks_off(services: Services) -> None:
    request = SpeechRequest(request_id="1", text="", speech=SpeechParams(voice="DB30", max_steps=2))

    async def deltas(text: str, error: Exception | None) -> AsyncGenerator[str]:
        yield text
        if error is not None:
            raise error

    for text, error, code in (
        ("... ", None, "nothing_to_speak"),
        ("Well now, so", RequestError("x", code="y"), "y"),
    ):
        for service in (services.joint, services.remote()):
            with pytest.raises(RequestError) as raised:
                asyncio.run(collect(service.stream_speech(request, deltas(text, error))))
            assert raised.value.code == code
    assert services.num_open == 0


def test_the_text_service_has_no_speech_of_its_own(services: Services) -> None:
    assert not services.text.info.has_speech and services.text.info.voices == ()
    info = services.remote().info
    assert (info.has_speech, info.voices, info.sample_rate) == (True, services.joint.info.voices, 44100)
    with pytest.raises(RequestError, match="without its talker"):
        asyncio.run(
            collect(services.text.speech(SpeechRequest(request_id="1", text="a", speech=SpeechParams())))
        )


def test_at_most_two_segments_are_generated_at_a_time() -> None:
    begun: list[int] = []

    async def run() -> list[Event]:
        is_released = asyncio.Event()

        async def speak(call: SegmentCall) -> AsyncGenerator[Event]:
            begun.append(call.index)
            await is_released.wait()
            yield AudioDelta(samples=np.full(call.index + 1, call.index, np.float32))

        segments = _Segments(speak, CALL)
        for index in range(5):
            segments.add([SpokenPiece(str(index))])
        segments.end()
        reading = asyncio.create_task(collect(segments.events()))
        for _ in range(50):  # turns of the event loop, more than any chain of tasks here needs
            await asyncio.sleep(0)
        assert begun == [0, 1]
        is_released.set()
        assert segments.is_ended
        return await reading

    events = asyncio.run(run())
    assert [len(event.samples) for event in events if isinstance(event, AudioDelta)] == [1, 2, 3, 4, 5]
    assert begun == [0, 1, 2, 3, 4]


def test_a_segment_that_is_cancelled_where_it_runs_ends_the_speech() -> None:
    """Serve reports a call that its replica cancelled as `CancelledError`, though nothing was cancelled here."""

    async def run() -> None:
        async def speak(call: SegmentCall) -> AsyncGenerator[Event]:
            yield AudioDelta(samples=np.zeros(1, np.float32))
            raise asyncio.CancelledError

        segments = _Segments(speak, CALL)
        segments.add([SpokenPiece("a")])
        segments.end()
        with pytest.raises(WorkerError, match="cancelled where it ran"):
            await asyncio.wait_for(collect(segments.events()), 20)

    asyncio.run(run())


@pytest.mark.parametrize("after", [TextDelta, AudioDelta])
def test_closing_the_answer_frees_both_services(services: Services, after: type) -> None:
    async def run() -> None:
        loop = asyncio.get_running_loop()
        before = [service_resources(service, loop) for service in (services.joint, services.text)]
        events = services.remote().chat(CHAT)
        async for event in events:
            if isinstance(event, after):
                break
        await events.aclose()  # type: ignore[attr-defined]  # a generator
        assert services.num_open == 0
        for service, held in zip((services.joint, services.text), before, strict=True):
            await wait_until_free(service, held)

    asyncio.run(run())


def test_a_lost_speech_replica_fails_the_answer(services: Services) -> None:
    services.fails_at = 1

    async def run() -> None:
        with pytest.raises(WorkerError, match="the speech replica"):
            await collect(services.remote().chat(CHAT))

    asyncio.run(run())


def test_instructions_are_checked_before_any_text(services: Services) -> None:
    assert CHAT.speech is not None
    wrong = replace(CHAT, speech=replace(CHAT.speech, instructions='{"half'))

    async def first(service: OmniService | RemoteSpeechService) -> Event:
        return await anext(service.chat(wrong))  # type: ignore[arg-type]

    for service in (services.joint, services.remote()):
        with pytest.raises(RequestError):
            asyncio.run(first(service))
