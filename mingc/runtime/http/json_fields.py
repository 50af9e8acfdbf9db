"""Strict reading of a JSON object: typed fields, unknown keys refused with the nearest known name.

Knows JSON and RequestError, nothing of OpenAI's shapes.
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from typing import NoReturn

from mingc.errors import RequestError

MAX_COMMAS = 1 << 18


def parse_json(raw: bytes) -> object:
    """The JSON value of a request body (UTF-8).

    Raises:
        RequestError: for anything RFC 8259 does not allow, NaN and Infinity included; for more values than any
            request needs.
    """
    # Every stream waits while this parses: a hundred megabytes of small arrays take twenty seconds and three gigabytes,
    # of base64, which has no commas, a tenth of a second.
    if (num_commas := raw.count(b",")) > MAX_COMMAS:
        raise RequestError(
            f"The request body holds {num_commas} commas; the limit is {MAX_COMMAS}.",
            status=413,
            code="body_too_complex",
        )
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


class _ConstantError(ValueError):
    """NaN, Infinity or -Infinity, which Python's parser would take."""


def _malformed(why: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {why}.", code="invalid_json")


def _refuse_constant(name: str) -> NoReturn:
    raise _ConstantError(f"{name} is not a JSON number")


def shorten(value: object, limit: int = 60) -> str:
    """`value` as JSON for an error message, cut to `limit` characters."""
    if isinstance(value, str) and len(value) > limit:
        value = value[:limit]  # never encode a whole base64 clip
    text = json.dumps(value, ensure_ascii=True) if not isinstance(value, list | dict) else type_name(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def type_name(value: object) -> str:
    """What a client calls the type of a JSON value."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, int | float):
        return "a number"
    return "an array" if isinstance(value, list) else "an object"


def nearest(name: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?` or nothing."""
    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


class Fields:
    """The keys of one JSON object, each read at most once; null counts as absent.

    Every reader marks its key as known, so `finish` can refuse what nobody asked for.
    """

    def __init__(self, value: object, param: str = "") -> None:
        if not isinstance(value, dict):
            raise wrong_type(param or "body", "an object", value)
        self._values: dict[str, object] = value
        self._known: list[str] = []
        self.param = param

    def path(self, name: str) -> str:
        """Where the field is, as OpenAI's `param`: `audio.voice`."""
        return f"{self.param}.{name}" if self.param else name

    def value(self, name: str) -> object:
        """The raw value, None when absent."""
        self._known.append(name)
        return self._values.get(name)

    def ignore(self, *names: str) -> None:
        """Accept fields that change nothing here."""
        self._known.extend(names)

    def refuse(self, name: str, why: str, *, unless: Sequence[object] = ()) -> None:
        """Refuse a known but unsupported field, except with a value that asks for nothing."""
        value = self.value(name)
        # `1 == True` in Python, not in JSON
        neutral = any(value == good and isinstance(value, bool) == isinstance(good, bool) for good in unless)
        if value is not None and not neutral:
            raise RequestError(
                f"'{self.path(name)}' is not supported: {why}.",
                param=self.path(name),
                code="unsupported_parameter",
            )

    def finish(self) -> None:
        """Raises RequestError for a key that no reader asked for."""
        for name in self._values:
            if name not in self._known:
                raise RequestError(
                    f"Unknown parameter: {shorten(self.path(name))}.{nearest(name, self._known)}",
                    param=self.path(name)[:100],
                    code="unknown_parameter",
                )

    def string(self, name: str, *, max_length: int | None = None) -> str | None:
        value = self.value(name)
        if value is None:
            return None
        return check_string(value, self.path(name), max_length=max_length)

    def required_string(self, name: str, *, max_length: int | None = None) -> str:
        value = self.string(name, max_length=max_length)
        if value is None:
            raise missing(self.path(name))
        return value

    def boolean(self, name: str) -> bool | None:
        value = self.value(name)
        if value is not None and not isinstance(value, bool):
            raise wrong_type(self.path(name), "a boolean", value)
        return value

    def integer(self, name: str, *, low: int, high: int) -> int | None:
        """An integer in [low, high]; 4.0 counts as 4, as JSON makes no difference."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(self.path(name), "an integer", value)
        if isinstance(value, float):
            if not value.is_integer():
                raise wrong_type(self.path(name), "an integer", value)
            value = int(value)
        if not low <= value <= high:
            raise out_of_range(self.path(name), f"between {low} and {high}", value)
        return value

    def number(self, name: str, *, low: float, high: float, above_low: bool = False) -> float | None:
        """A finite number in [low, high], or (low, high] with `above_low`."""
        value = self.value(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(self.path(name), "a number", value)
        if not low <= value <= high or (above_low and value == low) or not math.isfinite(value):
            bounds = f"above {low} and at most {high}" if above_low else f"between {low} and {high}"
            raise out_of_range(self.path(name), bounds, value)
        return float(value)

    def choice(self, name: str, choices: Sequence[str], *, hint: str = "") -> str | None:
        value = self.string(name)
        if value is not None and value not in choices:
            listed = ", ".join(repr(choice) for choice in choices)
            raise RequestError(
                f"{shorten(value)} is not a supported value of '{self.path(name)}': use one of {listed}.{hint}",
                param=self.path(name),
                code="invalid_value",
            )
        return value

    def items(self, name: str, *, max_items: int) -> list[object] | None:
        value = self.value(name)
        if value is None:
            return None
        if not isinstance(value, list):
            raise wrong_type(self.path(name), "an array", value)
        if len(value) > max_items:
            raise out_of_range(self.path(name), f"an array of at most {max_items} items", len(value))
        return value

    def strings(self, name: str, *, max_items: int, max_length: int | None = None) -> tuple[str, ...]:
        items = self.items(name, max_items=max_items) or []
        return tuple(
            check_string(item, f"{self.path(name)}[{i}]", max_length=max_length)
            for i, item in enumerate(items)
        )

    def child(self, name: str) -> Fields | None:
        value = self.value(name)
        return None if value is None else Fields(value, self.path(name))


def check_string(value: object, param: str, *, max_length: int | None = None) -> str:
    """`value` if it is a string of Unicode text (JSON lets lone surrogates through; UTF-8 does not)."""
    if not isinstance(value, str):
        raise wrong_type(param, "a string", value)
    if max_length is not None and len(value) > max_length:
        why = f"'{param}' is {len(value)} characters long; the limit is {max_length}."
        raise RequestError(why, param=param, code="string_too_long")
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise RequestError(
                f"'{param}' holds half of a surrogate pair at character {error.start}, which is not text.",
                param=param,
                code="invalid_value",
            ) from error
    return value


def missing(param: str) -> RequestError:
    return RequestError(
        f"Missing required parameter: '{param}'.", param=param, code="missing_required_parameter"
    )


def wrong_type(param: str, expected: str, value: object) -> RequestError:
    shown = "" if isinstance(value, list | dict | None) else f" ({shorten(value)})"
    return RequestError(
        f"'{param}' must be {expected}, not {type_name(value)}{shown}.", param=param, code="invalid_type"
    )


def out_of_range(param: str, expected: str, value: object) -> RequestError:
    return RequestError(
        f"'{param}' must be {expected}; it is {shorten(value)}.", param=param, code="invalid_value"
    )
