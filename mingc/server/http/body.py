"""A request's JSON body: read and charged to a budget, then decoded into a struct with errors that name the field.

Names, types and ranges come from the struct (`request_schemas`); this module knows no particular field. The event loop
must not wait for a large body, so no step holds Python's interpreter lock for long: memory is allocated and returned by
`mingc.host.large_arrays`, and long strings are cut out before msgspec decodes the rest in one call (it takes 0.4 s for
100 MB of text on a slow core). Long strings are usually media in base64, which no code needs as a `str`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
import secrets
import string
from collections.abc import Container
from dataclasses import dataclass
from types import NoneType
from typing import TypeVar
from urllib.parse import unquote_to_bytes

import msgspec
import numpy as np
import pybase64
from numpy.typing import NDArray
from starlette.requests import Request

from mingc.errors import RequestError
from mingc.host import large_arrays
from mingc.server.body_budget import FREE_BYTES, BodyBudget, Charge
from mingc.server.http.field_errors import (
    explain_malformed,
    malformed,
    shorten,
    too_complex,
    validation_error,
)
from mingc.server.options import ServeOptions

JSON = "application/json"
LONG_BYTES = 64 * 1024  # longer strings are cut out
_SHORT_BYTES = 1024  # the same for a body that is larger than `MAX_DECODED_BYTES` without them
MAX_COMMAS = 1 << 18
MAX_STRINGS = 4 * MAX_COMMAS
MAX_MEDIA = (
    1 << 14
)  # each takes a Python call and object, and msgspec checks the length of a list only afterwards
MAX_DECODED_BYTES = 8 << 20  # of a body without its media

_SLICE = 1 << 17  # bytes of one step: 1 to 2 ms of base64 on a slow core
_FREE_SLICE = 1 << 20  # bytes of one step that leaves the lock
_FIRST_SLICE = 1 << 8  # bytes of the first step of a search, which doubles its steps
_PREFIX = 256
_SMALL_BYTES = 100  # values that request nothing are shorter
_CONTENT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
# Some clients send the URL of a medium in the place of the object that holds it. In JSON these quotes enclose a key.
_PLAIN_URL = re.compile(rb'("(?:image|audio|video)_url"\s*:\s*)("(?:[^"\\]++|\\.)*+")')
_PLAIN_URL_ERROR = re.compile(r"Expected `object`, got `str` - at `\$[^`]*\.(?:image|audio|video)_url`$")
_PLAIN = re.compile(rb"[ !#-\[\]-~]*")  # ASCII that stands for itself in a JSON string
_SPACE = re.compile(rb"\\[nrt]")
_NONCE = secrets.token_hex(16)  # a client cannot write a placeholder itself
_ESCAPED = {b"\\/": b"/", b"\\n": b"", b"\\r": b"", b"\\t": b""}
_ESCAPE = re.compile(rb"\\.|%..", re.DOTALL)
_URL_SAFE = bytes.maketrans(b"-_", b"+/")

_TYPES = {NoneType: "null", bool: "bool", int: "int", float: "float", list: "array", dict: "object"}

_Body = TypeVar("_Body")


class MediaString(str):
    """A medium as the client sent it: a URL, a path or base64."""

    __slots__ = ()


class LongString(MediaString):
    """The first characters of a long string. `data`: the whole content between the quotes of the body, not decoded."""

    __slots__ = ("data",)
    data: memoryview

    def __new__(cls, prefix: str, data: memoryview) -> LongString:
        made = super().__new__(cls, prefix)
        made.data = data
        return made


def media_type(content_type: str) -> str:
    """Without parameters such as a boundary."""
    return content_type.partition(";")[0].strip().lower()


async def read_body(
    request: Request,
    options: ServeOptions,
    budget: BodyBudget,
    charge: Charge,
    *types: str,
) -> memoryview:
    """Read the whole body of a request; charge it once its first 64 KiB have arrived.

    `types`: the media types that it may have; by default JSON.

    Raises:
        RequestError: for a wrong content type or a compressed body (415), a body too large (413) or too slow (408).
        CapacityError: if the bodies of all requests together would be too large.
        ClientDisconnect: if the client left before the end.
    """
    types = types or (JSON,)
    found = media_type(request.headers.get("content-type", JSON))
    if found not in types:
        able = " or ".join(f"'{each}'" for each in types)
        raise RequestError(
            f"Content-Type {shorten(found)} is not supported: send {able}.",
            status=415,
            code="unsupported_media_type",
        )
    coding = ",".join(request.headers.getlist("content-encoding")).strip().lower()
    if coding not in ("identity", ""):
        error = RequestError(
            f"Content-Encoding {shorten(coding)} is not supported: send the body without compression.",
            status=415,
            code="unsupported_content_encoding",
        )
        error.headers = {"Accept-Encoding": "identity"}  # RFC 9110 §15.5.16
        raise error
    header = request.headers.get("content-length", "")
    declared = int(header) if header.isdecimal() else 0
    _check_size(declared, options)
    budget.check(declared)
    # Memory for the declared length is allocated only after it is charged.
    body = large_arrays.empty(min(declared or FREE_BYTES, FREE_BYTES), np.uint8)
    size = 0
    chunks = aiter(request.stream())
    try:
        async with asyncio.timeout(options.body_timeout_s) as whole, asyncio.timeout(None) as idle:
            while True:
                idle.reschedule(asyncio.get_running_loop().time() + options.body_idle_timeout_s)
                chunk = await anext(chunks, None)
                if chunk is None:
                    return body.data[:size]
                start, size = size, size + len(chunk)
                _check_size(size, options)
                if (
                    size > FREE_BYTES
                ):  # the whole length: bodies that grow together would all be refused half-way
                    charge.set(max(size, declared))
                if size > len(body):
                    capacity = max(declared, 2 * size)
                    if start <= FREE_BYTES:  # copied faster than it is handed to a thread
                        body = _grown(body, start, capacity)
                    else:
                        body = await asyncio.to_thread(_grown, body, start, capacity)
                body.data[start:size] = chunk
    except TimeoutError as error:
        late = f"The request body did not arrive within {options.body_timeout_s:g} s."
        stalled = f"Nothing of the request body arrived for {options.body_idle_timeout_s:g} s."
        raise RequestError(late if whole.expired() else stalled, status=408, code="body_timeout") from error


def _grown(body: NDArray[np.uint8], size: int, capacity: int) -> NDArray[np.uint8]:
    """Copy the first `size` bytes to new memory of `capacity` bytes. NumPy releases Python's lock while it copies."""
    grown = large_arrays.empty(capacity, np.uint8)
    np.copyto(grown[:size], body[:size])
    return grown


def _check_size(num_bytes: int, options: ServeOptions) -> None:
    if num_bytes > options.max_body_bytes:
        raise RequestError(
            f"The request body is larger than {options.max_body_bytes} bytes.",
            status=413,
            code="body_too_large",
        )


def decode_body(raw: bytes | memoryview, type_: type[_Body]) -> _Body:
    """Decode a body into a struct. May be called from several threads.

    Fields of the type `MediaString` may be as long as the body: long ones become a `LongString`.

    Raises:
        RequestError: for anything RFC 8259 does not allow, NaN and Infinity included; for a field that is unknown,
            missing, of the wrong type or out of range; for more values than any request needs.
    """
    raw = memoryview(raw)
    # Without these limits 100 MB of small values would take seconds and gigabytes.
    if (num_commas := count_bytes(raw, b",")) > MAX_COMMAS:
        raise too_complex(f"holds {num_commas} commas; the limit is {MAX_COMMAS}")
    if len(raw) <= LONG_BYTES:
        return _decode(bytes(raw), type_, {})
    body = cut_long_strings(raw)
    if sum(map(len, body.between)) > MAX_DECODED_BYTES:  # thousands of small media
        body = cut_long_strings(raw, _SHORT_BYTES)
    left_out = {body.placeholder(index): string for index, string in enumerate(body.strings)}
    media: set[str] = set()
    decoded = _decode(body.join(left_out), type_, left_out, media)
    if media == left_out.keys():
        return decoded
    # The other long strings are texts: decode again with them in place.
    return _decode(body.join(media), type_, left_out)


def _decode(
    raw: bytes, type_: type[_Body], cut: dict[str, LongString], used: set[str] | None = None
) -> _Body:
    """Decode, with the strings of `cut` put back into media fields; adds their placeholders to `used`."""

    num_media = 0

    def media_string(_: type, value: object) -> MediaString:
        nonlocal num_media
        num_media += 1
        if num_media > MAX_MEDIA:
            raise too_complex(f"holds more than {MAX_MEDIA} media")
        if not isinstance(value, str):
            raise ValueError(f"Expected `str`, got `{_TYPES[type(value)]}`")
        if (found := cut.get(value)) is None:
            return MediaString(value)
        if used is not None:
            used.add(value)
        if len(found.data) <= LONG_BYTES:
            return MediaString(msgspec.json.decode(b'"%b"' % bytes(found.data)))
        return found

    try:
        return msgspec.json.decode(raw, type=type_, dec_hook=media_string)
    except msgspec.ValidationError as error:
        if _PLAIN_URL_ERROR.search(str(error)) and (whole := _PLAIN_URL.sub(rb'\1{"url":\2}', raw)) != raw:
            return _decode(whole, type_, cut, used)
        raise validation_error(str(error), type_, raw) from error
    except RecursionError as error:
        raise malformed("it is nested too deeply") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        explain_malformed(raw)
        raise malformed(str(error)) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class CutBody:
    """A body in parts: its long `strings` without their quotes, and the parts `between` them, one more."""

    strings: tuple[LongString, ...]
    between: tuple[memoryview, ...]

    def placeholder(self, index: int) -> str:
        """Text in the place of a string. Begins like the string, because an error may show it."""
        return f"{self.strings[index]}{_NONCE}{index}"

    def join(self, left_out: Container[str]) -> bytes:
        """Join the body: with the placeholders of `left_out`, and the other strings in place.

        Raises:
            RequestError: if that is longer than `MAX_DECODED_BYTES`.
        """
        parts: list[bytes | memoryview] = []
        for index, (before, string_) in enumerate(zip(self.between, self.strings, strict=False)):
            name = self.placeholder(index)
            parts += [before, name.encode() if name in left_out else string_.data]
        parts.append(self.between[-1])
        if (num_bytes := sum(map(len, parts))) > MAX_DECODED_BYTES:  # before they are copied
            raise too_complex(f"holds {num_bytes} bytes without its media; the limit is {MAX_DECODED_BYTES}")
        return b"".join(parts)


def cut_long_strings(raw: memoryview, num_bytes: int | None = None) -> CutBody:
    """Cut the strings of more than `num_bytes` out of a body; None: 64 KiB.

    Malformed JSON stays whole from the first fault on.

    Raises:
        RequestError: if there are more than `MAX_STRINGS`.
    """
    between: list[memoryview] = []
    strings: list[LongString] = []
    position = copied = count = 0
    while (start := _find_quote(raw, position)) >= 0:
        count += 1
        if count > MAX_STRINGS:
            raise too_complex(f"holds more than {MAX_STRINGS} strings")
        end = _string_end(raw, start + 1)
        if end < 0:
            break
        if end - start > (num_bytes or LONG_BYTES):
            strings.append(LongString(_prefix(raw, start + 1), raw[start + 1 : end]))
            between.append(raw[copied : start + 1])
            copied = end
        position = end + 1
    return CutBody(strings=tuple(strings), between=(*between, raw[copied:]))


def _prefix(raw: memoryview, start: int) -> str:
    """Return the first characters of a string, up to the first escape sequence but of `/` and of white space."""
    text = _SPACE.sub(b" ", bytes(raw[start : start + _PREFIX]).replace(b"\\/", b"/"))
    match = _PLAIN.match(text)
    assert match is not None
    return match[0].decode()


def count_bytes(raw: memoryview, byte: bytes) -> int:
    """Count `byte` in steps. NumPy releases Python's lock while it compares."""
    values = np.frombuffer(raw, np.uint8)
    steps = (values[start : start + _FREE_SLICE] for start in range(0, len(values), _FREE_SLICE))
    return sum(int(np.count_nonzero(step == ord(byte))) for step in steps)


def _find_quote(raw: memoryview, position: int) -> int:
    step = _FIRST_SLICE
    while position < len(raw):
        if (found := bytes(raw[position : position + step]).find(b'"')) >= 0:
            return position + found
        position += step
        step = min(2 * step, _SLICE)
    return -1


def _string_end(raw: memoryview, position: int) -> int:
    """Find the closing quote of a string whose content begins at `position`; -1 if there is none.

    Base64 has no quote before its end, which `find` reaches a hundred times as fast as the pattern. The pattern walks
    only the step behind an escaped quote, so that a text of escaped quotes does not take a search for each of them.
    """
    while (quote := _find_quote(raw, position)) >= 0:
        if not _is_escaped(raw, position, quote):
            return quote
        window = min(quote + 1 + _SLICE, len(raw))
        match = _CONTENT.match(raw, quote + 1, window)
        assert match is not None
        position = match.end()  # a quote, the window's end, or a backslash just before it
    return -1


def _is_escaped(raw: memoryview, start: int, place: int) -> bool:
    """Whether an odd number of backslashes stands before `place`; none before `start` belongs to them."""
    end = place
    while end > start and raw[end - 1] == ord("\\"):
        step = bytes(raw[max(start, end - _SLICE) : end])
        end -= len(step) - len(step.rstrip(b"\\"))
    return (place - end) % 2 == 1


def decode_base64(data: memoryview, *, is_escaped: bool) -> memoryview:
    """Decode base64 in steps, as browsers decode data URLs, with either alphabet of RFC 4648.

    White space and missing padding are skipped, and percent signs escape. `is_escaped`: JSON escapes are allowed;
    otherwise a backslash is a fault.

    Raises:
        binascii.Error: if it is not base64.
    """
    # Parts are copied as they come: a list of them would be joined and freed at once.
    found = large_arrays.empty(-(-len(data) // 4) * 3, np.uint8).data
    size = 0
    rest = b""
    is_padded = False
    start = 0
    while start < len(data):
        plain = data[start : start + _FREE_SLICE]
        if not rest and not is_padded and (decoded := decode_plain(plain)) is not None:
            found[size : size + len(decoded)] = decoded
            size += len(decoded)
            is_padded = plain[-1] == ord("=")
            start += len(plain)
            continue
        is_last = start + _SLICE >= len(data)
        piece = rest + bytes(data[start : start + _SLICE])
        start += _SLICE
        rest = b""
        if b"\\" in piece and not is_escaped:
            raise binascii.Error("Only base64 data is allowed")
        if b"\\" in piece or b"%" in piece:
            if not is_last:  # an escape may continue in the next piece
                cut = len(piece) - (len(piece) - len(piece.rstrip(b"\\"))) % 2
                cut = max(cut - 2, 0) + (piece[max(cut - 2, 0) : cut] + b"%").index(b"%")
                piece, rest = piece[:cut], piece[cut:]
            piece = _ESCAPE.sub(_unescape, piece)
        piece = piece.translate(_URL_SAFE, string.whitespace.encode())
        if is_last and not is_padded and len(piece) % 4 > 1:
            piece += b"=" * (-len(piece) % 4)
        keep = len(piece) if is_last else len(piece) // 4 * 4
        piece, rest = piece[:keep], piece[keep:] + rest
        if piece and is_padded:
            raise binascii.Error("Excess data after padding")
        decoded = base64.b64decode(piece, validate=True)
        found[size : size + len(decoded)] = decoded
        size += len(decoded)
        is_padded = is_padded or piece.endswith(b"=")  # a piece may be white space alone
    return found[:size]


def decode_plain(data: memoryview) -> bytes | None:
    """Decode whole groups of base64 without white space and escapes; None for anything else.

    pybase64 releases Python's lock and takes 0.1 ms for a MiB, but does not say what is wrong.
    """
    try:
        return pybase64.b64decode(data, validate=True)
    except binascii.Error:
        return None


def _unescape(match: re.Match[bytes]) -> bytes:
    if match[0].startswith(b"%"):
        return unquote_to_bytes(match[0])
    if (plain := _ESCAPED.get(match[0])) is None:
        raise binascii.Error("Only base64 data is allowed")
    return plain


def decode_small(raw: msgspec.Raw) -> object:
    """Decode a field that was left undecoded; None if absent or null. A large value stays `raw`."""
    data = bytes(raw)
    if len(data) > _SMALL_BYTES:
        return raw
    try:
        return msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw
