"""Responses written from events: every sample and every character reaches the client, in every format and delivery."""

from __future__ import annotations

import asyncio
import base64
import errno
import io
import json
import os
import tracemalloc
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from math import inf
from typing import Any

import av
import numpy as np
import pytest
import soundfile
from fake_service import FakeService
from numpy.typing import NDArray
from starlette.types import Message

from mingc.errors import CapacityError, WorkerError
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    ServiceLoad,
    TextDelta,
    TextDone,
    TokenLogprobs,
    Usage,
)
from mingc.server.audio_format import AudioFormat, AudioSpec
from mingc.server.http.body import JSON
from mingc.server.http.clips import AnswerBudget, KeptClip, LiveClip
from mingc.server.http.logprobs import CompletionLogprobsWriter
from mingc.server.http.response_schemas import ChatResponseBuilder
from mingc.server.http.streaming import (
    SSE,
    ResponseWriter,
    SegmentTimes,
    Whole,
    chat_chunks,
    chat_completion,
    speech_clip,
    speech_events,
    speech_parts,
)
from mingc.server.metrics import Metrics

RATE = 24000
LENGTHS = (5000, 4000, 3001)  # neither a patch nor the whole is a multiple of FLAC's block of 4,096
TEXT = ["Good", "", " morn", "ing 你"]
DONE = Done(
    finish_reason="length",
    usage=Usage(prompt_tokens=7, cached_tokens=5, completion_tokens=4, audio_patches=3, audio_seconds=0.5),
)
USAGE = {
    "prompt_tokens": 7,
    "completion_tokens": 4,
    "total_tokens": 11,
    "prompt_tokens_details": {"cached_tokens": 5},
    "audio_patches": 3,
    "audio_seconds": 0.5,
}
BUILDER = ChatResponseBuilder(request_id="chatcmpl-1", model="m", include_usage=True)


def patches() -> list[NDArray[np.float32]]:
    generator = np.random.default_rng(1)
    return [generator.uniform(-0.9, 0.9, length).astype(np.float32) for length in LENGTHS]


async def events(*, is_complete: bool = True) -> AsyncIterator[Event]:
    """Text and patches in turn; then the end."""
    for text in TEXT[:2]:
        yield TextDelta(text=text)
    for text, samples in zip([*TEXT[2:], None], patches(), strict=True):
        yield AudioDelta(samples=samples)
        if text is not None:
            yield TextDelta(text=text)
    yield TextDone(finish_reason="length")
    if is_complete:
        yield DONE


async def answer(events: AsyncIterator[Event]) -> AsyncIterator[tuple[int, Event]]:
    """The events of the only answer."""
    async for event in events:
        yield 0, event


class Client:
    """Receives an ASGI response."""

    def __init__(self) -> None:
        self.headers: dict[bytes, bytes] = {}
        self.chunks: list[bytes] = []
        self.is_ended = False
        self.freed_before: int | None = None  # chunks that had arrived when the place was given back

    async def receive(self, message: Message) -> None:
        assert not self.is_ended, "something follows the end"
        if message["type"] == "http.response.start":
            self.headers = dict(message["headers"])
        else:
            self.chunks.append(message["body"])
            self.is_ended = not message["more_body"]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    @property
    def objects(self) -> list[dict[str, Any]]:
        """The JSON of every server-sent event."""
        assert self.headers[b"content-type"].startswith(b"text/event-stream")
        lines = self.body.decode().removesuffix("data: [DONE]\n\n").split("\n\n")[:-1]
        return [json.loads(line.removeprefix("data: ")) for line in lines]


Body = AsyncIterator[bytes] | Coroutine[Any, Any, Whole]


_KEPT: list[KeptClip] = []


def keep(audio: AudioSpec) -> KeptClip:
    _KEPT.append(KeptClip(audio, lambda num_bytes: None))
    return _KEPT[-1]


@pytest.fixture(autouse=True)
def _closed_clips() -> Iterator[None]:
    yield
    while _KEPT:
        _KEPT.pop().close()


def stream(audio: AudioSpec) -> LiveClip | KeptClip:
    return LiveClip(audio) if audio.is_playable_in_parts else keep(audio)


async def write(response: ResponseWriter, body: Body, content_type: str) -> None:
    if isinstance(body, AsyncIterator):
        await response.send_stream(content_type, body)
    else:
        await response.send_whole(content_type, *await body)


def respond(body: Body, content_type: str) -> Client:
    """The response with a body in parts or whole."""
    client = Client()

    def free() -> None:
        client.freed_before = len(client.chunks)

    response = ResponseWriter(client.receive, before_end=free)
    asyncio.run(write(response, body, content_type))
    assert client.is_ended
    assert client.freed_before == len(client.chunks) - 1, "the place is free before the last bytes arrive"
    return client


def decode(data: bytes, audio: AudioSpec) -> NDArray[np.float64]:
    if audio.format == "pcm16":
        return np.frombuffer(data, "<i2") / 32768
    with av.open(io.BytesIO(data), "r") as container:
        frames = list(container.decode(audio=0))
    assert {frame.sample_rate for frame in frames} == {RATE}
    samples = np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames])
    return samples.astype(np.int16) / 32768


@pytest.mark.parametrize(("speed", "audio_format"), [(1.0, "wav"), (2.0, "opus"), (0.5, "flac")])
def test_times_of_segments_come_before_their_sound(speed: float, audio_format: AudioFormat) -> None:
    """In seconds of the clip: the last segment ends where the clip does."""

    async def spoken() -> AsyncIterator[Event]:
        for text, lengths in (("One.", (24000, 12000)), ("Two words.", (6000,)), ("三。", (1, 30000))):
            for index, length in enumerate(lengths):
                yield AudioDelta(
                    samples=np.zeros(length, np.float32),
                    is_segment_end=index == len(lengths) - 1,
                    segment_text=None if index else text,
                )
        yield DONE

    audio = AudioSpec(format=audio_format, sample_rate=48000, source_rate=24000, speed=speed)
    clip = stream(audio)
    client = respond(speech_events(spoken(), clip, SegmentTimes(audio)), SSE)
    *before, done = client.objects
    expected = [("One.", 0.0, 1.5), ("Two words.", 1.5, 1.75), ("三。", 1.75, 3.0)]
    assert done["type"] == "speech.audio.done" and done["usage"]["output_tokens"] == 3
    found = [(each["text"], each["start"] * speed, each["end"] * speed) for each in done["segments"]]
    kinds = [each["type"] for each in before]
    starts = [(each["text"], each["start"] * speed) for each in before if each["type"] == "speech.segment"]
    for (text, start, end), (wanted, first, last), begun in zip(found, expected, starts, strict=True):
        assert (text, start, end) == (wanted, pytest.approx(first, abs=2e-3), pytest.approx(last, abs=2e-3))
        assert begun == (text, start)
    assert kinds[:2] == [
        "speech.segment",
        "speech.segment" if audio_format == "flac" else "speech.audio.delta",
    ]
    clip.close()


@pytest.fixture(params=["wav", "flac", "pcm16"])
def audio(request: pytest.FixtureRequest) -> AudioSpec:
    audio_format: AudioFormat = request.param
    return AudioSpec(format=audio_format, sample_rate=RATE)


def assert_complete(data: bytes, audio: AudioSpec) -> None:
    np.testing.assert_allclose(decode(data, audio), np.concatenate(patches()), rtol=0, atol=6e-5)


def test_a_streamed_chat_has_all_its_text_audio_and_usage(audio: AudioSpec) -> None:
    client = respond(chat_chunks(answer(events()), BUILDER, stream(audio)), SSE)
    assert client.body.endswith(b"data: [DONE]\n\n")
    *chunks, finish, usage = client.objects
    assert (finish["choices"][0]["finish_reason"], finish["choices"][0]["delta"]) == ("length", {})
    assert usage["choices"] == [] and usage["usage"] == USAGE
    assert len({chunk["id"] for chunk in client.objects}) == 1
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert deltas[0]["role"] == "assistant"
    assert [delta["content"] for delta in deltas[1:] if "content" in delta] == TEXT
    clips = [delta["audio"] for delta in deltas if "audio" in delta]
    assert ["id" in clip for clip in clips] == [True, *[False] * (len(clips) - 1)], "clients join the fields"
    assert all(clip["data"] for clip in clips[:-1]) and clips[-1]["transcript"] == "".join(TEXT)
    assert_complete(b"".join(base64.b64decode(clip["data"]) for clip in clips[:-1]), audio)
    assert_complete(base64.b64decode("".join(clip["data"] for clip in clips[:-1])), audio)


def test_the_audio_of_a_streamed_chat_without_speech_has_its_id_once_and_no_data() -> None:
    async def silent() -> AsyncIterator[Event]:
        yield TextDelta(text="…")
        yield TextDone(finish_reason="stop")
        usage = Usage(prompt_tokens=7, completion_tokens=1)
        yield Done(finish_reason="stop", usage=usage, has_nothing_to_speak=True)

    audio = AudioSpec(format="pcm16", sample_rate=RATE)
    client = respond(chat_chunks(answer(silent()), BUILDER, stream(audio)), SSE)
    deltas = [chunk["choices"][0]["delta"] for chunk in client.objects if chunk["choices"]]
    (clip,) = [delta["audio"] for delta in deltas if "audio" in delta]
    assert (clip["id"], clip["data"], clip["transcript"]) == ("audio-1", "", "…")
    reasons = [chunk["speech_error"]["code"] for chunk in client.objects if "speech_error" in chunk]
    assert reasons == ["nothing_to_speak"]
    whole = json.loads(respond(chat_completion(answer(silent()), BUILDER, keep(audio)), JSON).body)
    assert whole["speech_error"]["code"] == "nothing_to_speak"


def test_a_whole_chat_has_all_its_text_audio_and_usage(audio: AudioSpec) -> None:
    client = respond(chat_completion(answer(events()), BUILDER, keep(audio)), JSON)
    assert client.headers[b"content-length"] == str(len(client.body)).encode()
    assert json.loads(client.body)["usage"] == USAGE
    message = json.loads(client.body)["choices"][0]["message"]
    assert message["content"] == message["audio"]["transcript"] == "".join(TEXT)
    assert_complete(base64.b64decode(message["audio"]["data"]), audio)


def test_streamed_speech_has_all_samples(audio: AudioSpec) -> None:
    client = respond(speech_parts(events(), stream(audio)), audio.content_type)
    assert client.headers[b"content-type"] == audio.content_type.encode()
    if audio.format != "flac":  # which is complete only at the end
        assert len(client.chunks) == len(LENGTHS) + 1, "every patch is sent at once, then the end"
    assert_complete(client.body, audio)


def test_whole_speech_has_all_samples_and_its_length(audio: AudioSpec) -> None:
    client = respond(speech_clip(events(), keep(audio)), audio.content_type)
    assert client.headers[b"content-length"] == str(len(client.body)).encode()
    assert_complete(client.body, audio)
    if audio.format != "pcm16":
        assert soundfile.info(io.BytesIO(client.body)).frames == sum(LENGTHS)


def test_speech_events_have_all_samples_and_the_usage(audio: AudioSpec) -> None:
    client = respond(speech_events(events(), stream(audio)), SSE)
    *deltas, done = client.objects
    tokens = {"input_tokens": 7, "output_tokens": 3, "total_tokens": 10}
    assert done == {"type": "speech.audio.done", "usage": {**tokens, "audio_seconds": 0.5}}
    assert {delta["type"] for delta in deltas} == {"speech.audio.delta"}
    assert_complete(b"".join(base64.b64decode(delta["audio"]) for delta in deltas), audio)
    assert_complete(base64.b64decode("".join(delta["audio"] for delta in deltas)), audio)


@pytest.mark.parametrize("parts", [speech_parts, speech_events])
def test_headers_keep_proxies_from_buffering_a_stream(parts: Callable[..., AsyncIterator[bytes]]) -> None:
    """nginx collects a response unless `X-Accel-Buffering` is `no`; caches may hold one back as well."""
    spec = AudioSpec(format="wav", sample_rate=RATE)
    client = respond(parts(events(), stream(spec)), spec.content_type)
    assert client.headers[b"x-accel-buffering"] == b"no" and client.headers[b"cache-control"] == b"no-cache"
    assert b"content-length" not in client.headers


BODIES: dict[str, Callable[[AudioSpec], Body]] = {
    "chat": lambda audio: chat_completion(answer(events(is_complete=False)), BUILDER, keep(audio)),
    "chat stream": lambda audio: chat_chunks(answer(events(is_complete=False)), BUILDER, stream(audio)),
    "speech": lambda audio: speech_clip(events(is_complete=False), keep(audio)),
    "speech stream": lambda audio: speech_parts(events(is_complete=False), stream(audio)),
    "speech events": lambda audio: speech_events(events(is_complete=False), stream(audio)),
}


@pytest.mark.parametrize("name", BODIES)
def test_events_that_break_off_are_an_error_and_no_complete_response(name: str) -> None:
    client = Client()
    response = ResponseWriter(client.receive, before_end=lambda: None)
    with pytest.raises(WorkerError, match="before its answer was complete"):
        asyncio.run(write(response, BODIES[name](AudioSpec(format="wav", sample_rate=RATE)), JSON))
    assert not client.is_ended


def test_a_stream_without_any_audio_is_complete() -> None:
    async def silent() -> AsyncIterator[Event]:
        yield DONE

    spec = AudioSpec(format="pcm16", sample_rate=RATE)
    client = respond(speech_parts(silent(), stream(spec)), spec.content_type)
    assert client.body == b"" and client.headers[b"content-type"] == spec.content_type.encode()


# Memory of answers


def test_a_kept_clip_is_on_disk_and_has_every_sample(audio: AudioSpec) -> None:
    """Five minutes of sound, 53 MB as float32, take less than 3 MiB of memory."""
    generator = np.random.default_rng(2)
    patch = generator.uniform(-0.9, 0.9, RATE).astype(np.float32)

    async def run() -> tuple[int, int, int]:
        clip = keep(audio)
        tracemalloc.start()
        try:
            for _ in range(300):
                assert await clip.add(patch) == b""
            num_bytes = await clip.finish()
            read = 0
            async for part in clip.rest():
                read += len(part)
            return num_bytes, read, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
            clip.close()

    num_bytes, read, peak = asyncio.run(run())
    assert num_bytes == read > (1 << 20)
    if audio.format != "flac":
        assert num_bytes == 300 * RATE * 2 + (44 if audio.format == "wav" else 0)
    assert peak < 3 << 20


def limit_of(metrics: Metrics, name: str) -> tuple[float, float]:
    """How much of a limit is in use, and the limit."""
    found = {
        each.name: each.value for each in metrics.samples(ServiceLoad()) if ("limit", name) in each.labels
    }
    return found["mingc_limit_used"], found["mingc_limit_max"]


def test_answers_beyond_the_budget_are_refused_before_they_begin_or_end_and_give_all_back() -> None:
    metrics = Metrics()
    budget = AnswerBudget(10 << 20, metrics)
    spec = AudioSpec(format="wav", sample_rate=RATE)
    second = np.zeros(RATE, np.float32)

    async def run() -> None:
        # 1,000 letters take about 80 s, which are 3.84 MB.
        with budget.keep(spec, "a" * 1000), budget.keep(spec, "a" * 1000) as clip:
            assert limit_of(metrics, "answer_bytes")[0] == pytest.approx(2 * 80 * RATE * 2, rel=0.1)
            with pytest.raises(CapacityError) as caught, budget.keep(spec, "a" * 1000):
                pass
            assert caught.value.code == "answer_budget_exhausted" and caught.value.status == 503
            for _ in range(120):  # slower than expected, while there is room
                await clip.add(second)
            with pytest.raises(CapacityError):
                for _ in range(120):
                    await clip.add(second)
        assert limit_of(metrics, "answer_bytes") == (0, 10 << 20)
        with budget.keep(spec, "a" * 1_000_000) as clip:  # alone it may be shorter than expected
            await clip.add(second)

    asyncio.run(run())


def test_a_full_disk_is_an_error_of_the_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async def run() -> None:
        clip = keep(AudioSpec(format="wav", sample_rate=RATE))
        monkeypatch.setattr("tempfile.TemporaryFile", full)
        for _ in range(30):
            await clip.add(np.zeros(RATE, np.float32))

    with pytest.raises(CapacityError, match="no space"):
        asyncio.run(run())
    assert os.strerror(errno.ENOSPC) in caplog.text


def test_half_characters_of_a_completion_are_named_by_their_bytes() -> None:
    """They differ, where the text has one replacement character for each; offsets count characters of the text."""
    tokenizer = FakeService().tokenizer
    ids = tokenizer.encode_plain("a😀b")
    entries = [(each, TokenLogprobs(logprob=-inf, top=((ids[0], -0.5),))) for each in ids]
    whole = CompletionLogprobsWriter(tokenizer).write(
        [*entries, (tokenizer.token_id("<role>"), entries[0][1])]
    )
    assert whole.tokens == ["a", "bytes:\\xf0", "bytes:\\x9f", "bytes:\\x98", "bytes:\\x80", "b", "<role>"]
    assert whole.text_offset == [0, 1, 1, 1, 1, 2, 3]
    assert whole.token_logprobs == [-9999.0] * 7, "JSON has no infinity"
    assert whole.top_logprobs[0] == {"a": -0.5} and whole.top_logprobs[1] == {
        "bytes:\\xf0": -9999.0,
        "a": -0.5,
    }
    writer = CompletionLogprobsWriter(tokenizer)
    assert [writer.write([entry]).text_offset for entry in entries] == [
        [each] for each in whole.text_offset[:-1]
    ]
