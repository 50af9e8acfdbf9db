"""Convert frozen dataclasses to JSON and back; the error about an unknown key names the nearest known key."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Literal, TypeVar, Union

from mingc.errors import ManifestError

T = TypeVar("T")


def encode(value: Any) -> Any:
    """`value` as JSON types: dataclasses become objects, tuples become lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): encode(item) for key, item in value.items()}
    return value


def decode(kind: type[T], value: Any, where: str = "$") -> T:
    """The JSON `value` as an instance of `kind`.

    Raises: ManifestError naming the path when the value has another shape.
    """
    result: T = _decode(kind, value, where)
    return result


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(kind)
    if origin in (Union, types.UnionType):
        return _decode_union(kind, value, where)
    if origin is Literal:
        if value not in typing.get_args(kind):
            raise ManifestError(f"{value!r} is not one of {list(typing.get_args(kind))}", where=where)
        return value
    if origin is tuple:
        return _decode_tuple(typing.get_args(kind), value, where)
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise ManifestError(f"expected an object, found {type(value).__name__}", where=where)
        item = typing.get_args(kind)[1]
        return {key: _decode(item, each, f"{where}.{key}") for key, each in value.items()}
    if dataclasses.is_dataclass(kind):
        return _decode_dataclass(kind, value, where)
    if kind is Any:
        _check_finite(value, where)
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ManifestError(
                "expected a finite number, found an integer too large for a float", where=where
            ) from None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ManifestError(f"expected {kind.__name__}, found {value!r}", where=where)
    if isinstance(value, float) and not math.isfinite(value):
        raise ManifestError(f"expected a finite number, found {value!r}", where=where)
    return value


def _check_finite(value: Any, where: str) -> None:
    """Raise ManifestError when the JSON `value` holds NaN or an infinity anywhere."""
    if isinstance(value, float) and not math.isfinite(value):
        raise ManifestError(f"expected a finite number, found {value!r}", where=where)
    if isinstance(value, dict):
        for key, item in value.items():
            _check_finite(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_finite(item, f"{where}[{index}]")


def _decode_union(kind: Any, value: Any, where: str) -> Any:
    options = typing.get_args(kind)
    if value is None and types.NoneType in options:
        return None
    first: ManifestError | None = None
    for option in options:
        if option is types.NoneType:
            continue
        try:
            return _decode(option, value, where)
        except ManifestError as error:
            first = first or error
    assert first is not None
    raise first


def _decode_tuple(args: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ManifestError(f"expected a list, found {type(value).__name__}", where=where)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_decode(args[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if len(args) != len(value):
        raise ManifestError(f"expected {len(args)} items, found {len(value)}", where=where)
    return tuple(
        _decode(arg, item, f"{where}[{i}]") for i, (arg, item) in enumerate(zip(args, value, strict=True))
    )


@cache
def _type_hints(kind: Any) -> dict[str, Any]:
    """Cached, because evaluating annotations takes longer than decoding a document."""
    return typing.get_type_hints(kind)


def _decode_dataclass(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ManifestError(f"expected an object, found {type(value).__name__}", where=where)
    hints = _type_hints(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise ManifestError(f"unknown key {key!r}{hint}", where=where)
    arguments = {}
    for name, field in fields.items():
        if name in value:
            arguments[name] = _decode(hints[name], value[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise ManifestError(f"key {name!r} is missing", where=where)
    return kind(**arguments)
