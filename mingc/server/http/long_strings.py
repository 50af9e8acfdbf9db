"""Long strings of a JSON body: cut out before decoding, so that no single step holds Python's interpreter lock for
long.

msgspec decodes a body in one call, 0.4 s for 100 MB of text on a slow core. No other thread runs meanwhile, so the
event loop is blocked whichever thread makes the call. Long strings are media in base64, which no code needs as a `str`.
"""

from __future__ import annotations

import base64
import binascii
import re
import secrets
import string

import msgspec
import numpy as np

from mingc.host import large_arrays

LONG_BYTES = 64 * 1024
_SLICE = 1 << 17  # bytes of one step: 1 to 2 ms of base64 on a slow core
_FIRST_SLICE = 1 << 8  # of a search, which doubles them
_PREFIX = 256
_CONTENT = re.compile(rb'(?:[^"\\]++|\\.)*+', re.DOTALL)
_PLAIN = re.compile(rb"[ !#-\[\]-~]*")  # ASCII that stands for itself in a JSON string
_NONCE = secrets.token_hex(16)  # a client cannot write a placeholder of its own
_BASE64 = msgspec.json.Decoder(bytes)
_ESCAPED = {b"\\/": b"/", b"\\n": b"", b"\\r": b"", b"\\t": b""}
_ESCAPE = re.compile(rb"\\.", re.DOTALL)


class LongString(str):
    """The first characters of a long string. `data`: the whole content between the quotes of the body, not decoded."""

    __slots__ = ("data",)
    data: memoryview

    def __new__(cls, prefix: str, data: memoryview) -> LongString:
        made = super().__new__(cls, prefix)
        made.data = data
        return made


class TooManyStringsError(ValueError):
    """A body has more strings than any request needs."""


class TooManyBytesError(ValueError):
    """A body has more bytes without its long strings than any request needs: `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__(num_bytes)
        self.num_bytes = num_bytes


def cut_long_strings(
    raw: memoryview, max_strings: int, max_bytes: int
) -> tuple[bytes, dict[str, LongString]]:
    """The body with placeholders for its long strings, and what they stand for.

    A body that is not JSON is left unchanged from the first fault on.

    Raises:
        TooManyStringsError: if there are more than `max_strings`.
        TooManyBytesError: if the body with placeholders is longer than `max_bytes`.
    """
    parts: list[bytes | memoryview] = []
    found: dict[str, LongString] = {}
    position = copied = count = 0
    while (start := _find_quote(raw, position)) >= 0:
        count += 1
        if count > max_strings:
            raise TooManyStringsError
        end = _string_end(raw, start + 1)
        if end < 0:
            break
        if end - start > LONG_BYTES:
            value = LongString(_prefix(raw, start + 1), raw[start + 1 : end])
            name = f"{value}{_NONCE}{len(found)}"
            found[name] = value
            parts += [raw[copied : start + 1], name.encode()]
            copied = end
        position = end + 1
    parts.append(raw[copied:])
    if (num_bytes := sum(map(len, parts))) > max_bytes:  # before they are copied
        raise TooManyBytesError(num_bytes)
    return b"".join(parts), found


def _prefix(raw: memoryview, start: int) -> str:
    """The first characters of a string, up to the first escape sequence; `/` may be escaped."""
    match = _PLAIN.match(bytes(raw[start : start + _PREFIX]).replace(b"\\/", b"/"))
    assert match is not None
    return match[0].decode()


def count_bytes(raw: memoryview, byte: bytes) -> int:
    """How often `byte` occurs; counted in steps."""
    return sum(bytes(raw[start : start + _SLICE]).count(byte) for start in range(0, len(raw), _SLICE))


def decode_base64(data: memoryview, *, is_escaped: bool) -> memoryview:
    """The bytes of base64, in steps. White space is skipped. `is_escaped`: JSON escapes are allowed; otherwise a
    backslash is a fault.

    Raises:
        binascii.Error: if it is not base64.
    """
    # Parts are copied as they come: a list of them would be joined and freed at once.
    found = large_arrays.empty(-(-len(data) // 4) * 3, np.uint8).data
    size = 0
    rest = b""
    is_padded = False
    for start in range(0, len(data), _SLICE):
        is_last = start + _SLICE >= len(data)
        piece = rest + bytes(data[start : start + _SLICE])
        rest = b""
        if not is_padded and (decoded := _decode_plain(piece)) is not None:
            found[size : size + len(decoded)] = decoded
            size += len(decoded)
            is_padded = piece.endswith(b"=")
            continue
        if is_escaped and b"\\" in piece:
            if not is_last and (len(piece) - len(piece.rstrip(b"\\"))) % 2:
                piece, rest = piece[:-1], b"\\"
            piece = _ESCAPE.sub(_unescape, piece)
        piece = piece.translate(None, string.whitespace.encode())
        keep = len(piece) if is_last else len(piece) // 4 * 4
        piece, rest = piece[:keep], piece[keep:] + rest
        if piece and is_padded:
            raise binascii.Error("Excess data after padding")
        decoded = base64.b64decode(piece, validate=True)
        found[size : size + len(decoded)] = decoded
        size += len(decoded)
        is_padded = is_padded or piece.endswith(b"=")  # a piece may be white space alone
    return found[:size]


def _decode_plain(piece: bytes) -> bytes | None:
    """The bytes of whole groups of base64 without white space and escapes; None for anything else.

    msgspec decodes three times as fast as `binascii`, but does not say what is wrong.
    """
    if b"\\" in piece:
        return None
    try:
        return _BASE64.decode(b'"%b"' % piece)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _unescape(match: re.Match[bytes]) -> bytes:
    if (plain := _ESCAPED.get(match[0])) is None:
        raise binascii.Error("Only base64 data is allowed")
    return plain


def _find_quote(raw: memoryview, position: int) -> int:
    step = _FIRST_SLICE
    while position < len(raw):
        if (found := bytes(raw[position : position + step]).find(b'"')) >= 0:
            return position + found
        position += step
        step = min(2 * step, _SLICE)
    return -1


def _string_end(raw: memoryview, position: int) -> int:
    """The closing quote of a string whose content begins at `position`; -1 if there is none.

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
