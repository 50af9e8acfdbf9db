"""Long strings of a body: what is cut out and put back is what the standard library's JSON parser finds."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import random
import tracemalloc
from typing import Any

import pytest
from fake_service import INFO

from mingc.errors import RequestError
from mingc.prompts.conversation import MediaPart
from mingc.server.http import body
from mingc.server.http.body import (
    LONG_BYTES,
    MAX_DECODED_BYTES,
    MAX_STRINGS,
    count_bytes,
    cut_long_strings,
    decode_base64,
)
from mingc.server.http.media import MediaLoader
from mingc.server.http.parsing import parse_chat, parse_speech
from mingc.server.options import ServeOptions


@pytest.fixture(params=[7, 64, 1 << 20])
def small_steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps so small that strings, escapes and base64 groups are split everywhere."""
    monkeypatch.setattr(body, "_SLICE", request.param)
    monkeypatch.setattr(body, "_FREE_SLICE", 4 * request.param)
    monkeypatch.setattr(body, "_FIRST_SLICE", 3)
    monkeypatch.setattr(body, "LONG_BYTES", 20)


@pytest.mark.usefixtures("small_steps")
def test_cut_strings_put_back_are_the_body() -> None:
    rng = random.Random(3)
    alphabet = ['"', "\\", "/", "a", "B", "é", "中", "😀", "\n", "\u0000", " ", ",", "{", "]"]
    for ensure_ascii in (True, False):
        for _ in range(60):
            texts = ["".join(rng.choices(alphabet, k=rng.randrange(60))) for _ in range(6)]
            value = {texts[0]: texts[1:4], "n": [1, {"x": texts[4]}], "last": texts[5]}
            raw = json.dumps(value, ensure_ascii=ensure_ascii).encode()
            cut = cut_long_strings(memoryview(raw))
            assert all(len(each.data) >= 20 for each in cut.strings)
            assert cut.join(()) == raw
            names = [cut.placeholder(index) for index in range(len(cut.strings))]
            left = json.loads(cut.join(names))
            assert all(len(text) < 400 for text in left["n"][1].values())
            assert count_bytes(raw, b",") == raw.count(b",")


@pytest.mark.usefixtures("small_steps")
def test_what_is_no_json_stays_as_it_is() -> None:
    for raw in (b'{"a": "' + b"x" * 100, b'"' + b"\\" * 101, b'"' + b"\\" * 100, b"", b"[" * 100):
        cut = cut_long_strings(memoryview(raw))
        assert (cut.join(()), cut.strings) == (raw, ())


@pytest.mark.usefixtures("small_steps")
def test_what_is_left_of_a_body_is_counted_before_it_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = b'{"a": "' + b"x" * 1000 + b'", "b": [1, 2]}'
    cut = cut_long_strings(memoryview(raw))
    short = cut.join([cut.placeholder(0)])
    assert len(cut.strings) == 1 and len(short) < 400
    monkeypatch.setattr(body, "MAX_DECODED_BYTES", len(short))
    assert cut.join([cut.placeholder(0)]) == short
    with pytest.raises(RequestError, match=f"holds {len(raw)} bytes without its media") as caught:
        cut.join(())
    assert (caught.value.status, caught.value.code) == (413, "body_too_complex")


@pytest.mark.usefixtures("small_steps")
def test_base64_is_decoded_as_by_the_standard_library() -> None:
    rng = random.Random(4)
    for size in (0, 1, 2, 3, 50, 51, 52, 1000):
        data = rng.randbytes(size)
        encoded = base64.b64encode(data).decode()
        broken = "\r\n".join(encoded[start : start + 9] for start in range(0, len(encoded), 9))
        quoted = "".join(f"%{ord(each):02X}" for each in encoded.rstrip("="))
        for text in (encoded, broken, quoted):
            escaped = json.dumps(text)[1:-1].replace("/", "\\/").encode()
            assert decode_base64(memoryview(escaped), is_escaped=True) == data
            assert decode_base64(memoryview(text.encode()), is_escaped=False) == data
    for bad in (
        b"QUJDQ",
        b"QUJD%2",
        b"QUJD%%2B",
        b"QQ==QUJD",
        b"QUJD@@@@",
        b"QUI=" * 30,
        b"QUJD\\u0041",
        b"QUJD\\",
        "QUJDé".encode(),
    ):
        with pytest.raises(binascii.Error):
            decode_base64(memoryview(bad), is_escaped=True)
    with pytest.raises(binascii.Error):
        decode_base64(memoryview(b"QUJD\\nQUJD"), is_escaped=False)
    # Padding at the end of a step of either size; then more base64, at once and behind steps of white space alone.
    for size, gap in itertools.product((64, 256), (b"", b" " * 200)):
        padded = b"A" * (size - 2) + b"==" + gap
        with pytest.raises(binascii.Error):
            decode_base64(memoryview(padded + b"QUJD"), is_escaped=True)
        assert decode_base64(memoryview(padded), is_escaped=True) == bytes(size // 4 * 3 - 2)


def chat(content: Any, **fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()


async def load(raw: bytes) -> list[bytes]:
    messages = await MediaLoader(ServeOptions()).load(parse_chat(raw, INFO, ServeOptions()).request.messages)
    return [part.data for message in messages for part in message.parts if isinstance(part, MediaPart)]


@pytest.mark.parametrize("escape", [str, lambda text: text.replace("/", "\\/")])
def test_long_media_of_every_field_are_read(escape: Any) -> None:
    import asyncio

    data = random.Random(5).randbytes(100_000)
    encoded = base64.b64encode(data).decode()
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}},
        {"type": "input_audio", "input_audio": {"data": encoded}},
        {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{encoded}"}},
    ]
    raw = escape(chat(parts, images=[encoded], audios=[encoded]).decode()).encode()
    assert asyncio.run(load(raw)) == [data] * 5


def test_long_texts_are_decoded_up_to_a_limit() -> None:
    text = "Grüße 😀\n" * 20_000
    (message,) = parse_chat(chat([{"type": "text", "text": text}]), INFO, ServeOptions()).request.messages
    assert message.text == text
    with pytest.raises(RequestError) as caught:
        parse_chat(chat("x" * (MAX_DECODED_BYTES + 1)), INFO, ServeOptions())
    assert (caught.value.status, caught.value.code) == (413, "body_too_complex")
    for raw in (b'{"input": "' + b"x" * (MAX_DECODED_BYTES + 1), b" " * (MAX_DECODED_BYTES + 1)):
        with pytest.raises(RequestError) as caught:
            parse_speech(raw, INFO, ServeOptions())
        assert (caught.value.status, caught.value.code) == (413, "body_too_complex")


def test_media_do_not_count_towards_the_limit_of_texts() -> None:
    import asyncio

    text, data = "words " * 20_000, random.Random(6).randbytes(MAX_DECODED_BYTES)
    parts = [
        {"type": "text", "text": text},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode()}},
    ]
    raw = chat(parts)
    (message,) = parse_chat(raw, INFO, ServeOptions()).request.messages
    assert message.text == text and asyncio.run(load(raw)) == [data]
    long = "x" * (MAX_DECODED_BYTES - 1000)
    assert parse_chat(chat(long), INFO, ServeOptions()).request.messages[0].text == long


def test_a_long_string_in_any_other_place_is_an_error_that_shows_its_beginning() -> None:
    long = "surprise" * LONG_BYTES
    for fields, param in (
        ({"stop": [long]}, "stop[0]"),
        ({"model": long}, "model"),
        ({"seed": long}, "seed"),
    ):
        with pytest.raises(RequestError) as caught:
            parse_chat(chat("hi", **fields), INFO, ServeOptions())
        assert caught.value.param == param
        assert len(caught.value.message) < 300
    with pytest.raises(RequestError, match="surprise"):
        parse_chat(chat("hi", model=long), INFO, ServeOptions())


def test_a_large_body_takes_no_more_memory_than_its_media() -> None:
    """With one character beyond the BMP a `str` of the body would take four bytes for each of its bytes."""
    raw = json.dumps({"messages": [{"role": "user", "content": "x" * 20_000_000 + "😀"}]}, ensure_ascii=False)
    encoded = raw.encode()
    del raw
    tracemalloc.start()
    try:
        with pytest.raises(RequestError):
            parse_chat(encoded, INFO, ServeOptions())
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def refused(raw: bytes) -> RequestError:
    with pytest.raises(RequestError) as caught:
        parse_speech(raw, INFO, ServeOptions())
    return caught.value


def test_a_body_with_too_many_strings_is_refused_before_it_is_decoded() -> None:
    """A list needs a comma between two, an object a colon: only strings without either are that many."""
    raw = b'{"input": ' + b'""' * (MAX_STRINGS + 1)
    error = refused(raw + b" " * LONG_BYTES + b"}")
    assert (error.status, error.code) == (413, "body_too_complex")
    assert f"more than {MAX_STRINGS} strings" in error.message


def test_a_long_text_that_is_no_text_is_malformed_json() -> None:
    long = b"x" * LONG_BYTES
    for fault, code, says in (
        (rb"\ud800", "invalid_value", "half of a surrogate pair"),
        (rb"\q", "invalid_json", "invalid"),
        (b"\xff", "invalid_json", "UTF-8"),
        (b"\x01", "invalid_json", "invalid"),
    ):
        error = refused(b'{"input": "' + long + fault + b'"}')
        assert (error.status, error.code) == (400, code), fault
        assert says.lower() in error.message.lower(), error.message
