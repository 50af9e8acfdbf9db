"""Media and the event loop: what reads, decodes, hashes or copies them runs in other threads, in short steps."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import random
import socket
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from fake_engines import HIDDEN
from fake_omni import make_service
from fake_thinker import thinker_parameters
from preprocess_data import audio_parameters, noise_image, png, tokenizer, vision_parameters
from server_thread import run_server

from mingc.errors import RequestError
from mingc.host import large_arrays
from mingc.media.decoder_process import receive_array
from mingc.media.decoding import InProcessDecoder, run_task
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import MediaPart, Message
from mingc.prompts.features import Features, VisionFeatures
from mingc.prompts.media_decoder import MediaDecoder, MediaTask
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.service import pipelines
from mingc.runtime.service.omni import OmniService
from mingc.server.http import body as bodies
from mingc.server.http import media, routes
from mingc.server.options import ServeOptions

CHAT = "/v1/chat/completions"
WAIT_S = 60.0
STEP_BYTES = 1 << 17  # 1 to 2 ms of base64 on a slow core


class Recorder:
    """Records the threads that call functions, by name."""

    def __init__(self) -> None:
        self.threads: dict[str, set[int]] = {}

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(*arguments: Any, **named: Any) -> Any:
            self.threads.setdefault(name, set()).add(threading.get_ident())
            return function(*arguments, **named)

        return recorded


class Gate(InProcessDecoder):
    """Decodes in this process, once the test lets it go on."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.open = threading.Event(), threading.Event()

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        self.begun.set()
        assert self.open.wait(WAIT_S)
        return run_task(task, data)


class Encoder:
    """Embeddings of zeros."""

    max_batch_tokens = 1 << 20

    def padded_tokens(self, features: Sequence[object]) -> int:
        return len(features)

    def encode(self, features: Sequence[VisionFeatures]) -> list[torch.Tensor]:
        return [torch.zeros(each.num_tokens(vision_parameters().merge_size), HIDDEN) for each in features]


def media_service(decoder: MediaDecoder, encoder: Encoder) -> OmniService:
    cache = EncoderCache(1 << 20)
    service = make_service(
        processor=ChatProcessor(
            tokenizer(),
            thinker_parameters(tokenizer().token_id),
            vision=vision_parameters(),
            audio=audio_parameters(),
            decoder=decoder,
        ),
        vision=EncoderLoop("vision_encoder", encoder, cache),
        encoder_cache=cache,
        has_talker=False,
    )
    service.info = replace(service.info, has_image=True)
    return service


def body(*images: bytes, **fields: object) -> bytes:
    urls = [f"data:image/png;base64,{base64.b64encode(image).decode()}" for image in images]
    content: list[dict[str, object]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "text", "text": "hi"})
    return json.dumps(
        {"messages": [{"role": "user", "content": content}], "max_tokens": 2, **fields}
    ).encode()


def post(url: str, content: bytes) -> httpx.Response:
    headers = {"content-type": "application/json"}
    return httpx.post(url + CHAT, content=content, headers=headers, timeout=WAIT_S)


def large_picture() -> bytes:
    """A file of more than 64 KiB, of which a chat has few tokens."""
    found = png(noise_image(160, 160))
    assert len(base64.b64encode(found)) > bodies.LONG_BYTES
    return found


def test_a_stream_ends_while_a_medium_beside_it_is_being_decoded() -> None:
    gate = Gate()
    with run_server(lambda: media_service(gate, Encoder())) as url, ThreadPoolExecutor(1) as pool:
        with contextlib.ExitStack() as ending:
            ending.callback(gate.open.set)
            answer: Future[httpx.Response] = pool.submit(post, url, body(large_picture()))
            assert gate.begun.wait(WAIT_S)
            text = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 40, "ignore_eos": True}
            streamed = post(url, json.dumps({**text, "stream": True}).encode())
            assert httpx.get(url + "/health", timeout=WAIT_S).json()["num_requests_running"] == 1
            assert not answer.done()
        events = [line for line in streamed.text.splitlines() if line.startswith("data: ")]
        assert events[-1] == "data: [DONE]" and len(events) > 10
        reference = post(url, json.dumps(text).encode()).json()["choices"][0]["message"]["content"]
        parts = [json.loads(each[6:])["choices"] for each in events[:-1]]
        assert "".join(each[0]["delta"].get("content") or "" for each in parts if each) == reference
        assert answer.result(WAIT_S).status_code == 200


def test_nothing_that_touches_media_runs_on_the_thread_of_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen, gate, encoder = Recorder(), Gate(), Encoder()
    gate.open.set()
    monkeypatch.setattr(routes, "parse_chat", seen.wrap("parse the body", routes.parse_chat))
    monkeypatch.setattr(media, "decode_base64", seen.wrap("decode base64", media.decode_base64))
    monkeypatch.setattr(pipelines, "media_digests", seen.wrap("hash the features", pipelines.media_digests))
    monkeypatch.setattr(pipelines, "place", seen.wrap("place embeddings", pipelines.place))
    monkeypatch.setattr(encoder, "encode", seen.wrap("encode", encoder.encode))
    # What the server's event loop itself runs, to know its thread.
    monkeypatch.setattr(routes, "read_body", seen.wrap("event loop", routes.read_body))
    monkeypatch.setattr(gate, "run", seen.wrap("decode the medium", gate.run))
    with run_server(lambda: media_service(gate, encoder)) as url:
        pictures = body(large_picture(), large_picture())
        answer = post(url, pictures.replace(b";base64,", b";base64,\\n"))  # not plain
    assert answer.status_code == 200
    (event_loop,) = seen.threads.pop("event loop")
    assert sorted(seen.threads) == [
        "decode base64",
        "decode the medium",
        "encode",
        "hash the features",
        "parse the body",
        "place embeddings",
    ]
    assert not [name for name, threads in seen.threads.items() if event_loop in threads]


def test_no_large_object_of_python_holds_a_body_or_a_medium() -> None:
    """Freeing one would stop the event loop: they are in memory of `large_arrays`."""
    size = large_arrays.LARGE_BYTES + 1_000_000
    data = random.Random(5).randbytes(size)
    content, traced, received = body(data), [], []

    class Traced(InProcessDecoder):
        def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
            traced.extend(tracemalloc.take_snapshot().traces)
            received.append(bytes(data))
            return run_task(task, png(noise_image(32, 32)))

    with run_server(lambda: media_service(Traced(), Encoder())) as url:
        tracemalloc.start(20)
        try:
            answer = post(url, content)
        finally:
            tracemalloc.stop()
    assert answer.status_code == 200 and received == [data]
    large = [each for each in traced if each.size >= large_arrays.LARGE_BYTES]
    assert not [each for each in large if any("/mingc/" in frame.filename for frame in each.traceback)], (
        "of the server; the client in this process has copies of its own"
    )
    assert sum(each.size for each in traced) > 0


def test_embeddings_that_requests_share_are_in_large_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder's result belongs to a call of several media; what is cached and what is placed does not."""
    blocks: list[range] = []
    empty = large_arrays.empty

    def recorded(shape: Any, dtype: Any) -> Any:
        array = empty(shape, dtype)
        blocks.append(range(array.ctypes.data, array.ctypes.data + array.nbytes))
        return array

    monkeypatch.setattr(large_arrays, "empty", recorded)
    embeddings = torch.randn(4, HIDDEN)
    features = VisionFeatures(patches=np.zeros((16, 3), np.float32), grid=(1, 4, 4))

    class Fixed(Encoder):
        def encode(self, features: Sequence[VisionFeatures]) -> list[torch.Tensor]:
            return [embeddings for _ in features]

    cache = EncoderCache(1 << 20)
    loop = EncoderLoop("vision_encoder", Fixed(), cache)
    loop.start()
    try:
        loop.submit([features], [b"key"])[0].result(WAIT_S)
    finally:
        loop.stop()
    cached = cache.get(b"vision_encoder key")
    assert cached is not None
    kinds = np.array([0, 1, 1, 0, 1, 1], np.int64)
    placed = pipelines.place(kinds, {1: [cached[:2], cached[2:]]}, torch.device("cpu"))
    for found in (cached, placed):
        assert torch.equal(found, embeddings)
        assert any(found.data_ptr() in block for block in blocks)


def test_what_a_url_or_a_file_gives_is_joined_in_another_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    """So is the list of root certificates read, at the first URL."""
    seen = Recorder()
    monkeypatch.setattr(media, "_tls_context", seen.wrap("certificates", media._tls_context.__wrapped__))
    offload = asyncio.to_thread
    joined: list[object] = []

    async def to_thread(function: Callable[..., Any], *arguments: Any) -> Any:
        joined.append(function)
        return await offload(function, *arguments)

    monkeypatch.setattr(asyncio, "to_thread", to_thread)
    parts = [bytes([number]) * 70_000 for number in range(5)]
    client = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda _: httpx.Response(200, content=Parts(parts)))
    )
    monkeypatch.setattr(httpx, "AsyncClient", lambda **_: client)
    loader = media.MediaLoader(ServeOptions(allow_media_hosts=("127.0.0.1:9",), media_root=tmp_path))
    (tmp_path / "file").write_bytes(b"".join(parts))
    threads: set[int] = set()

    async def load(source: str) -> object:
        threads.add(threading.get_ident())
        part = MediaPart(kind="image", data=source, where="image")
        (message,) = await loader.load([Message(role="user", parts=(part,))])
        (loaded,) = message.parts
        return loaded.data if isinstance(loaded, MediaPart) else None

    for source in ("http://127.0.0.1:9/picture", "file"):
        assert asyncio.run(load(source)) == b"".join(parts)
    assert large_arrays.join in joined and loader._read_file in joined
    assert seen.threads["certificates"].isdisjoint(threads)


def test_the_first_mebibyte_of_plain_base64_is_decoded_on_the_event_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest on threads, so that a request of many media leaves the loop to others."""
    seen = Recorder()
    monkeypatch.setattr(media, "decode_base64", seen.wrap("decode base64", media.decode_base64))
    data = random.Random(4).randbytes(500_000)
    encoded = base64.b64encode(data)

    async def load(num_media: int, max_media_bytes: int) -> tuple[Message, ...]:
        source = bodies.LongString(encoded[:8].decode(), memoryview(encoded))
        part = MediaPart(kind="image", data=source, where="image", is_base64=True)
        loader = media.MediaLoader(ServeOptions(max_media_bytes=max_media_bytes))
        return await loader.load([Message(role="user", parts=(part,) * num_media)])

    asyncio.run(load(1, len(data)))
    assert not seen.threads
    with pytest.raises(RequestError, match="larger than 499999 bytes"):
        asyncio.run(load(1, len(data) - 1))
    seen.threads.clear()
    (message,) = asyncio.run(load(2, 2 * len(data)))
    assert [part.data for part in message.parts if isinstance(part, MediaPart)] == [data, data]
    assert (
        len(seen.threads["decode base64"]) == 1 and threading.get_ident() not in seen.threads["decode base64"]
    )


@pytest.mark.parametrize("line_end", [b"", b"\\n"], ids=["plain", "in lines"])
def test_long_media_share_the_limit_of_their_request(line_end: bytes) -> None:
    data = random.Random(5).randbytes(60_000)
    encoded = base64.b64encode(data) + line_end
    source = bodies.LongString(encoded[:8].decode(), memoryview(encoded))
    message = Message(
        role="user",
        parts=tuple(MediaPart(kind="image", data=source, where=where, is_base64=True) for where in "abc"),
    )

    def load(max_media_bytes: int) -> tuple[Message, ...]:
        return asyncio.run(media.MediaLoader(ServeOptions(max_media_bytes=max_media_bytes)).load([message]))

    (loaded,) = load(3 * len(data))
    assert [part.data for part in loaded.parts if isinstance(part, MediaPart)] == [data] * 3
    for limit, where in ((3 * len(data) - 1, "c"), (2 * len(data) - 10_000, "b")):
        with pytest.raises(
            RequestError, match=f"The media of this request are larger than {limit} bytes"
        ) as refusal:
            load(limit)
        assert refusal.value.param == where


class Parts(httpx.AsyncByteStream):
    def __init__(self, parts: list[bytes]) -> None:
        self._parts = parts

    async def __aiter__(self) -> Any:
        for part in self._parts:
            yield part


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Bytes of each call that keeps Python's lock while it reads a long string, and of `plain` ones, which do not."""
    found: dict[str, list[int]] = {"base64": [], "pattern": [], "plain": []}

    class Pattern:
        def match(self, raw: memoryview, start: int, end: int) -> Any:
            found["pattern"].append(end - start)
            return content.match(raw, start, end)

    def decode_plain(data: memoryview) -> bytes | None:
        found["plain"].append(len(data))
        return plain(data)

    def decode(piece: bytes, **named: Any) -> bytes:
        found["base64"].append(len(piece))
        return decode_base64(piece, **named)

    content, plain, decode_base64 = bodies._CONTENT, bodies.decode_plain, base64.b64decode
    monkeypatch.setattr(bodies, "decode_plain", decode_plain)
    monkeypatch.setattr(bodies, "_CONTENT", Pattern())
    monkeypatch.setattr(base64, "b64decode", decode)
    yield found
    assert max([*found["base64"], *found["pattern"]], default=0) <= STEP_BYTES + 4


@pytest.mark.parametrize("encode", [base64.b64encode, base64.encodebytes])
def test_a_medium_is_read_in_short_steps(
    steps: dict[str, list[int]], encode: Callable[[bytes], bytes]
) -> None:
    """With and without line breaks."""
    data = random.Random(1).randbytes(3_000_000)
    encoded = encode(data).replace(b"\n", b"\\n")
    cut = bodies.cut_long_strings(memoryview(b'{"a": "' + encoded + b'", "b": 1}'))
    (value,) = cut.strings
    assert bodies.decode_base64(value.data, is_escaped=True) == data
    if encode is base64.b64encode:
        assert steps["plain"] == [1 << 20] * 3 + [len(encoded) - (3 << 20)] and not steps["base64"]
    else:
        assert len(steps["base64"]) == -(-len(encoded) // STEP_BYTES)
    assert not steps["pattern"], "base64 has no quote, which a search finds many times as fast"
    assert len(cut.join([cut.placeholder(0)])) < 1000


@pytest.mark.parametrize("text", [b'\\"', b"\\\\", b'\\\\\\"', b'x\\"', b"\\u0022", b"\\"])
def test_texts_of_escapes_are_walked_once_in_short_steps(text: bytes, steps: dict[str, list[int]]) -> None:
    """However the quotes fall: the pattern reads no byte twice, so that 100 MB of quotes take no longer than before."""
    inside = text * 400_000 if text != b"\\" else b"\\" * 800_000
    raw = b'["' + inside + b'", "rest"]'
    (value,) = bodies.cut_long_strings(memoryview(raw)).strings
    assert bytes(value.data) == inside
    assert sum(steps["pattern"]) <= len(inside) + 2 * len(steps["pattern"])
    with pytest.raises(binascii.Error):
        bodies.decode_base64(value.data, is_escaped=True)


@pytest.mark.parametrize("shape", [(7, 3), (0, 4), (), (1 << 20,), (8200, 1024)])
def test_arrays_of_a_decoder_are_received_into_their_own_memory(shape: tuple[int, ...]) -> None:
    sent = np.random.default_rng(2).standard_normal(shape).astype(np.float32)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=theirs.sendall, args=(np.ascontiguousarray(sent).tobytes(),))
        sender.start()
        array = receive_array(ours, "<f4", shape)
        sender.join()
        np.testing.assert_array_equal(array, sent)
        assert array.flags.writeable
        theirs.sendall(b"abc")
        theirs.close()
        with pytest.raises(EOFError):
            receive_array(ours, "<f4", (1,))
