"""Dataclasses to JSON and back; what is wrong is named with its path."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.artifacts.codec import decode, encode
from mingc.errors import ManifestError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    size: int
    share: float = 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str
    kind: Literal["a", "b"]
    shape: tuple[int | str, ...]
    pair: tuple[int, str]
    inner: Inner | None = None
    table: dict[str, Inner] = field(default_factory=dict)
    mapping: Mapping[str, int] = field(default_factory=dict)
    is_on: bool = False


def whole() -> dict[str, Any]:
    return {
        "name": "x",
        "kind": "a",
        "shape": ["T", 4],
        "pair": [1, "y"],
        "inner": {"size": 3, "share": 1},
        "table": {"k": {"size": 1}},
        "mapping": {"m": 2},
        "is_on": True,
    }


def test_a_document_becomes_the_dataclass_and_the_document_again() -> None:
    value = decode(Outer, whole())
    assert value == Outer(
        name="x",
        kind="a",
        shape=("T", 4),
        pair=(1, "y"),
        inner=Inner(size=3, share=1.0),
        table={"k": Inner(size=1)},
        mapping={"m": 2},
        is_on=True,
    )
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


@given(
    shape=st.lists(st.one_of(st.integers(), st.text()), max_size=4),
    sizes=st.dictionaries(st.text(), st.integers(), max_size=3),
    share=st.floats(allow_nan=False, allow_infinity=False),
)
def test_every_value_survives_the_round_trip(
    shape: list[int | str], sizes: dict[str, int], share: float
) -> None:
    value = Outer(
        name="x",
        kind="b",
        shape=tuple(shape),
        pair=(0, ""),
        inner=Inner(size=0, share=share),
        table={key: Inner(size=size) for key, size in sizes.items()},
    )
    assert decode(Outer, json.loads(json.dumps(encode(value)))) == value


@pytest.mark.parametrize(
    "key, value, says, where",
    [
        ("name", 1, "expected str, found 1", "$.name"),
        ("kind", "c", "'c' is not one of", "$.kind"),
        ("shape", "T", "expected a list", "$.shape"),
        ("shape", ["T", 1.5], "expected int", "$.shape[1]"),
        ("pair", [1], "expected 2 items, found 1", "$.pair"),
        ("pair", [1, "y", "z"], "expected 2 items, found 3", "$.pair"),
        ("inner", {"size": 1, "share": float("nan")}, "expected a finite number", "$.inner.share"),
        ("inner", {"size": True}, "expected int, found True", "$.inner.size"),
        ("inner", {}, "key 'size' is missing", "$.inner"),
        ("inner", {"sise": 1}, "did you mean size?", "$.inner"),
        ("table", {"k": []}, "expected an object", "$.table.k"),
        ("table", [], "expected an object", "$.table"),
        ("mapping", {"m": "2"}, "expected int", "$.mapping.m"),
        ("is_on", 1, "expected bool", "$.is_on"),
        ("nmae", "x", "unknown key 'nmae', did you mean name?", "$"),
        ("zzz", "x", "unknown key 'zzz'", "$"),
    ],
)
def test_what_is_wrong_is_named_with_its_path(key: str, value: Any, says: str, where: str) -> None:
    with pytest.raises(ManifestError) as caught:
        decode(Outer, {**whole(), key: value})
    assert says in caught.value.message
    assert caught.value.where == where


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (float("nan"), "$.k"),
        ({"a": [1.0, {"b": float("inf")}]}, "$.k.a[1].b"),
        ([[0.5], [float("-inf")]], "$.k[1][0]"),
    ],
)
def test_numbers_of_any_value_are_finite_at_every_depth(value: Any, where: str) -> None:
    with pytest.raises(ManifestError, match="expected a finite number") as caught:
        decode(dict[str, Any], {"j": 1.0, "k": value})
    assert caught.value.where == where
    fine = {"k": {"a": [1.0, {"b": None}], "c": "x"}}
    assert decode(dict[str, Any], fine) == fine
