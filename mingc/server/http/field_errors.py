"""Errors about the fields of a request's body, as OpenAI's API words them: `message`, `param`, `code`.

What a field may hold is read from the struct that the body is decoded into, and from msgspec's message.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import msgspec
from msgspec import inspect

from mingc.errors import RequestError

_MAX_SHOWN = 100  # characters of a client's name in an error
_MAX_VALUE = 60  # characters of a client's value in an error
_ANY_KEY = "*"  # of an object with any keys; msgspec does not say which
_KEY = re.compile(r"\.([\w*]+)|\[(\d+)\]")
_PATH = re.compile(r"(\.[\w*]+|\[\d+\])+`")
# msgspec's messages about a field, its type and its value.
_FIELD = re.compile(r"Object (missing required|contains unknown) field `(.*)`", re.DOTALL)
_TYPE = re.compile(r"Expected `([\w |]+)`(?:, got `(\w+)`)?")
_LENGTH = re.compile(r"Expected `(\w+)` of length <= (\d+)")
_CHOICE = re.compile(r"Invalid (?:enum )?value (.*)", re.DOTALL)
_TYPE_NAMES = {
    "str": "a string", "int": "an integer", "float": "a number", "bool": "a boolean", "array": "an array",
    "object": "an object", "null": "null",
}  # fmt: skip
_JSON_TYPES: dict[type[inspect.Type], str] = {
    inspect.BoolType: "bool", inspect.ListType: "array", inspect.StructType: "object", inspect.NoneType: "null",
}  # fmt: skip
_HALF_PAIR = re.compile("[\ud800-\udfff]")

_Keys = list[str | int]


def shorten(value: object) -> str:
    """Write `value` as JSON for an error message, cut to 60 characters."""
    if isinstance(value, str):
        value = value[:_MAX_VALUE]  # never encode a whole base64 clip
    text = json.dumps(value, ensure_ascii=True)
    return text if len(text) <= _MAX_VALUE else text[: _MAX_VALUE - 1] + "…"


def join_path(keys: Sequence[str | int]) -> str:
    """OpenAI's `param` of a field: `messages[0].content`."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys).removeprefix(".")


def missing(param: str) -> RequestError:
    return RequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, found: str | None) -> RequestError:
    but = "" if found is None else f", not {found}"
    return RequestError(f"'{param}' must be {expected}{but}.", param=param, code="invalid_type")


def as_integer(value: int | float | None, param: str) -> int | None:
    """Read an integer; 4.0 counts as 4, because JSON does not distinguish them. Raises: RequestError."""
    if isinstance(value, float):
        if not value.is_integer():
            raise wrong_type(param, "an integer", f"{value}")
        return int(value)
    return value


def invalid(param: str, why: str) -> RequestError:
    """`why` follows the field's name."""
    return RequestError(f"'{param}' {why}.", param=param, code="invalid_value")


def too_long(param: str, limit: int) -> RequestError:
    return RequestError(
        f"'{param}' is too long; the limit is {limit} characters.", param=param, code="string_too_long"
    )


def too_complex(why: str) -> RequestError:
    return RequestError(f"The request body {why}.", status=413, code="body_too_complex")


def malformed(why: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {why}.", code="invalid_json")


def explain_malformed(raw: bytes) -> None:
    """Raise RequestError with line and column, or with the string that is no text; msgspec names neither."""

    def refuse_constant(name: str) -> NoReturn:
        raise ValueError(f"{name} is not a JSON number")

    try:
        value = json.loads(raw.decode(), parse_int=len, parse_constant=refuse_constant)
        keys = _half_pair(value, [])
    except RecursionError as error:
        raise malformed("it is nested too deeply") from error
    except UnicodeDecodeError as error:
        raise malformed(f"byte {error.start} is not UTF-8") from error
    except ValueError as error:
        raise malformed(str(error)) from error
    if keys is not None:  # JSON allows it, UTF-8 does not
        param = join_path(keys)[:_MAX_SHOWN]
        why = f"{shorten(param)} holds half of a surrogate pair, which is not text."
        raise RequestError(why, param=param, code="invalid_value")


def _half_pair(value: object, keys: _Keys) -> _Keys | None:
    """Find the path of the first string with half of a surrogate pair."""
    if isinstance(value, str):
        return keys if _HALF_PAIR.search(value) else None
    items: Any = (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    )
    for key, child in items:
        for text in (key, child) if isinstance(key, str) else (child,):
            if (found := _half_pair(text, [*keys, key])) is not None:
                return found
    return None


def validation_error(reason: str, type_: type, raw: bytes = b"") -> RequestError:
    """OpenAI's error for a body that is JSON but does not fit the struct; `reason` is msgspec's message about `raw`."""
    before, found, path = reason.rpartition(" - at `$")
    path = path.replace("[...]", f".{_ANY_KEY}")
    if found and _PATH.fullmatch(path):  # a key in the message may contain the separator
        reason = before
    else:
        path = ""
    keys: _Keys = [name or int(index) for name, index in _KEY.findall(path.rstrip("`"))]
    param = join_path(keys) or "body"
    if match := _FIELD.fullmatch(reason):
        is_missing = match[1] == "missing required"
        return missing(join_path([*keys, match[2]])) if is_missing else _unknown(match[2], keys, type_)
    if match := _LENGTH.fullmatch(reason):
        limit = int(match[2])
        return (
            too_long(param, limit)
            if match[1] == "str"
            else invalid(param, f"must be {_TYPE_NAMES[match[1]]} of at most {limit} items")
        )
    if match := _TYPE.fullmatch(reason):
        # of a role or a part's type, msgspec does not say what it found
        if keys and (match[2] == "null" or (match[2] is None and _is_null(raw, keys))):
            return missing(param)
        return wrong_type(param, _in_words(match[1]), _TYPE_NAMES.get(match[2]))
    types = list(_types_at(type_, keys))
    if match := _CHOICE.fullmatch(reason):
        return _unknown_choice(param, types, match[1].strip("'"))
    # A described field's type is wrapped.
    types = [each.type if isinstance(each, inspect.Metadata) else each for each in types]
    if types and not any(isinstance(each, inspect.IntType | inspect.FloatType) for each in types):
        names = dict.fromkeys(_JSON_TYPES.get(type(each), "str") for each in types)  # 1e999 for a string
        return wrong_type(param, _in_words(" | ".join(names)), "a number")
    return invalid(param, f"must be {_bounds(types)}")


def _is_null(raw: bytes, keys: _Keys) -> bool:
    try:
        value: Any = msgspec.json.decode(raw)
        for key in keys:
            value = value[key]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError):
        return False  # malformed after the field
    return value is None


def _in_words(names: str) -> str:
    """`str | array | null` → "a string or an array". A field that takes 4 and 4.0 takes integers."""
    known = [_TYPE_NAMES[name] for name in names.split(" | ") if name != "null"]
    return " or ".join(each for each in known if each != "a number" or "an integer" not in known)


def _unknown(name: str, keys: _Keys, type_: type) -> RequestError:
    name = name[:_MAX_SHOWN]  # comparing a long name with the known ones takes seconds
    structs = [each for each in _types_at(type_, keys) if isinstance(each, inspect.StructType)]
    known = [
        name
        for struct in structs
        for name in (struct.tag_field, *(each.encode_name for each in struct.fields))
        if name
    ]
    param = join_path([*keys, name])
    return RequestError(
        f"Unknown parameter: {shorten(param)}.{_nearest(name, known)}",
        param=param[:_MAX_SHOWN],
        code="unknown_parameter",
    )


def _unknown_choice(param: str, types: Sequence[inspect.Type], value: str) -> RequestError:
    choices: list[str] = []
    hint = ""
    for each in types:
        if isinstance(each, inspect.Metadata):
            hint = f" {(each.extra_json_schema or {}).get('description', '')}"
            each = each.type
        if isinstance(each, inspect.LiteralType):
            choices += [str(choice) for choice in each.values if str(choice) not in choices]
    listed = ", ".join(map(repr, choices))
    return RequestError(
        f"{shorten(value)} is not a supported value of '{param}': use one of {listed}.{_nearest(value, choices)}{hint}",
        param=param,
        code="invalid_value",
    )


def _nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name[:_MAX_SHOWN], known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _bounds(types: Sequence[inspect.Type]) -> str:
    for each in types:
        if isinstance(each, inspect.IntType | inspect.FloatType) and each.le is not None:
            least = _number(each.ge if each.gt is None else each.gt)
            low = f"between {least} and" if each.gt is None else f"above {least} and at most"
            return f"{low} {_number(each.le)}"
    return "a number that float64 can hold"


def _number(value: float | None) -> str:
    """A bound as it is written by hand: `Annotated` takes 1 for 1.0, whichever of them was there first."""
    return str(value).removesuffix(".0")


@functools.cache
def _describe(type_: type) -> inspect.Type:
    return inspect.type_info(type_)


def _types_at(type_: type, keys: _Keys) -> Iterator[inspect.Type]:
    """Yield the types that the field at `keys` may have; unions are taken apart."""
    found = list(_flatten(_describe(type_)))
    for key in keys:
        children: list[inspect.Type] = []
        for each in found:
            each = each.type if isinstance(each, inspect.Metadata) else each
            if isinstance(each, inspect.ListType | inspect.VarTupleType) and isinstance(key, int):
                children += _flatten(each.item_type)
            elif isinstance(each, inspect.DictType):
                children += _flatten(each.value_type)
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
