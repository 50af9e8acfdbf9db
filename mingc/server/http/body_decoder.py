"""Decoding of JSON request bodies into structs, with errors that name the field, its value and the fix.

msgspec decodes. For a body that it refuses, the value at fault is looked up again to describe it as OpenAI's API does
(`message`, `param`, `code`). This module knows JSON, structs and RequestError, but no particular field.
"""

from __future__ import annotations

import difflib
import functools
import json
import math
import re
from collections.abc import Iterator, Sequence
from typing import Generic, NoReturn, TypeVar

import msgspec
from msgspec import inspect

from mingc.errors import RequestError
from mingc.server.http.long_strings import (
    LONG_BYTES,
    LongString,
    TooManyBytesError,
    TooManyStringsError,
    count_bytes,
    cut_long_strings,
)

MAX_COMMAS = 1 << 18
MAX_DECODED_BYTES = 8 << 20  # of a body without its media

_Body = TypeVar("_Body")
_Keys = list[str | int]
_KEY = re.compile(r"\.(\w+)|\[(\d+)\]")
_PATH = re.compile(r"(\.\w+|\[\d+\])+`")
# Prefixes of msgspec's messages, up to the name of the field.
_MISSING = "Object missing required field `"
_UNKNOWN = "Object contains unknown field `"
_MAX_SHOWN = 100  # characters of a client's name in an error
_MAX_SHOWN_BYTES = 4000  # larger values are not decoded for an error


class BodyDecoder(Generic[_Body]):
    """Decodes request bodies of one struct type. May be used from several threads."""

    def __init__(
        self,
        type_: type[_Body],
        *,
        text_fields: frozenset[str] = frozenset(),
        media_fields: frozenset[str] = frozenset(),
    ) -> None:
        """Names of fields that may be longer than 64 KiB: texts, and media, which stay undecoded (`LongString`)."""
        self._type = type_
        self._text_fields = text_fields
        self._media_fields = media_fields
        self._decoder = msgspec.json.Decoder(type_)

    def decode(self, raw: bytes | memoryview) -> _Body:
        """The body as a struct.

        Raises:
            RequestError: for anything RFC 8259 does not allow, NaN and Infinity included; for a field that is
                unknown, missing, of the wrong type or out of range; for more values than any request needs.
        """
        raw = memoryview(raw)
        # Decoding blocks every stream: without these limits 100 MB of small values take seconds and gigabytes.
        if (num_commas := count_bytes(raw, b",")) > MAX_COMMAS:
            raise _too_complex(f"holds {num_commas} commas; the limit is {MAX_COMMAS}")
        if len(raw) <= LONG_BYTES:
            return self._decode(bytes(raw))
        try:
            short, strings = cut_long_strings(raw, 4 * MAX_COMMAS, MAX_DECODED_BYTES)
        except TooManyStringsError as error:
            raise _too_complex(f"holds more than {4 * MAX_COMMAS} strings") from error
        except TooManyBytesError as error:
            raise _too_complex(
                f"holds {error.num_bytes} bytes without its media; the limit is {MAX_DECODED_BYTES}"
            ) from error
        body = self._decode(short)
        if strings:
            left = MAX_DECODED_BYTES - len(short)
            _Restorer(strings, self._text_fields, self._media_fields, left).restore(body, [])
        return body

    def _decode(self, raw: bytes) -> _Body:
        try:
            return self._decoder.decode(raw)
        except msgspec.ValidationError as error:
            raise _validation_error(str(error), raw, self._type) from error
        except RecursionError as error:
            raise _malformed("it is nested too deeply") from error
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            try:
                _refuse_surrogates(_parse_untyped(raw), [])
            except RecursionError:
                raise _malformed("it is nested too deeply") from error
            raise _malformed(str(error)) from error


class _Restorer:
    """Restores long strings in a decoded body: those of media fields undecoded, texts decoded."""

    def __init__(
        self,
        strings: dict[str, LongString],
        text_fields: frozenset[str],
        media_fields: frozenset[str],
        max_bytes: int,
    ) -> None:
        self._strings = strings
        self._text_fields = text_fields
        self._media_fields = media_fields
        self._bytes_left = max_bytes

    def restore(self, value: object, keys: _Keys) -> None:
        """Replace the placeholders in a struct or list. Raises: RequestError for texts that are too long."""
        if isinstance(value, msgspec.Struct):
            for name in value.__struct_fields__:
                child = getattr(value, name)
                if (restored := self._restored(child, [*keys, name])) is not child:
                    setattr(value, name, restored)
        elif isinstance(value, list):
            for index, child in enumerate(value):
                value[index] = self._restored(child, [*keys, index])

    def _restored(self, value: object, keys: _Keys) -> object:
        if not isinstance(value, str):
            self.restore(value, keys)
            return value
        if (found := self._strings.get(value)) is None:
            return value
        field = next(key for key in reversed(keys) if isinstance(key, str))
        if field in self._media_fields:
            return found
        self._bytes_left -= len(found.data)
        param = join_path(keys)
        if field not in self._text_fields:
            raise too_long(param, LONG_BYTES)
        if self._bytes_left < 0:
            raise RequestError(
                f"'{param}' is too long; the texts of a request may have {MAX_DECODED_BYTES} bytes.",
                status=413,
                param=param,
                code="string_too_long",
            )
        quoted = b'"' + bytes(found.data) + b'"'
        try:
            return msgspec.json.decode(quoted, type=str)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            _refuse_surrogates(_parse_untyped(quoted), keys)
            raise _malformed(f"{param}: {error}") from error


def decode_small(raw: msgspec.Raw, max_bytes: int = 100) -> object:
    """The value of a field that was left undecoded; None if absent or null. A large one stays `raw`."""
    data = bytes(raw)
    if len(data) > max_bytes:
        return raw
    try:
        return msgspec.json.decode(data) if data else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return raw


def shorten(value: object, limit: int = 60) -> str:
    """`value` as JSON for an error message, cut to `limit` characters."""
    if isinstance(value, str) and len(value) > limit:
        value = value[:limit]  # never encode a whole base64 clip
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, list | dict) else _type_name(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def join_path(keys: Sequence[str | int]) -> str:
    """OpenAI's `param` of a field: `messages[0].content`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def missing(param: str) -> RequestError:
    return RequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, value: object) -> RequestError:
    shown = "" if isinstance(value, list | dict | None) else f" ({shorten(value)})"
    return RequestError(
        f"'{param}' must be {expected}, not {_type_name(value)}{shown}.", param=param, code="invalid_type"
    )


def out_of_range(param: str, expected: str, value: object) -> RequestError:
    return RequestError(
        f"'{param}' must be {expected}; it is {shorten(value)}.", param=param, code="invalid_value"
    )


def too_long(param: str, limit: int) -> RequestError:
    return RequestError(
        f"'{param}' is too long; the limit is {limit} characters.", param=param, code="string_too_long"
    )


def _too_complex(why: str) -> RequestError:
    return RequestError(f"The request body {why}.", status=413, code="body_too_complex")


def _malformed(why: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {why}.", code="invalid_json")


def _type_name(value: object) -> str:
    """Name of a JSON value's type, for error messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int | float):
        return "a number"
    return "an array" if isinstance(value, list) else "an object"


def _nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name[:_MAX_SHOWN], known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


class _ConstantError(ValueError):
    """NaN, Infinity or -Infinity, which Python's parser would otherwise accept."""


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(f"{name} is not a JSON number")


def _parse_untyped(raw: bytes) -> object:
    """The JSON value by Python's own parser, whose errors name line and column. Raises: RequestError."""
    try:
        return json.loads(raw.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise _malformed(f"byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise _malformed(f"{error.msg} at line {error.lineno} column {error.colno}") from error
    except RecursionError as error:
        raise _malformed("it is nested too deeply") from error
    except _ConstantError as error:
        raise _malformed(str(error)) from error
    except ValueError as error:  # Python's limit on the digits of an integer
        raise _malformed("a number has too many digits") from error


def _refuse_surrogates(value: object, keys: _Keys) -> None:
    """Raise RequestError for the first string with half of a surrogate pair, which JSON allows and UTF-8 does not."""
    if isinstance(value, dict):
        for name, child in value.items():
            _check_text(name, [*keys, name])
            _refuse_surrogates(child, [*keys, name])
    elif isinstance(value, list):
        for index, child in enumerate(value):
            _refuse_surrogates(child, [*keys, index])
    elif isinstance(value, str):
        _check_text(value, keys)


def _check_text(value: str, keys: _Keys) -> None:
    if value.isascii():
        return
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        param = join_path(keys)
        raise RequestError(
            f"{shorten(param)} holds half of a surrogate pair at character {error.start}, which is not text.",
            param=param[:_MAX_SHOWN],
            code="invalid_value",
        ) from error


def _validation_error(reason: str, raw: bytes, type_: type) -> RequestError:
    """OpenAI's error for a body that is JSON but does not fit the struct; `reason` is msgspec's message."""
    before, found, path = reason.rpartition(" - at `$")
    if found and _PATH.fullmatch(path):  # a key in the message may contain the separator
        reason = before
    else:
        path = ""
    keys: _Keys = [name or int(index) for name, index in _KEY.findall(path.rstrip("`"))]
    param = join_path(keys) or "body"
    if reason.startswith(_MISSING):
        return missing(join_path([*keys, reason[len(_MISSING) : -1]]))
    if reason.startswith(_UNKNOWN):
        return _unknown_parameter(reason[len(_UNKNOWN) : -1], keys, type_)
    if "of length <=" in reason:
        limit = int(reason.rpartition(" ")[2])
        if reason.startswith("Expected `str`"):
            return too_long(param, limit)
        return RequestError(
            f"'{param}' must be an array of at most {limit} items.", param=param, code="invalid_value"
        )
    types = list(_types_at(type_, keys))
    value = _value_at(raw, keys)
    if reason.startswith("Invalid"):
        return _unknown_choice(param, types, value)
    if ", got " not in reason and isinstance(value, int | float):
        for each in types:
            if isinstance(each, inspect.IntType | inspect.FloatType):
                return out_of_range(param, _bounds(each), value)
    if value is None and keys:
        return missing(param)
    # The lookup finds the last of several values, the decoder refuses the first that is wrong.
    if keys and _type_name(value) in _expected(types).split(" or "):
        return RequestError(
            f"'{param}' is given more than once: send one value.", param=param, code="invalid_value"
        )
    return wrong_type(param, _expected(types), value)


def _unknown_parameter(name: str, keys: _Keys, type_: type) -> RequestError:
    name = name[:_MAX_SHOWN]  # comparing a long name with the known ones takes seconds
    structs = (each for each in _types_at(type_, keys) if isinstance(each, inspect.StructType))
    known = [field for struct in structs for field in _names(struct)]
    param = join_path([*keys, name])
    return RequestError(
        f"Unknown parameter: {shorten(param)}.{_nearest(name, known)}",
        param=param[:_MAX_SHOWN],
        code="unknown_parameter",
    )


def _unknown_choice(param: str, types: Sequence[inspect.Type], value: object) -> RequestError:
    choices: list[str] = []
    hint = ""
    for each in types:
        if isinstance(each, inspect.Metadata):
            hint = f" {(each.extra_json_schema or {}).get('description', '')}"
        each = each.type if isinstance(each, inspect.Metadata) else each
        if isinstance(each, inspect.LiteralType):
            choices += [str(choice) for choice in each.values if str(choice) not in choices]
    nearest = _nearest(value, choices) if isinstance(value, str) else ""
    listed = ", ".join(repr(choice) for choice in choices)
    return RequestError(
        f"{shorten(value)} is not a supported value of '{param}': use one of {listed}.{nearest}{hint}",
        param=param,
        code="invalid_value",
    )


def _bounds(number: inspect.IntType | inspect.FloatType) -> str:
    if number.le is None:
        return "a number that float64 can hold"
    if number.gt is not None:
        return f"above {number.gt} and at most {number.le}"
    return f"between {number.ge} and {number.le}"


def _expected(types: Sequence[inspect.Type]) -> str:
    """The accepted types in words: "a string or an array"."""
    names: list[str] = []
    is_integer = any(isinstance(each, inspect.IntType) for each in types)
    for each in types:
        match each.type if isinstance(each, inspect.Metadata) else each:
            case inspect.StrType() | inspect.LiteralType():
                name = "a string"
            case inspect.IntType() | inspect.FloatType():
                name = "an integer" if is_integer else "a number"
            case inspect.BoolType():
                name = "a boolean"
            case inspect.ListType():
                name = "an array"
            case inspect.StructType():
                name = "an object"
            case _:
                continue
        if name not in names:
            names.append(name)
    return " or ".join(names)


@functools.cache
def _describe(type_: type) -> inspect.Type:
    return inspect.type_info(type_)


def _types_at(type_: type, keys: _Keys) -> Iterator[inspect.Type]:
    """The types that the field at `keys` may have; unions are taken apart."""
    found = list(_flatten(_describe(type_)))
    for key in keys:
        children: list[inspect.Type] = []
        for each in found:
            if isinstance(each, inspect.ListType) and isinstance(key, int):
                children += _flatten(each.item_type)
            elif isinstance(each, inspect.StructType):
                if key == each.tag_field:
                    children.append(inspect.LiteralType(values=(str(each.tag),)))
                for field in each.fields:
                    if field.encode_name == key:
                        children += _flatten(field.type)
        found = children
    yield from found


def _flatten(type_: inspect.Type) -> Iterator[inspect.Type]:
    if isinstance(type_, inspect.UnionType):
        for each in type_.types:
            yield from _flatten(each)
    else:
        yield type_


def _names(struct: inspect.StructType) -> Iterator[str]:
    yield from (field.encode_name for field in struct.fields)
    if struct.tag_field is not None:
        yield struct.tag_field


def _value_at(raw: bytes, keys: _Keys) -> object:
    """The value at `keys`; only containers on the way are decoded, so a large body costs little."""
    try:
        data = raw
        for key in keys:
            if isinstance(key, str):
                data = bytes(msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get(key, b"null"))
            else:
                data = bytes(msgspec.json.decode(data, type=list[msgspec.Raw])[key])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return _child_at(_parse_untyped(raw), keys)  # a fault behind the field at `keys`
    if len(data) <= _MAX_SHOWN_BYTES:
        return _parse_untyped(data)
    match data.lstrip()[:1]:  # large: what an error shows of it is enough
        case b'"':
            return data[1:_MAX_SHOWN].decode("utf-8", errors="ignore")
        case b"[":
            return []
        case b"{":
            return {}
        case _:
            return math.inf


def _child_at(value: object, keys: _Keys) -> object:
    for key in keys:
        if isinstance(value, dict) and isinstance(key, str):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            return None
    return value
