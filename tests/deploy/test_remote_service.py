"""The service over a text service and remote speech, with services that are written out: every event, call and end."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from fake_service import INFO, TEXT_ONLY, FakeService

from mingc.deploy.remote_speech import RemoteSpeechService, SegmentCall, SpeechInfo
from mingc.errors import RequestError, ServeError, WorkerError
from mingc.prompts.conversation import MediaPart
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    CompletionRequest,
    Done,
    Event,
    SamplingParams,
    ServiceInfo,
    ServiceLoad,
    SpeechParams,
    SpeechRequest,
    TextDelta,
    TextDone,
    ToolCallDelta,
    ToolCallDone,
    ToolCallFailed,
    Usage,
)
from mingc.runtime.voices import NewVoice, VoiceInfo, VoicePack, VoiceSample
from mingc.text.reference.live import LiveSegmenter
from mingc.text.reference.segment import iter_speech_segments
from mingc.text.spoken import SpeechText

RATE = 100
USAGE = Usage(prompt_tokens=3, completion_tokens=5)
END = Done(finish_reason="length", usage=USAGE, timings_ms={"first_token": 1.0})


@dataclass
class TextService:
    """Answers every chat with `texts` and events; waits at an `asyncio.Event` among them until it is set."""

    texts: list[str | asyncio.Event | Exception | Event]
    info: ServiceInfo = TEXT_ONLY
    end: Done = END
    is_ready: bool = True
    load: ServiceLoad = field(default_factory=lambda: ServiceLoad(kv_pages_used=7, kv_pages_total=9))
    requests: list[ChatRequest] = field(default_factory=list)
    reports: list[Callable[[ServeError], None]] = field(default_factory=list)
    timeouts: list[float] = field(default_factory=list)
    num_closed: int = 0

    def on_failure(self, report: Callable[[ServeError], None]) -> None:
        self.reports.append(report)

    async def close(self, *, shutdown_timeout_s: float) -> None:
        self.timeouts.append(shutdown_timeout_s)

    def speech(self, request: SpeechRequest) -> AsyncIterator[Event]:
        raise AssertionError("a text service is not asked for speech")

    async def chat(self, request: ChatRequest) -> AsyncGenerator[Event]:
        self.requests.append(request)
        try:
            for text in self.texts:
                if isinstance(text, asyncio.Event):
                    await text.wait()
                elif isinstance(text, Exception):
                    raise text
                else:
                    yield TextDelta(text=text) if isinstance(text, str) else text
            yield TextDone(finish_reason=self.end.finish_reason)
            yield self.end
        finally:
            self.num_closed += 1


@dataclass
class FakeSpeech:
    """Speaks a segment as two patches, whose samples are its index and its length; keeps the calls."""

    calls: list[SegmentCall] = field(default_factory=list)
    requests: list[SpeechRequest] = field(default_factory=list)
    found: list[SpeechParams] = field(default_factory=list)
    num_open: int = 0
    called: asyncio.Event = field(default_factory=asyncio.Event)

    async def speak(self, call: SegmentCall) -> AsyncGenerator[Event]:
        self.calls.append(call)
        self.called.set()
        self.num_open += 1
        try:
            for value in (call.index, len(call.text)):
                await asyncio.sleep(0)
                yield AudioDelta(samples=np.full(RATE // 4, value, np.float32))
            yield Done(finish_reason="stop", usage=Usage(audio_patches=99))
        finally:
            self.num_open -= 1

    async def speech(self, request: SpeechRequest) -> AsyncGenerator[Event]:
        self.requests.append(request)
        yield Done(finish_reason="stop", usage=Usage(audio_patches=4))

    async def list_voices(self) -> tuple[VoiceInfo, ...]:
        return (CLONE,)

    async def add_voice(self, voice: NewVoice) -> VoiceInfo:
        return replace(CLONE, name=voice.name)

    async def remove_voice(self, name: str) -> VoiceInfo:
        return replace(CLONE, name=name)

    async def find_voice(self, params: SpeechParams, prefix: str = "") -> SpeechParams:
        """Knows the voice `clone` only."""
        self.found.append(params)
        if params.voice != CLONE.name and params.reference is None:
            raise RequestError("unknown", status=404, param=f"{prefix}voice", code="voice_not_found")
        return replace(params, reference=PACK)


CLONE = VoiceInfo(id="voice_1", name="clone", kind="audio_sample")
PACK = VoicePack(
    name="clone",
    transcript="Hi.",
    latents=np.zeros((4, 2), np.float32),
    embeds=np.zeros((1, 3), np.float32),
    speaker=np.zeros(3, np.float32),
)
SPOKEN = replace(INFO, sample_rate=RATE, voices=("Ann", "Ben"), default_voice="Ben")


def service(
    text: TextService,
    speech_side: FakeSpeech,
    max_segment_length: int = 40,
    speech_text: SpeechText = "natural",
) -> RemoteSpeechService:
    info = SpeechInfo(service=SPOKEN, max_segment_length=max_segment_length, speech_text=speech_text)
    return RemoteSpeechService(
        text, info, speak=speech_side.speak, speech=speech_side.speech, voices=speech_side
    )


def chat(speech: SpeechParams | None = SpeechParams(), **sampling: Any) -> ChatRequest:  # noqa: B008
    return ChatRequest(request_id="1", messages=(), sampling=SamplingParams(**sampling), speech=speech)


def answer(text: TextService, speech_side: FakeSpeech, request: ChatRequest, **more: Any) -> list[Event]:
    async def collect() -> list[Event]:
        events = service(text, speech_side, **more).chat(request)
        return await asyncio.wait_for(_all(events), 20)

    return asyncio.run(collect())


async def _all(events: AsyncIterator[Event]) -> list[Event]:
    return [event async for event in events]


TWO = ["One two three four five six seven eight nine. ", "Ten eleven twelve."]


def test_the_info_is_that_of_the_text_with_the_speech_of_the_other() -> None:
    info = service(TextService([]), FakeSpeech()).info
    assert (info.sample_rate, info.voices, info.default_voice, info.has_speech) == (
        RATE, ("Ann", "Ben"), "Ben", True,
    )  # fmt: skip
    assert (info.model, info.has_text, info.has_image) == (TEXT_ONLY.model, True, TEXT_ONLY.has_image)
    assert info.has_image != SPOKEN.has_image, "the abilities of the two differ here"


def test_answers_and_tokens_are_those_of_the_text_service_and_one_is_spoken() -> None:
    text = FakeService(TEXT_ONLY)
    info = SpeechInfo(service=SPOKEN, max_segment_length=40, speech_text="natural")

    async def use() -> None:
        speech = FakeSpeech()
        remote = RemoteSpeechService(text, info, speak=speech.speak, speech=speech.speech, voices=speech)
        three = [each async for each in remote.answers(replace(chat(speech=None), num_answers=3))]
        assert {answer for answer, _ in three} == {0, 1, 2} and not speech.calls
        sampling = SamplingParams(max_tokens=2)
        prompt = CompletionRequest(request_id="2", prompt="One", sampling=sampling)
        assert [type(event) for _, event in [each async for each in remote.answers(prompt)]][-1] is Done
        spoken = [each async for each in remote.answers(chat())]
        assert {answer for answer, _ in spoken} == {0} and speech.calls
        assert any(isinstance(event, AudioDelta) for _, event in spoken)
        assert await remote.tokenize("One") == text.tokenizer.encode_plain("One")
        assert remote.tokenizer is text.tokenizer
        assert await remote.count_tokens(chat()) == await text.count_tokens(chat())
        picture = MediaPart(kind="image", data=b"", where="image")
        assert await remote.decode_media(picture) is picture, "the fake service decodes none"

    asyncio.run(asyncio.wait_for(use(), 20))


def test_everything_else_is_that_of_the_text_service() -> None:
    text = TextService([])
    remote = service(text, FakeSpeech())
    assert remote.is_ready and remote.load is text.load
    text.is_ready = False
    assert not remote.is_ready
    failures: list[ServeError] = []
    remote.on_failure(failures.append)
    text.reports[0](WorkerError("rank 1 ended"))
    assert [str(each) for each in failures] == ["rank 1 ended"]
    asyncio.run(remote.close(shutdown_timeout_s=7.0))
    assert text.timeouts == [7.0]


def test_a_speech_request_is_passed_on() -> None:
    speech_side = FakeSpeech()
    request = SpeechRequest(request_id="1", text="x", speech=SpeechParams(voice="Ann"))
    events = asyncio.run(_all(service(TextService([]), speech_side).speech(request)))
    assert speech_side.requests == [request] and events == [
        Done(finish_reason="stop", usage=Usage(audio_patches=4))
    ]


def test_a_chat_without_speech_is_that_of_the_text_service() -> None:
    text, speech_side = TextService(["a", "b"]), FakeSpeech()
    events = answer(text, speech_side, chat(None))
    assert events == [TextDelta(text="a"), TextDelta(text="b"), TextDone(finish_reason="length"), END]
    assert speech_side.calls == []


def test_a_spoken_chat_has_all_text_all_speech_and_one_end() -> None:
    text, speech_side = TextService([*TWO]), FakeSpeech()
    params = SpeechParams(voice="Ann", seed=9, instructions="calm")
    events = answer(text, speech_side, chat(params, seed=4, max_tokens=77))
    assert [request.speech for request in text.requests] == [None]
    assert text.requests[0].sampling == SamplingParams(seed=4, max_tokens=77)
    assert [event for event in events if isinstance(event, TextDelta)] == [
        TextDelta(text=each) for each in TWO
    ]
    assert events.count(TextDone(finish_reason="length")) == 1
    unpaced = replace(params, speech_lead=0)
    assert [(call.index, call.seed, call.params) for call in speech_side.calls] == [
        (0, 9, unpaced),
        (1, 9, unpaced),
    ]
    assert "nine" in speech_side.calls[0].text and "Ten" in speech_side.calls[1].text
    audio = [float(event.samples[0]) for event in events if isinstance(event, AudioDelta)]
    assert audio == [0, len(speech_side.calls[0].text), 1, len(speech_side.calls[1].text)], (
        "segments in their order"
    )
    ends = [event for event in events if isinstance(event, Done)]
    assert events[-1:] == ends, "one end, the last event"
    assert ends[0] == replace(END, usage=replace(USAGE, audio_patches=4, audio_seconds=1.0))
    assert (text.num_closed, speech_side.num_open) == (1, 0)


@pytest.mark.parametrize(
    "audio, chats, used", [(0, 4, 0), (None, 4, 4), (None, 0, 0), (3, None, 3), (0, None, 0)]
)
def test_the_seed_is_that_of_the_speech_then_that_of_the_chat(
    audio: int | None, chats: int | None, used: int
) -> None:
    speech_side = FakeSpeech()
    answer(TextService([*TWO]), speech_side, chat(SpeechParams(seed=audio), seed=chats))
    assert {call.seed for call in speech_side.calls} == {used}


def test_without_seeds_each_answer_has_noise_of_its_own() -> None:
    first, second = FakeSpeech(), FakeSpeech()
    for speech_side in (first, second):
        answer(TextService([*TWO]), speech_side, chat())
        assert len({call.seed for call in speech_side.calls}) == 1, "all segments of an answer have the same"
    assert first.calls[0].seed != second.calls[0].seed


def test_thoughts_are_written_and_not_spoken() -> None:
    speech_side = FakeSpeech()
    texts = ["<think>The user asks for a number, ", "so I give one.</think>", "It is four, surely."]
    events = answer(TextService([*texts]), speech_side, chat(SpeechParams(seed=1)))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "".join(texts)
    spoken = " ".join(call.text for call in speech_side.calls)
    assert "four" in spoken and "user" not in spoken and "think" not in spoken


CALLED: list[Event] = [
    TextDelta(text="The user wants two numbers.", kind="thought"),
    TextDelta(text="", token=5, kind="call"),
    ToolCallDelta(index=0, name="look_up"),
    ToolCallDelta(index=0, arguments='{"word": "nine"}'),
    ToolCallDone(index=0, name="look_up", arguments='{"word": "nine"}'),
    ToolCallFailed(index=None, text="<tool_call>ten"),
]


@pytest.mark.parametrize("text", ["One moment, please.", ""])
def test_calls_and_told_thoughts_pass_and_are_not_spoken(text: str) -> None:
    called = replace(END, finish_reason="tool_calls")
    speech_side = FakeSpeech()
    events = answer(TextService([text, *CALLED], end=called), speech_side, chat(SpeechParams(seed=1)))
    assert [event for event in events if event in CALLED] == CALLED
    assert [call.text.strip(" .") for call in speech_side.calls] == [text.strip(" .")] * bool(text)
    assert isinstance(events[-1], Done) and not events[-1].has_nothing_to_speak
    assert pickle.loads(pickle.dumps(CALLED)) == CALLED, "Ray passes events on like this"


def test_what_is_said_before_a_call_is_spoken_while_the_call_is_written() -> None:
    async def run() -> None:
        goes_on, speech_side = asyncio.Event(), FakeSpeech()
        text = TextService(["One moment", TextDelta(text="", token=5, kind="call"), goes_on])
        events = service(text, speech_side).chat(chat(SpeechParams(seed=1)))
        found = [await anext(events), await anext(events), await anext(events)]
        assert isinstance(found[-1], AudioDelta) and speech_side.calls[0].text.startswith("One moment")
        goes_on.set()
        async for _ in events:
            pass

    asyncio.run(asyncio.wait_for(run(), 20))


def test_a_long_segment_is_spoken_in_pieces_that_the_deployment_can_speak() -> None:
    text = "one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen."
    whole, pieces = FakeSpeech(), FakeSpeech()
    answer(TextService([text]), whole, chat(SpeechParams(seed=1)), max_segment_length=200)
    answer(TextService([text]), pieces, chat(SpeechParams(seed=1)), max_segment_length=10)
    assert len(whole.calls) == 1 and len(pieces.calls) > 1
    assert [call.index for call in pieces.calls] == list(range(len(pieces.calls)))
    assert [word for call in pieces.calls for word in call.text.split()][:14] == whole.calls[0].text.split()[
        :14
    ]


def test_pieces_go_on_where_the_streaming_cut_was() -> None:
    """They are those of the whole text, whose cut has a state (`test_live_segmenter.py`)."""
    text = "，我们买了12个苹果。，，"
    speech_side = FakeSpeech()
    answer(
        TextService([text]),
        speech_side,
        chat(SpeechParams(seed=1)),
        max_segment_length=200,
        speech_text="reference",
    )
    segments = [*(live := LiveSegmenter()).push(text), *live.flush()]
    assert (
        [call.text for call in speech_side.calls]
        == [piece for each in segments for piece in iter_speech_segments(each.text, 200, state=each.state)]
        != [piece for each in segments for piece in iter_speech_segments(each.text, 200)]
    )


def test_an_answer_without_text_is_silent() -> None:
    speech_side = FakeSpeech()
    events = answer(TextService([]), speech_side, chat(SpeechParams(seed=1)))
    assert speech_side.calls == []
    usage = replace(USAGE, audio_patches=0, audio_seconds=0.0)
    assert events[-1] == replace(END, usage=usage, has_nothing_to_speak=True)


def test_the_first_clause_of_a_slow_answer_is_spoken_before_the_rest() -> None:
    async def run() -> None:
        goes_on = asyncio.Event()
        speech_side = FakeSpeech()
        text = TextService(["Well then, my dear friend, let ", goes_on, "us go."])
        collecting = asyncio.create_task(_all(service(text, speech_side).chat(chat())))
        await asyncio.wait_for(speech_side.called.wait(), 20)
        assert not goes_on.is_set() and "friend" in speech_side.calls[0].text
        goes_on.set()
        events = await asyncio.wait_for(collecting, 20)
        assert "us go" in speech_side.calls[-1].text and isinstance(events[-1], Done)
        assert len(asyncio.all_tasks()) == 1, "no task of the answer is left"

    asyncio.run(run())


def test_speech_of_the_first_segment_arrives_while_the_text_goes_on() -> None:
    async def run() -> None:
        goes_on = asyncio.Event()
        text = TextService([TWO[0], goes_on, TWO[1]])
        events = service(text, FakeSpeech()).chat(chat(SpeechParams(seed=1)))
        async for event in events:
            if isinstance(event, AudioDelta):
                break
        assert not goes_on.is_set()
        await events.aclose()  # type: ignore[attr-defined]  # a generator
        assert text.num_closed == 1

    asyncio.run(asyncio.wait_for(run(), 20))


def test_half_an_instruction_is_refused_before_the_text_is_asked_for() -> None:
    text, speech_side = TextService([*TWO]), FakeSpeech()
    with pytest.raises(RequestError):
        answer(text, speech_side, chat(SpeechParams(instructions='{"half')))
    assert (text.num_closed, speech_side.calls) == (0, [])


def test_an_error_of_the_text_ends_the_answer_and_its_speech() -> None:
    text, speech_side = TextService([TWO[0], WorkerError("rank 1 ended"), TWO[1]]), FakeSpeech()
    with pytest.raises(WorkerError, match="rank 1 ended"):
        answer(text, speech_side, chat(SpeechParams(seed=1)))
    assert (text.num_closed, speech_side.num_open) == (1, 0)


@pytest.mark.parametrize(
    "params", [SpeechParams(voice="clone"), SpeechParams(voice="Ann", reference=VoiceSample(vector=(1.0,)))]
)
def test_a_voice_is_found_once_for_all_segments(params: SpeechParams) -> None:
    """Any replica may speak a segment, and the voice may be removed while the answer goes on."""
    speech = FakeSpeech()
    answer(TextService(TWO), speech, chat(params))
    assert speech.found == [params] and len(speech.calls) > 1
    assert all(call.params.reference is PACK for call in speech.calls)


def test_an_unknown_voice_is_refused_before_any_text() -> None:
    text = TextService(TWO)
    with pytest.raises(RequestError) as refused:
        answer(text, FakeSpeech(), chat(SpeechParams(voice="nobody")))
    assert (refused.value.status, refused.value.param) == (404, "audio.voice")


def test_voices_are_those_of_the_speech_deployment() -> None:
    async def run() -> None:
        remote = service(TextService(TWO), FakeSpeech())
        sample = VoiceSample(vector=(1.0,))
        assert await remote.list_voices() == (CLONE,)
        assert (await remote.add_voice(NewVoice(name="a", consent="yes", sample=sample))).name == "a"
        assert (await remote.remove_voice("b")).name == "b"

    asyncio.run(run())
