"""Malformed golden documents are refused with the file and the path inside it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.golden_files import read_document, read_tensors
from mingc.errors import ConfigError

DATA = Path(__file__).parents[2] / "data"
NAMES = ["preprocess.json", "talker.json", "text.json"]


@pytest.mark.parametrize("name", NAMES)
def test_the_golden_set_is_valid(name: str) -> None:
    assert read_document(DATA / name) == json.loads((DATA / name).read_text(encoding="utf-8"))


def drop(*path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        del document[path[-1]]

    return change


def put(value: Any, *path: Any) -> Callable[[Any], None]:
    def change(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return change


CHAT = ("processor_template", "image")


@pytest.mark.parametrize(
    "name, change, problem",
    [
        ("text.json", put(3, "cases", 2), "$.cases[2] is 3, expected an object"),
        ("text.json", drop("cases", 2, "talker_tn"), "$.cases[2].talker_tn is missing"),
        ("text.json", put("50", "segmentation", 0, "max_semantic_length"), "'50', expected int"),
        ("text.json", put(True, "end_to_end", 0, "max_length"), "True, expected int"),
        ("text.json", put([1], "segmentation", 0, "fragments"), "fragments[0] is 1, expected str"),
        ("text.json", put(3, "segmentation", 0, "fragments"), "fragments is 3, expected a list"),
        ("talker.json", put([], "plain"), "$.plain is a list, expected an object"),
        ("talker.json", put("two", "clone", "spk_emb"), "$.clone is an object"),
        ("preprocess.json", put([[1, 2]], *CHAT, "image_grid_thw"), "as many in each"),
        ("preprocess.json", put([[1], [2, 3]], *CHAT, "position_ids"), "as many in each"),
        ("preprocess.json", put([-1], *CHAT, "input_ids"), "expected a list of integers"),
        ("preprocess.json", put("TOOL", *CHAT, "messages", 0, "role"), "expected 'HUMAN' or 'ASSISTANT'"),
        (
            "preprocess.json",
            put({"type": "image", "image": "some"}, *CHAT, "messages", 0, "content", 0),
            "content[0]",
        ),
        (
            "preprocess.json",
            put([[1, None]], "video", "timestamps_per_temporal_patch"),
            "null, expected float",
        ),
    ],
)
def test_another_form_is_reported_with_its_place(
    name: str, change: Callable[[Any], None], problem: str, tmp_path: Path
) -> None:
    document = json.loads((DATA / name).read_text(encoding="utf-8"))
    change(document)
    path = tmp_path / name
    path.write_text(json.dumps(document), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    assert str(path) in caught.value.message and problem in caught.value.message
    assert caught.value.where == "--reference"


@pytest.mark.parametrize(
    ("read", "content"),
    [
        (read_tensors, b"no tensors"),
        (read_document, b"{"),
        (read_document, b"[]"),
        (read_document, b"[" * 100_000),
    ],
)
def test_an_unreadable_file_is_reported(
    read: Callable[[Path], object], content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "text.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"text\.json cannot be read") as caught:
        read(path)
    assert caught.value.where == "--reference"
