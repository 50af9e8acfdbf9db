"""`/v1/audio/transcriptions` by the official client, over real segments and scripted answers."""

from __future__ import annotations

import asyncio
import io
import random
import re
import zlib
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import srt
import webvtt
from fake_service import INFO, SPEECH_ONLY, FakeService
from openai import OpenAI
from openai.types.audio import Transcription, TranscriptionVerbose
from preprocess_data import audio_parameters, wav
from server_thread import run_server

from mingc.media.speech import BlockReader, SpeechFinder
from mingc.prompts.features import AudioFeatures
from mingc.prompts.media_decoder import SpeechSegment, TurnRules
from mingc.runtime.request import (
    Done,
    Event,
    TextDelta,
    TranscriptDelta,
    TranscriptDone,
    TranscriptEvent,
    TranscriptionRequest,
    TranscriptSegment,
    Usage,
)
from mingc.runtime.service.transcriber import transcribe
from mingc.server.options import ServeOptions

CLIP = Path(__file__).parents[1] / "data" / "speech" / "three-sentences.ogg"
# The clip's own sentences, in seconds; tests/data/README.md says how it was made.
SENTENCES = [(0.5, 2.118), (3.118, 4.644), (5.444, 5.953)]
ANSWERS = ["English\tFirst one,", "English\t  and & <b>the</b>\nsecond. ", "English\tBye"]
TEXT = "First one, and & <b>the</b>\nsecond. Bye"
ROUTE = "/v1/audio/transcriptions"


class Server:
    def __init__(self, url: str, service: FakeService) -> None:
        self.url, self.service = url, service
        self.client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)

    def create(self, **fields: Any) -> Any:
        fields = {"file": CLIP, "model": "ming-omni", **fields}
        return self.client.audio.transcriptions.create(**fields)

    def post(
        self, file: bytes | None = None, route: str = ROUTE, headers: Any = None, **fields: Any
    ) -> httpx.Response:
        clip = CLIP.read_bytes() if file is None else file
        return httpx.post(
            f"{self.url}{route}", files={"file": ("a", clip)}, data=fields, headers=headers, timeout=60
        )


@pytest.fixture(scope="module")
def module_server() -> Iterator[Server]:
    service = FakeService()
    with run_server(lambda: service, ServeOptions(port=0, cors_origins=("https://page.example",))) as url:
        yield Server(url, service)


@pytest.fixture
def server(module_server: Server) -> Server:
    module_server.service.transcripts = list(ANSWERS)
    module_server.service.transcriptions.clear()
    return module_server


def test_json_has_the_text_in_order_and_the_tokens(server: Server) -> None:
    answer = server.create()
    assert isinstance(answer, Transcription) and answer.text == TEXT
    usage = answer.usage
    assert usage is not None and usage.type == "tokens" and usage.input_token_details is not None
    assert usage.input_tokens == 3 * 7  # of the fake
    assert usage.input_token_details.audio_tokens > 60
    # Every second word of an answer is white space; the language is one of its tokens.
    assert usage.output_tokens == sum(len(re.findall(r"\S+|\s", each)) for each in ANSWERS)
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_verbose_json_has_segments_at_their_times(server: Server) -> None:
    answer = server.create(
        response_format="verbose_json", temperature=0.5, timestamp_granularities=["segment"]
    )
    assert isinstance(answer, TranscriptionVerbose) and answer.segments is not None
    assert (answer.language, answer.text, answer.to_dict()["task"]) == ("english", TEXT, "transcribe")
    assert answer.duration == pytest.approx(6.653, abs=0.01)
    assert answer.usage is not None and answer.usage.seconds == answer.duration
    assert [each.text for each in answer.segments] == ["First one,", "and & <b>the</b>\nsecond.", "Bye"]
    assert [each.id for each in answer.segments] == [0, 1, 2]
    for segment, (start, end) in zip(answer.segments, SENTENCES, strict=True):
        assert segment.start == pytest.approx(start, abs=0.1) and segment.end == pytest.approx(end, abs=0.1)
        assert segment.seek == int(segment.start * 100) and segment.temperature == 0.5
        assert 0 <= segment.no_speech_prob < 0.4 and segment.tokens
        raw = segment.text.encode()
        assert segment.compression_ratio == pytest.approx(len(raw) / len(zlib.compress(raw)))
    assert server.service.transcriptions[0].sampling.temperature == 0.5


def test_log_probabilities_are_those_of_the_text(server: Server) -> None:
    """The fake's are -id / 100. White space around a segment and its language have none."""
    tokenizer = server.service.tokenizer
    words = ["First", " ", "one,", "and", " ", "&", " ", "<b>the</b>", "\n", "second.", "Bye"]
    ids = [each for word in words for each in tokenizer.encode_plain(word)]
    expected = [(list(tokenizer.token_bytes(each) or b""), -each / 100) for each in ids]
    answer = server.create(include=["logprobs"])
    *deltas, done = server.create(include=["logprobs"], stream=True)
    of_deltas = [each for delta in deltas for each in delta.logprobs]
    for found in (answer.logprobs, done.logprobs, of_deltas):
        assert [(each.bytes, each.logprob) for each in found] == expected
    assert [[each.token for each in delta.logprobs] for delta in deltas][-1] == [
        tokenizer.decode([each]) for each in tokenizer.encode_plain("Bye")
    ]
    segment = server.create(response_format="verbose_json").segments[2]
    ids = [each for word in ("English", "\t", "Bye") for each in tokenizer.encode_plain(word)]
    assert segment.avg_logprob == pytest.approx(-sum(ids) / len(ids) / 100)
    assert "logprobs" not in server.create().to_dict()


def test_subtitles_are_read_by_other_parsers(server: Server) -> None:
    shown = ["First one,", "and & <b>the</b> second.", "Bye"]
    cues = list(srt.parse(server.create(response_format="srt"), ignore_errors=False))
    assert [each.content for each in cues] == shown and [each.index for each in cues] == [1, 2, 3]
    times = [(each.start.total_seconds(), each.end.total_seconds()) for each in cues]
    np.testing.assert_allclose(times, SENTENCES, atol=0.1)
    text = server.create(response_format="vtt")
    captions = webvtt.from_buffer(io.StringIO(text)).captions
    np.testing.assert_allclose(
        [(each.start_in_seconds, each.end_in_seconds) for each in captions], np.floor(SENTENCES), atol=1
    )
    assert [each.raw_text for each in captions] == [
        "First one,",
        "and &amp; &lt;b&gt;the&lt;/b&gt; second.",
        "Bye",
    ]
    assert server.create(response_format="text") == f"{TEXT}\n"


def test_times_beyond_an_hour(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = TranscriptSegment(
        start_ms=3_723_004, end_ms=35_999_999, text="a", language=None, speech_probability=1.0, tokens=(),
        avg_logprob=0.0, usage=Usage(), audio_tokens=0,
    )  # fmt: skip

    async def late(_: TranscriptionRequest) -> AsyncGenerator[TranscriptEvent]:
        for event in (TranscriptDelta(text="a"), segment):
            yield event
        yield TranscriptDone(duration_ms=36_000_000, usage=Usage(), audio_tokens=0)

    monkeypatch.setattr(server.service, "transcribe", late)
    (cue,) = srt.parse(server.create(response_format="srt"), ignore_errors=False)
    assert (cue.start, cue.end) == (timedelta(milliseconds=3_723_004), timedelta(milliseconds=35_999_999))
    (caption,) = webvtt.from_buffer(io.StringIO(server.create(response_format="vtt"))).captions
    assert (caption.start, caption.end) == ("01:02:03.004", "09:59:59.999")


def test_a_long_file_is_read_as_its_segments_are_answered() -> None:
    """However many segments a read has found: of a file that nobody answers, few are held."""
    features = AudioFeatures(mel=np.zeros((8, 1), np.float32), num_tokens=1)
    found = [SpeechSegment(start_ms=n, end_ms=n + 1, probability=1.0, features=features) for n in range(40)]
    begun: list[int] = []

    async def run() -> None:
        may_end, files = asyncio.Semaphore(0), asyncio.Semaphore(1)
        parts = iter([found[:30], found[30:]])

        async def read() -> list[SpeechSegment] | None:
            return next(parts, None)

        async def answer(segment: SpeechSegment) -> AsyncGenerator[Event]:
            begun.append(segment.start_ms)
            await may_end.acquire()
            yield TextDelta(text="word", token=1)
            yield Done(finish_reason="stop", usage=Usage(completion_tokens=1), timings_ms={})

        async def collect() -> list[TranscriptEvent]:
            return [event async for event in transcribe(reader, read, answer, "English", files)]

        reader = BlockReader(SpeechFinder(audio_parameters(), TurnRules(), "file"))
        running = asyncio.create_task(collect())
        for num_ended in range(len(found)):
            for _ in range(20):
                await asyncio.sleep(0)
            assert begun == list(range(min(num_ended + 4, len(found))))
            may_end.release()
        events = await running
        assert sum(isinstance(each, TranscriptSegment) for each in events) == len(found)
        assert "".join(e.text for e in events if isinstance(e, TranscriptDelta)) == " ".join(["word"] * 40)

    asyncio.run(run())


def test_a_file_that_is_read_leaves_its_place_to_the_next() -> None:
    """A file keeps a decoder until it is read to its end, not until its last segment is answered."""
    features = AudioFeatures(mel=np.zeros((8, 1), np.float32), num_tokens=1)
    segment = SpeechSegment(start_ms=0, end_ms=1, probability=1.0, features=features)
    reads: list[str] = []

    async def run() -> None:
        may_end, files = asyncio.Event(), asyncio.Semaphore(1)

        async def transcript(name: str, num_segments: int) -> None:
            parts = iter([[segment] * num_segments])

            async def read() -> list[SpeechSegment] | None:
                reads.append(name)
                return next(parts, None)

            async def answer(segment: SpeechSegment) -> AsyncGenerator[Event]:
                await may_end.wait()
                yield Done(finish_reason="stop", usage=Usage(completion_tokens=1), timings_ms={})

            reader = BlockReader(SpeechFinder(audio_parameters(), TurnRules(), name))
            async for _ in transcribe(reader, read, answer, "English", files):
                pass

        running = [
            asyncio.create_task(transcript(name, count)) for name, count in (("short", 4), ("long", 9))
        ]
        running.append(asyncio.create_task(transcript("last", 1)))
        for _ in range(20):
            await asyncio.sleep(0)
        assert reads == ["short", "short", "long"], (
            "the long one has segments that wait, so it is not read on"
        )
        may_end.set()
        await asyncio.gather(*running)
        assert reads[3:] == ["long", "last", "last"]

    asyncio.run(run())


@pytest.mark.parametrize(
    "answers",
    [ANSWERS, ["Chinese\t你好，", "Chinese\t世界。", "no language"], ["English\t", "English\t \n", ""]],
)
def test_a_stream_is_the_text_in_deltas(server: Server, answers: list[str]) -> None:
    server.service.transcripts = answers
    events = list(server.create(stream=True))
    *deltas, done = events
    assert {each.type for each in deltas} <= {"transcript.text.delta"} and done.type == "transcript.text.done"
    assert "".join(each.delta for each in deltas) == done.text == server.create().text
    assert done.text in (TEXT, "你好，世界。no language", "")
    assert done.usage.type == "tokens" and done.usage.input_tokens == 21
    raw = server.post(stream="true").text
    assert (
        raw.endswith("data: [DONE]\n\n")
        and "Chinese" not in raw
        and "English" not in raw
        and "\\t" not in raw
    )


def test_all_fields_reach_the_model(server: Server) -> None:
    server.create(
        language="en",
        prompt="ships",
        chunking_strategy={
            "type": "server_vad",
            "threshold": 0.4,
            "silence_duration_ms": 2000,
            "prefix_padding_ms": 100,
        },
        extra_body={"keywords": ["mast", "keel"]},
    )
    (request,) = server.service.transcriptions
    assert (request.language, request.topic, request.keywords) == ("English", "ships", ("mast", "keel"))
    assert request.rules == TurnRules(threshold=0.4, silence_ms=2000, prefix_padding_ms=100, max_ms=30_000)
    assert request.sampling.temperature == 0 and request.sampling.max_tokens == 512
    nothing = {
        "top_p": 1.0,
        "top_k": -1,
        "n": 1,
        "use_beam_search": False,
        "stream_include_usage": True,
        "user": "a",
    }
    server.create(chunking_strategy="auto", language="上海", extra_body=nothing)
    last = server.service.transcriptions[-1]
    assert (last.language, last.rules) == ("上海", TurnRules(max_ms=30_000))


def test_a_forced_language_is_the_one_of_the_answer(server: Server) -> None:
    server.service.transcripts = ["Chinese\t你\t好"]
    answer = server.create(language="zh-CN", response_format="verbose_json")
    assert (answer.language, answer.text) == ("chinese", "你\t好你\t好你\t好")


TIME = np.arange(3 * 16000) / 16000


def test_the_language_of_a_file_is_the_one_that_is_spoken_longest(server: Server) -> None:
    """The first sentence takes 1.6 s, the others 2 s together."""
    server.service.transcripts = ["Chinese\t你好。", "English\tHello.", "English\tBye."]
    assert server.create(response_format="verbose_json").language == "english"
    server.service.transcripts = [
        "Chinese\t你好。",
        "no language is named here, as some answers do",
        "English\tBye.",
    ]
    assert server.create(response_format="verbose_json").language == "chinese"


@pytest.mark.parametrize(
    "samples",
    [
        0 * TIME,
        0.5 * np.sin(2 * np.pi * 440 * TIME),
        0.2 * np.random.default_rng(0).standard_normal(len(TIME)),
    ],
    ids=["silence", "tone", "noise"],
)
def test_without_speech_the_model_is_not_asked(server: Server, samples: np.ndarray) -> None:
    before = dict(server.service.ends)
    file = wav(samples.astype(np.float32), 16000)
    answer = server.create(file=("a.wav", file), response_format="verbose_json")
    assert (answer.text, answer.segments, answer.duration, answer.language) == ("", [], 3.0, "")
    assert server.create(file=("a.wav", file)).text == ""
    assert [each.type for each in server.create(file=("a.wav", file), stream=True)] == [
        "transcript.text.done"
    ]
    assert server.create(file=("a.wav", file), response_format="srt") == ""
    assert server.service.ends == before


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"model": "other"}, "model", "model_not_found"),
        ({"response_format": "diarized_json"}, "response_format", "invalid_value"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities[0]", "invalid_value"),
        ({"include[]": "logprobs", "response_format": "verbose_json"}, "include", "invalid_value"),
        ({"include[]": "languages"}, "include[0]", "invalid_value"),
        ({"temperature": "1.5"}, "temperature", "invalid_value"),
        ({"language": "xx"}, "language", "unsupported_language"),
        ({"language": "a\nb"}, "language", "invalid_value"),
        ({"stream": "true", "response_format": "srt"}, "stream", "invalid_value"),
        ({"chunking_strategy": '{"type":"server_vad","threshold":2}'}, "chunking_strategy.threshold", "invalid_value"),
        ({"chunking_strategy[type]": "semantic"}, "chunking_strategy.type", "invalid_value"),
        ({"promt": "x"}, "promt", "unknown_parameter"),
        ({"known_speaker_names[]": ["Ann", "Ben"]}, "known_speaker_names", "unsupported_parameter"),
        ({"languages[]": ["en", "fr"]}, "languages", "unsupported_parameter"),
        ({"top_p": "0.9"}, "top_p", "unsupported_parameter"),
        ({"n": "2"}, "n", "unsupported_parameter"),
        ({"file": ""}, "file", "empty_media"),
        ({"file": "no sound"}, "file", "undecodable_media"),
        ({"file": "GIF89a"}, "file", "undecodable_media"),
        ({"prompt": "overloaded"}, None, None),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", ["false", "true"])
def test_errors_name_the_field(
    server: Server, fields: dict[str, Any], param: str | None, code: str | None, stream: str
) -> None:
    file = fields.get("file")
    others = {"stream": stream, **{name: value for name, value in fields.items() if name != "file"}}
    answer = server.post(None if file is None else file.encode(), **others)
    assert answer.status_code == (503 if code is None else 404 if code == "model_not_found" else 400)
    error = answer.json()["error"]
    assert (error["param"], error["code"]) == (param, code)


def test_damaged_forms_get_no_server_error(server: Server) -> None:
    """A real form, cut off, or with bytes changed, taken out or doubled, in its heads and in its sound."""
    valid = httpx.Request(
        "POST",
        server.url,
        files={"file": ("a", CLIP.read_bytes())},
        data={"model": "ming-omni", "chunking_strategy[type]": "server_vad", "include[]": "x"},
    )
    body, headers = valid.read(), {"content-type": valid.headers["content-type"]}
    generator = random.Random(0)
    statuses = Counter[int]()
    with httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False) as http:
        for _ in range(150):
            damaged = bytearray(body)
            for _ in range(generator.randrange(1, 4)):
                place = generator.choice([generator.randrange(600), generator.randrange(len(damaged))])
                match generator.randrange(4):
                    case 0:
                        del damaged[place:]
                    case 1:
                        del damaged[place : place + generator.randrange(50)]
                    case 2:
                        damaged[place:place] = damaged[:place][-generator.randrange(1, 300) :]
                    case _:
                        damaged[place : place + 1] = generator.randbytes(1)
                if not damaged:
                    break
            answer = http.post(ROUTE, content=bytes(damaged))
            statuses[answer.status_code] += 1
            assert answer.status_code == 200 or answer.json()["error"]["code"], damaged[:600]
    assert set(statuses) <= {200, 400, 404, 413} and statuses[400] > 50
    assert server.create().text == TEXT


def test_nan_samples_are_refused(server: Server) -> None:
    samples = np.full(16000, np.nan, np.float32)
    assert server.post(wav(samples, 16000)).json()["error"]["param"] == "file"


def test_translations_are_refused_by_name(server: Server) -> None:
    answer = server.post(route="/v1/audio/translations")  # the client warns that its own method is deprecated
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "unsupported_endpoint"


@pytest.mark.parametrize(("origin", "status"), [("https://page.example", 200), ("https://evil.example", 403)])
def test_pages_of_other_origins_are_refused(server: Server, origin: str, status: int) -> None:
    assert server.post(headers={"origin": origin}).status_code == status
    assert server.post(headers={"content-type": "application/json"}).status_code == 415


def test_an_error_in_the_middle_ends_the_stream_with_it(server: Server) -> None:
    with pytest.raises(openai.APIError, match="died midway"):
        list(server.create(prompt="fail midway", stream=True))
    assert server.post(prompt="fail midway").status_code == 500


def test_a_client_that_leaves_cancels_all_answers(server: Server) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ReadTimeout):
                files = {"file": ("a", CLIP.read_bytes())}
                await client.post(
                    f"{server.url}{ROUTE}", files=files, data={"prompt": "endless"}, timeout=1.0
                )
        while server.service.running:
            await asyncio.sleep(0.01)

    asyncio.run(leave())
    ends = [
        end
        for name, end in server.service.ends.items()
        if name.startswith(server.service.transcriptions[0].request_id)
    ]
    assert ends == ["cancelled"] * 3


def test_the_route_is_counted_and_listed(server: Server) -> None:
    server.create()
    metrics = httpx.get(f"{server.url}/metrics").text
    assert f'mingc_http_requests_total{{route="{ROUTE}",status="200"}}' in metrics
    assert ROUTE in server.client.models.retrieve("ming-omni").to_dict()["routes"]  # type: ignore[operator]


@pytest.mark.parametrize("info", [SPEECH_ONLY, replace(INFO, has_audio_input=False)])
def test_an_artifact_without_ears_is_refused_by_name(info: Any) -> None:
    with run_server(lambda: FakeService(info)) as url:
        answer = Server(url, FakeService()).post()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_model")


def test_limits_of_the_file_and_of_the_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("secret\n")
    options = ServeOptions(port=0, max_media_bytes=20_000, api_key_file=keys, key_max_tokens=2100)
    with run_server(FakeService, options) as url:
        server = Server(url, FakeService())
        key = {"authorization": "Bearer secret"}
        assert server.post().status_code == 401
        assert server.post(headers=key).status_code == 200
        assert server.post(b"x" * 20_001, headers=key).json()["error"]["code"] == "media_too_large"
        assert server.post(headers=key, prompt="x" * 60).json()["error"]["code"] == "key_limit_exceeded"
