"""Multipart forms: httpx writes them, or they are written by hand as RFC 7578 shows them."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Meta, Struct

from mingc.errors import RequestError
from mingc.server.http.forms import MAX_PARTS, MAX_TEXT_BYTES, File, decode_form

TYPE = "multipart/form-data; boundary=b0undary"


class Turns(Struct, forbid_unknown_fields=True):
    type: Literal["server_vad"]
    threshold: Annotated[float, Meta(ge=0, le=1)] | None = None


class Upload(Struct, kw_only=True, forbid_unknown_fields=True):
    file: File
    prompt: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    words: list[str] | None = None
    turns: Literal["auto"] | Turns | None = None


def sent(**parts: Any) -> tuple[memoryview, str]:
    """Body and content type as httpx sends them, like every client that is built on it."""
    parts.setdefault("file", ("clip.wav", b"RIFF", "audio/wav"))
    files = [
        (name, each)
        for name, value in parts.items()
        for each in (value if isinstance(value, list) else [value])
    ]
    files = [(name, (None, each) if isinstance(each, str) else each) for name, each in files]
    request = httpx.Request("POST", "http://a/", files=files)
    return memoryview(request.read()), request.headers["content-type"]


def written(*parts: bytes, end: bytes = b"--b0undary--\r\n") -> memoryview:
    return memoryview(b"".join(b"--b0undary\r\n%b\r\n" % part for part in parts) + end)


def part(name: str, value: bytes, *headers: bytes) -> bytes:
    lines = [b'Content-Disposition: form-data; name="%b"' % name.encode(), *headers, b"", value]
    return b"\r\n".join(lines)


def test_fields_are_decoded_by_the_types_of_the_struct() -> None:
    form = decode_form(
        *sent(
            prompt="Grüße, 世界", temperature="0.5", stream="true", turns="auto", **{"words[]": ["a", "b"]}
        ),
        Upload,
    )
    assert (bytes(form.file.data), form.file.filename) == (b"RIFF", "clip.wav")
    assert (form.prompt, form.temperature, form.stream, form.words, form.turns) == (
        "Grüße, 世界", 0.5, True, ["a", "b"], "auto",
    )  # fmt: skip


@pytest.mark.parametrize(
    "turns",
    [
        {"turns[type]": "server_vad", "turns[threshold]": "0.4"},
        {"turns": '{"type":"server_vad","threshold":0.4}'},
    ],
)
def test_an_object_comes_as_keys_or_as_json(turns: dict[str, str]) -> None:
    form = decode_form(*sent(**turns, words="one", prompt=""), Upload)
    assert form.turns == Turns(type="server_vad", threshold=0.4)
    assert form.words == ["one"] and form.prompt is None  # an empty text is absent


@pytest.mark.parametrize(
    "headers",
    [(), (b"Content-Type: audio/wav",), (b"content-transfer-encoding: BINARY", b"X-Other: 1")],
)
def test_a_file_needs_no_file_name(headers: tuple[bytes, ...]) -> None:
    assert (
        bytes(decode_form(written(part("file", b"\x00\xff", *headers)), TYPE, Upload).file.data)
        == b"\x00\xff"
    )


@pytest.mark.parametrize("shift", range(0, 24))
def test_a_boundary_may_lie_across_two_steps(shift: int) -> None:
    """The content is full of beginnings of the boundary; its end moves across a step of the parser."""
    content = (b"\r\n--b0undar\r\r\n--b" * 9000)[: (1 << 17) - 70 + shift]
    form = decode_form(written(part("file", content), part("prompt", b"after")), TYPE, Upload)
    assert bytes(form.file.data) == content and form.prompt == "after"


@pytest.mark.parametrize("shift", range(0, 24))
def test_a_file_may_begin_at_the_end_of_a_step(shift: int) -> None:
    """With the beginning of a boundary, which the parser holds back until the next step."""
    content = b"\r\n--b0undar, and more"
    full = [part("words", b"x" * MAX_TEXT_BYTES)]
    place = bytes(written(*full, part("words", b""), part("file", content))).index(content)
    filler = part("words", b"x" * ((1 << 17) - shift - place))
    form = decode_form(written(*full, filler, part("file", content)), TYPE, Upload)
    assert bytes(form.file.data) == content


@pytest.mark.parametrize(
    ("parts", "param", "code"),
    [
        ({"promt": "x"}, "promt", "unknown_parameter"),
        ({"prompt[x]": "x"}, "prompt[x]", "unknown_parameter"),
        ({"prompt": ["x", "y"]}, "prompt", "invalid_value"),
        ({"file": [b"x", b"y"]}, "file", "invalid_value"),
        ({"temperature": "warm"}, "temperature", "invalid_type"),
        ({"temperature": "2"}, "temperature", "invalid_value"),
        ({"temperature": "nan"}, "temperature", "invalid_value"),
        ({"stream": "maybe"}, "stream", "invalid_type"),
        ({"turns": "{"}, "turns", "invalid_json"),
        ({"turns": "[" * 60_000}, "turns", "invalid_json"),
        ({"turns": "other"}, "turns", "invalid_value"),
        ({"turns[type]": "server_vad", "turns": "auto"}, "turns", "invalid_value"),
        ({"turns": "auto", "turns[type]": "server_vad"}, "turns[type]", "invalid_value"),
        ({"turns[type]": "server_vad", "turns[threshold]": "9"}, "turns.threshold", "invalid_value"),
        ({"prompt": "x" * (MAX_TEXT_BYTES + 1)}, "prompt", "string_too_long"),
        ({f"a{i}": "x" for i in range(MAX_PARTS)}, None, "body_too_complex"),
        ({"n" * 101: "x"}, None, "body_too_complex"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(parts: dict[str, Any], param: str | None, code: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode_form(*sent(**parts), Upload)
    assert (caught.value.param, caught.value.code) == (param, code)


FILE = part("file", b"x")


@pytest.mark.parametrize(
    ("raw", "type_", "code", "says"),
    [
        (written(FILE), "multipart/form-data", "invalid_form", "no boundary"),
        (written(FILE), f"multipart/form-data; boundary={'b' * 300}", "invalid_form", "oundary"),
        (written(FILE, end=b""), TYPE, "invalid_form", "closing boundary"),
        (memoryview(b""), TYPE, "invalid_form", "closing boundary"),
        (memoryview(b"no form"), TYPE, "invalid_form", "boundary"),
        (written(), TYPE, "missing_required_parameter", "file"),
        (written(b"\r\nx"), TYPE, "invalid_form", "Content-Disposition"),
        (written(b"Content-Disposition: form-data\r\n\r\nx"), TYPE, "invalid_form", "Content-Disposition"),
        (written(b"Content-Disposition: attachment; name=file\r\n\r\nx"), TYPE, "invalid_form", "Content-Disposition"),
        (written(part("file", b"x", *[b"A: b"] * 8)), TYPE, "invalid_form", "header"),
        (written(part("file", b"x", b"A: " + b"b" * 2000)), TYPE, "invalid_form", "header"),
        (written(b'Content-Disposition: form-data; name="\xff"\r\n\r\nx'), TYPE, "invalid_form", "utf-8"),
        (written(FILE, part("prompt", b"\xff")), TYPE, "invalid_value", "UTF-8"),
        (written(part("file", b"eA==", b"Content-Transfer-Encoding: base64")), TYPE, "invalid_value", "base64"),
    ],
)  # fmt: skip
def test_a_broken_form_is_refused(raw: memoryview, type_: str, code: str, says: str) -> None:
    with pytest.raises(RequestError, match=says) as caught:
        decode_form(raw, type_, Upload)
    assert (caught.value.status, caught.value.code) == (400, code)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=12),
            st.sampled_from(
                [b"--b0undary", b"\r\n", b"--", b'Content-Disposition: form-data; name="file"', b"=turns[", b";", b":"]
            ),
        ),
        max_size=24,
    )
)  # fmt: skip
def test_no_bytes_are_worse_than_refused(pieces: list[bytes]) -> None:
    for raw in (b"".join(pieces), b"--b0undary\r\n" + b"".join(pieces) + b"\r\n--b0undary--"):
        try:
            decode_form(memoryview(raw), TYPE, Upload)
        except RequestError as error:
            assert error.status in (400, 413) and str(error)


def test_a_damaged_form_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG), pytest.raises(RequestError):
        decode_form(memoryview(b"--b0undary\r\n@: x"), TYPE, Upload)
    assert not caplog.records
