"""One request of each path, and its answer as a client sees it: ours and the shapes of other servers.

What other servers send (their documents of autumn 2026): sglang-omni puts a WAV file into each `delta.audio.data` of a
chat and each `audio.data` of a speech event, or one file after the whole answer; vllm-omni puts base64 into
`delta.content` of chunks whose `modality` is `audio`, and streams speech as `speech.audio.delta` events or raw bytes.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import re
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import httpx
import msgspec
import numpy as np
import soundfile
import soxr
import websockets

from mingc.bench.records import Item, Sample
from mingc.bench.sound import Sound, pcm16, read, wav_of
from mingc.server.stages import stages_ms

_ROUTES = {
    "speech": "/v1/audio/speech",
    "speech-stream": "/v1/audio/speech",
    "picture": "/v1/images/generations",
    "transcription": "/v1/audio/transcriptions",
}
_CHAT = "/v1/chat/completions"
SPEECH = ("speech", "speech-stream")
_LONGEST_S = 900.0  # of an answer, whose parts may come slower and slower
_PCM_RATE = 24_000  # OpenAI's definition of raw PCM, in files and sessions
_TIMEOUT_S = 300.0
_STEP_S = 0.02  # of sound in one event of a session
_AUDIO_EVENTS = ("response.output_audio.delta", "response.audio.delta")
_TEXT_EVENTS = tuple(
    f"response.{each}.delta"
    for each in ("output_audio_transcript", "audio_transcript", "output_text", "text")
)
_decode = msgspec.json.Decoder().decode
_NOT_SOUND = re.compile(r"text/|(audio/)?(mpeg|mp3|ogg|opus|aac|flac|webm)", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Wishes:
    """What every request asks for.

    Attributes:
        tokens: of an answer of text.
        model_rate: sample rate of the model's voice; 0: as the server's headers say.
        server_vad: whether the server finds the end of a spoken turn; otherwise the client says it.
        fields: further fields of every request.
    """

    tokens: int
    model_rate: int = 0
    server_vad: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A server, and which fields it takes on each path (`find_fields`)."""

    url: str
    model: str
    key: str = ""
    fields: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def headers(self) -> dict[str, str]:
        # Compressed streams would be held back, and the time to unpack them would count.
        plain = {"accept-encoding": "identity"}
        return plain | ({"authorization": f"Bearer {self.key}"} if self.key else {})


@dataclass(frozen=True, slots=True)
class Request:
    """A request, ready to be sent: building it does not count."""

    route: str
    body: bytes
    content_type: str
    item: Item
    path: str
    fixed_tokens: int | None
    steps: tuple[str, ...] = ()  # of a session: what the microphone sends, an event each `_STEP_S`


def client_of(target: Target) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=600)
    return httpx.AsyncClient(
        base_url=target.url, timeout=_TIMEOUT_S, limits=limits, headers=target.headers, trust_env=False
    )


def alternatives(path: str, wishes: Wishes) -> Iterator[dict[str, Any]]:
    """Fields to try on a server, the most telling ones first; it gets the first that it does not refuse."""
    limit = wishes.tokens
    match path:
        case "speech":
            for more in ({"stream": False}, {}, {"voice": "alloy"}):
                yield {"response_format": "wav", **more}
        case "speech-stream":
            # sglang-omni streams for `stream`, OpenAI for `stream_format`, ours and vllm-omni know both.
            for kind, more in itertools.product(("wav", "pcm"), ({}, {"voice": "alloy"})):
                yield {"response_format": kind, "stream": True, "stream_format": "audio", **more}
                yield {"response_format": kind, "stream": True, **more}
                yield {"response_format": kind, "stream_format": "audio", **more}
        case "picture":
            yield {"stream": True, "partial_images": 1}
            yield {}
            yield {"response_format": "b64_json"}
        case "transcription":
            yield {"response_format": "json", "stream": "true"}
            yield {"response_format": "json"}
        case "realtime":
            yield {"max_output_tokens": limit}
        case _:
            exact = {"temperature": 0, "max_tokens": limit, "min_tokens": limit, "ignore_eos": True}
            lengths = (exact, {"temperature": 0, "max_tokens": limit}, {"max_completion_tokens": limit})
            sounds: tuple[dict[str, Any], ...] = ({},)
            if path == "spoken":
                formats = ({"format": "wav"}, {"format": "pcm16"}, {"format": "pcm16", "voice": "alloy"})
                sounds = tuple({"modalities": ["text", "audio"], "audio": each} for each in formats)
            for length, sound in itertools.product(lengths, sounds):
                yield {"stream": True, "stream_options": {"include_usage": True}, **length, **sound}


async def find_fields(
    client: httpx.AsyncClient, target: Target, path: str, item: Item, wishes: Wishes
) -> dict[str, Any] | str:
    """The first of `alternatives` that the server answers, or why it refuses the last one."""
    why = ""
    for fields in alternatives(path, wishes):
        asked = replace(target, fields={path: fields})
        sample = await ask(client, asked, build(item, path, asked, wishes), time.perf_counter(), 0.0, wishes)
        if not sample.error:
            return fields
        why = sample.error
        if sample.status not in (400, 415, 422):
            break
    return why


def merged(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of both, of `second` where both have one; objects are merged."""
    both = {name: merged(first[name], second[name]) for name in first.keys() & second.keys()
            if isinstance(first[name], Mapping) and isinstance(second[name], Mapping)}  # fmt: skip
    return {**first, **second, **both}


def build(item: Item, path: str, target: Target, wishes: Wishes) -> Request:
    """Write the request for an item."""
    fields = merged(target.fields[path], wishes.fields)
    if item.expected is not None and item.messages:  # the model knows where a right answer ends
        fields = {name: fields[name] for name in fields.keys() - {"ignore_eos", "min_tokens"}}
    if item.max_tokens is not None:
        lengths = fields.keys() & {"max_tokens", "min_tokens", "max_completion_tokens"}
        fields |= dict.fromkeys(lengths, item.max_tokens)
    fixed = fields.get("max_tokens") if fields.get("ignore_eos") else None
    if item.expected is not None:
        fixed = 0
    if path == "realtime":
        return Request("/v1/realtime", _session(fields, wishes), "", item, path, None, _steps(item.clip))
    if path == "transcription":
        text = {"model": target.model, **{name: str(value) for name, value in fields.items()}}
        form = httpx.Request(
            "POST", "http://x", data=text, files={"file": ("clip.wav", item.clip, "audio/wav")}
        )
        return Request(_ROUTES[path], form.read(), form.headers["content-type"], item, path, None)
    if path in _ROUTES:
        name = "prompt" if path == "picture" else "input"
        body: dict[str, Any] = {"model": target.model, name: item.text, **fields}
        if item.clip:  # as ours, sglang-omni and vllm-omni name them
            sound = base64.b64encode(item.clip).decode()
            body |= {"ref_audio": f"data:audio/wav;base64,{sound}", "ref_text": item.clip_text}
    else:
        body = {"model": target.model, "messages": item.messages, **fields}
    return Request(_ROUTES.get(path, _CHAT), msgspec.json.encode(body), "application/json", item, path, fixed)


@dataclass(slots=True)
class _Seen:
    """An answer while it comes; times as `time.perf_counter`."""

    sound: Sound
    status: int = 0
    first_byte: float | None = None
    tokens: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    pictures: list[float] = field(default_factory=list)
    num_pictures: int = 0
    pixels: hashlib._Hash = field(default_factory=hashlib.sha256)
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    stated_audio_s: float | None = None
    finish_reason: str = ""
    is_transcript: bool = False
    has_ended: bool = False
    timings_ms: dict[str, float] = field(default_factory=dict)

    def add_text(self, text: str, now: float) -> None:
        self.tokens.append(now)
        self.text.append("" + text)  # nothing but a text

    def add_picture(self, data: str, now: float, *, is_finished: bool = True) -> None:
        self.pictures.append(now)
        self.num_pictures += is_finished
        self.pixels.update(data.encode())

    def add_usage(self, given: object) -> None:
        usage = msgspec.convert(given or {}, _Usage)
        self.prompt_tokens = usage.input_tokens if usage.prompt_tokens is None else usage.prompt_tokens
        self.output_tokens = (
            usage.output_tokens if usage.completion_tokens is None else usage.completion_tokens
        )
        self.cached_tokens = (
            usage.prompt_tokens_details or usage.input_token_details or _Details()
        ).cached_tokens
        self.stated_audio_s = usage.audio_seconds

    def add_timings(self, given: object) -> None:
        self.timings_ms = msgspec.convert(given or {}, dict[str, float])


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    input_tokens: int | None = None
    completion_tokens: int | None = None
    output_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    input_token_details: _Details | None = None
    audio_seconds: float | None = None


class _Failed(Exception):
    """The server said that it failed."""


_FAILURES = (_Failed, httpx.HTTPError, OSError, ValueError, TimeoutError, websockets.WebSocketException)
_OTHER_SHAPES = (KeyError, IndexError, TypeError, AttributeError, msgspec.MsgspecError)


async def ask(
    client: httpx.AsyncClient,
    target: Target,
    request: Request,
    due: float | None,
    began: float,
    wishes: Wishes,
    spoken: dict[str, bytes] | None = None,
) -> Sample:
    """Send a request now. `due`: when it should have been sent; None: now. `began`: zero of the sample's times.

    `spoken` gets a sound file of speech whose item has an expected answer, by the item's id.
    """
    is_judged = spoken is not None and request.path in SPEECH and request.item.expected is not None
    seen = _Seen(Sound(wishes.model_rate or _PCM_RATE, keeps=is_judged))
    if request.path == "realtime":
        seen.sound.rate = _PCM_RATE
    sent, error = time.perf_counter(), ""
    scheduled = sent if due is None else due
    try:
        if request.path == "realtime":
            scheduled, sent = await _speak(target, request, due, seen, wishes)
        else:
            async with asyncio.timeout(_LONGEST_S):
                await _post(client, request, seen)
        if request.path in ("speech", "speech-stream", "spoken") and not seen.sound.times:
            error = "the answer has no sound"
        elif request.path in ("text", "image", "clip") and not seen.tokens:
            error = "the answer has no text"
        elif request.path == "picture" and not seen.num_pictures:
            error = "the answer has no picture"
    except _OTHER_SHAPES as failure:
        error = f"the answer has another shape than OpenAI's: {failure!r}"
    except _FAILURES as failure:
        error = f"{failure}" or type(failure).__name__
    ended = time.perf_counter()
    sound = seen.sound
    # What the header says holds where nobody knows better.
    rate = wishes.model_rate if wishes.model_rate and sound.header_rate else sound.header_rate or sound.rate
    if spoken is not None and sound.kept:
        spoken[request.item.id] = wav_of(b"".join(sound.kept), rate)

    def since(moment: float) -> float:
        return round(moment - began, 5)  # shorter files

    return Sample(
        item=request.item.id,
        server=target.url,
        scheduled=since(scheduled),
        sent=since(sent),
        ended=since(ended),
        error=error[:500],
        status=seen.status,
        first_byte=None if seen.first_byte is None else since(seen.first_byte),
        token_times=tuple(map(since, seen.tokens)),
        text="".join(seen.text),
        prompt_tokens=seen.prompt_tokens,
        output_tokens=seen.output_tokens,
        cached_tokens=seen.cached_tokens,
        stated_audio_s=seen.stated_audio_s,
        fixed_tokens=request.fixed_tokens,
        finish_reason=seen.finish_reason,
        audio_times=tuple(map(since, sound.times)),
        audio_samples=tuple(sound.frames),
        sample_rate=rate if sound.times else 0,
        header_rate=sound.header_rate,
        picture_times=tuple(map(since, seen.pictures)),
        num_pictures=seen.num_pictures,
        digest=sound.digest or (seen.pixels.hexdigest()[:32] if seen.pictures else ""),
        stages=dict(stages_ms(seen.timings_ms)),
    )


async def _post(client: httpx.AsyncClient, request: Request, seen: _Seen) -> None:
    headers = {"content-type": request.content_type}
    async with client.stream("POST", request.route, content=request.body, headers=headers) as response:
        seen.status = response.status_code
        if response.has_redirect_location:
            raise _Failed(f"the server sends on to {response.headers['location']}: pass that address")
        if response.status_code != 200:
            raise _Failed(
                f"status {response.status_code}: {(await response.aread())[:400].decode(errors='replace')}"
            )
        kind = response.headers.get("content-type", "")
        if kind.startswith("text/event-stream"):
            async for data, now in _events(response, seen):
                _read_event(_decode(data), now, seen)
            if request.route == _CHAT and not seen.has_ended:
                raise _Failed("the stream ended before its last chunk")
        elif kind.startswith("application/json"):
            whole = _decode(await response.aread())
            seen.first_byte = now = time.perf_counter()
            _read_whole(whole, now, seen)
        elif _NOT_SOUND.match(kind):
            said = (await response.aread())[:100].decode(errors="replace")
            raise _Failed(f"an answer of the type {kind}, wanted WAV, PCM or JSON: {said}")
        else:
            _, _, rate = kind.partition("rate=")
            if rate:
                seen.sound.rate = int(rate.partition(";")[0])
            await _read_sound(response, seen)


async def _read_sound(response: httpx.Response, seen: _Seen) -> None:
    async for data in response.aiter_raw():
        now = time.perf_counter()
        seen.first_byte = seen.first_byte or now
        seen.sound.feed(data, now)


async def _events(response: httpx.Response, seen: _Seen) -> AsyncIterator[tuple[bytes, float]]:
    """The data of each server-sent event, and when its last byte came."""
    held = b""
    async for data in response.aiter_raw():
        now = time.perf_counter()
        seen.first_byte = seen.first_byte or now
        *lines, held = (held + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:") and (content := line[5:].strip()):
                if content == b"[DONE]":
                    seen.has_ended = True
                else:
                    yield content, now


def _read_event(event: Any, now: float, seen: _Seen) -> None:
    """An event of a chat, of speech, of a picture or of a transcription."""
    if event.get("error"):
        raise _Failed(f"the stream ended with {json.dumps(event['error'], ensure_ascii=False)}")
    if event.get("usage"):
        seen.add_usage(event["usage"])
    if event.get("timings_ms"):
        seen.add_timings(event["timings_ms"])
    kind = event.get("type", "")
    if kind == "transcript.text.delta":
        seen.add_text(event["delta"], now)
    elif kind == "transcript.text.done" and not seen.tokens:
        seen.add_text(event["text"], now)
    elif kind == "speech.audio.delta" or event.get("object") == "audio.speech.chunk":
        data = event.get("audio") or event.get("delta")
        _add_sound(data.get("data") if isinstance(data, dict) else data, now, seen)
    elif kind in ("image_generation.partial_image", "image_generation.completed"):
        seen.add_picture(event["b64_json"], now, is_finished=kind.endswith("completed"))
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("finish_reason"):
            seen.finish_reason, seen.has_ended = "" + choice["finish_reason"], True
        audio, content = delta.get("audio") or {}, delta.get("content")
        if event.get("modality") == "audio":
            _add_sound(content, now, seen)
            continue
        _add_sound(audio.get("data"), now, seen)
        said = content if content is not None else delta.get("reasoning_content") or delta.get("reasoning")
        if said is None and (seen.is_transcript or not seen.tokens):
            # OpenAI sends the text of a spoken answer with its sound only, others a second time.
            said = audio.get("transcript")
            seen.is_transcript = said is not None
        if said is not None and (said or "role" not in delta):  # the first chunk has only the role
            seen.add_text(said, now)


def _add_sound(data: str | None, now: float, seen: _Seen) -> None:
    if data:
        seen.sound.feed(base64.b64decode(data), now)


def _read_whole(answer: Any, now: float, seen: _Seen) -> None:
    """A JSON answer, from a server that does not stream."""
    if answer.get("error"):
        raise _Failed(json.dumps(answer["error"], ensure_ascii=False))
    seen.add_usage(answer.get("usage"))
    seen.add_timings(answer.get("timings_ms"))
    if "text" in answer:
        seen.add_text(answer["text"], now)
    for picture in answer.get("data") or ():
        seen.add_picture(picture.get("b64_json") or picture["url"], now)
    for choice in answer.get("choices") or ():
        seen.finish_reason = "" + (choice.get("finish_reason") or "")
        if message := choice.get("message"):
            seen.add_text(message.get("content") or "", now)
            _add_sound((message.get("audio") or {}).get("data"), now, seen)


def _session(fields: Mapping[str, Any], wishes: Wishes) -> bytes:
    detection = {"type": "server_vad"} if wishes.server_vad else None
    session = {"type": "realtime", "audio": {"input": {"turn_detection": detection}}}
    return msgspec.json.encode({"type": "session.update", "session": merged(session, fields)})


def _steps(clip: bytes) -> tuple[str, ...]:
    try:
        samples, rate = read(clip)
    except soundfile.LibsndfileError as error:
        raise ValueError(f"the clip of a spoken turn cannot be read: {error}") from None
    step = round(_PCM_RATE * _STEP_S)
    samples = soxr.resample(samples, rate, _PCM_RATE)
    samples = np.concatenate([samples, np.zeros(-len(samples) % step, samples.dtype)])
    return tuple(_append(pcm16(each)) for each in samples.reshape(-1, step))


def _append(pcm: bytes) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(pcm).decode()})


async def _speak(
    target: Target, request: Request, due: float | None, seen: _Seen, wishes: Wishes
) -> tuple[float, float]:
    """One turn in a session of its own, which begins at `due`, or when the session is open.

    Returns when the speaker should have ended, and when the last sound was sent.
    """
    url = f"{target.url.replace('http', 'ws', 1)}{request.route}?model={target.model}"
    quiet = _append(bytes(round(2 * _PCM_RATE * _STEP_S)))
    connection = websockets.connect(
        url, additional_headers=target.headers, compression=None, max_size=None, proxy=None
    )
    async with asyncio.timeout(_TIMEOUT_S), connection as socket:
        await socket.send(request.body.decode())
        await _until(socket, "session.updated")
        begin = time.perf_counter() if due is None else due
        for index, step in enumerate(request.steps, start=1):
            # A step is sent when it has been spoken.
            await asyncio.sleep(begin + index * _STEP_S - time.perf_counter())
            await socket.send(step)
        end, sent = begin + len(request.steps) * _STEP_S, time.perf_counter()

        async def stay_silent() -> None:
            for index in itertools.count(1):
                await asyncio.sleep(end + index * _STEP_S - time.perf_counter())
                await socket.send(quiet)

        if not wishes.server_vad:
            await socket.send('{"type": "input_audio_buffer.commit"}')
            await socket.send('{"type": "response.create"}')
        silence = asyncio.create_task(stay_silent()) if wishes.server_vad else None
        try:
            while not await _hear(socket, seen):
                pass
        finally:
            if silence is not None:
                silence.cancel()
    return end, sent


async def _hear(socket: websockets.ClientConnection, seen: _Seen) -> bool:
    """Take one event of the answer. Returns whether it is the last one."""
    event = _decode(await socket.recv())
    now, kind = time.perf_counter(), event["type"]
    if kind == "error":
        raise _Failed(f"the session failed: {json.dumps(event['error'], ensure_ascii=False)}")
    if kind in _AUDIO_EVENTS:
        seen.first_byte = seen.first_byte or now
        _add_sound(event.get("delta") or event.get("audio"), now, seen)
    elif kind in _TEXT_EVENTS:
        seen.add_text(event["delta"], now)
    elif kind == "response.done":
        response = event["response"]
        seen.add_usage(response.get("usage"))
        seen.add_timings(response.get("timings_ms"))
        seen.finish_reason = "" + response["status"]
        if response["status"] != "completed" and (response.get("status_details") or {}).get("error"):
            raise _Failed(
                f"the response failed: {json.dumps(response['status_details'], ensure_ascii=False)}"
            )
        return True
    return False


async def _until(socket: websockets.ClientConnection, wanted: str) -> None:
    while (event := _decode(await socket.recv()))["type"] != wanted:
        if event["type"] == "error":
            raise _Failed(f"the session was refused: {json.dumps(event['error'], ensure_ascii=False)}")
