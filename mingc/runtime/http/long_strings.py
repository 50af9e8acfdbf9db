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

LONG_BYTES = 64 * 1024
_SLICE = 1 << 17  # bytes of one step: 1 to 2 ms of base64 on a slow core
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


def cut_long_strings(raw: bytes | bytearray, max_strings: int) -> tuple[bytes, dict[str, LongString]]:
    """The body with placeholders for its long strings, and what they stand for.

    A body that is not JSON is left unchanged from the first fault on.

    Raises:
        TooManyStringsError: if there are more than `max_strings`.
    """
    parts: list[bytes | bytearray] = []
    found: dict[str, LongString] = {}
    whole = memoryview(raw)
    position = copied = count = 0
    while (start := _find_quote(raw, position)) >= 0:
        count += 1
        if count > max_strings:
            raise TooManyStringsError
        end = _string_end(raw, start + 1)
        if end < 0:
            break
        if end - start > LONG_BYTES:
            value = LongString(_prefix(raw, start + 1), whole[start + 1 : end])
            name = f"{value}{_NONCE}{len(found)}"
            found[name] = value
            parts += [raw[copied : start + 1], name.encode()]
            copied = end
        position = end + 1
    parts.append(raw[copied:])
    return b"".join(parts), found


def _prefix(raw: bytes | bytearray, start: int) -> str:
    """The first characters of a string, up to the first escape sequence; `/` may be escaped."""
    match = _PLAIN.match(raw[start : start + _PREFIX].replace(b"\\/", b"/"))
    assert match is not None
    return match[0].decode()


def count_bytes(raw: bytes | bytearray, byte: bytes) -> int:
    """`raw.count(byte)`, in steps."""
    return sum(raw.count(byte, start, start + _SLICE) for start in range(0, len(raw), _SLICE))


def decode_base64(data: memoryview, *, is_escaped: bool) -> bytes:
    """The bytes of base64, in steps. White space is skipped. `is_escaped`: JSON escapes are allowed; otherwise a
    backslash is a fault.

    Raises:
        binascii.Error: if it is not base64.
    """
    parts: list[bytes] = []
    rest = b""
    is_padded = False
    for start in range(0, len(data), _SLICE):
        is_last = start + _SLICE >= len(data)
        piece = rest + bytes(data[start : start + _SLICE])
        rest = b""
        if not is_padded and (decoded := _decode_plain(piece)) is not None:
            parts.append(decoded)
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
        parts.append(base64.b64decode(piece, validate=True))
        is_padded = is_padded or piece.endswith(b"=")  # a piece may be white space alone
    return b"".join(parts)


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


def _find_quote(raw: bytes | bytearray, position: int) -> int:
    while position < len(raw):
        if (found := raw.find(b'"', position, position + _SLICE)) >= 0:
            return found
        position += _SLICE
    return -1


def _string_end(raw: bytes | bytearray, position: int) -> int:
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


def _is_escaped(raw: bytes | bytearray, start: int, place: int) -> bool:
    """Whether an odd number of backslashes stands before `place`; none before `start` belongs to them."""
    end = place
    while end > start and raw[end - 1] == ord("\\"):
        step = raw[max(start, end - _SLICE) : end]
        end -= len(step) - len(step.rstrip(b"\\"))
    return (place - end) % 2 == 1
