"""The text that a picture shall show, and its ids, as the official code reads them (tables of imagegen.json)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mingc.prompts.glyph import GlyphTokenizer, glyph_text

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "imagegen" / "imagegen.json").read_text("utf-8"))
TOKENS = GOLDEN["byt5_tokenizer"]
ADDED = sorted(TOKENS["added"], key=TOKENS["added"].get)


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        *((each["prompt"], each["text"]) for each in GOLDEN["glyph_text"]),
        *((each["prompt"], each["glyph_text"]) for each in GOLDEN["condition"].values() if "prompt" in each),
        # By hand: imagegen.md §2.1 weighs U+4E00 and U+9FFF as ideographs, and looks for the first word and the first
        # quote mark.
        ("'一鿿一鿿一鿿一'", ""),
        ("'あいうえおかきくけこさしすせそたちつて'", 'Text "あいうえおかきくけこさしすせそたちつて". '),
        ("say “x”, do not delete", 'Text "x". '),
        ("Erased: 'x'", ""),
    ],
)
def test_the_last_quotation_by_kind_is_shown(prompt: str, text: str) -> None:
    assert glyph_text(prompt) == text


@pytest.mark.parametrize("case", TOKENS["cases"], ids=lambda case: case["text"][:20])
def test_texts_have_the_recorded_ids(case: dict[str, object]) -> None:
    ids = case["ids"]
    assert isinstance(ids, list)
    assert min(TOKENS["added"].values()) == 384 and max(TOKENS["added"].values()) == TOKENS["length"] - 1
    found = GlyphTokenizer(ADDED, 64).encode(str(case["text"]))
    assert found.dtype == "int64" and found.tolist() == ids + [0] * (64 - len(ids))


def test_a_text_that_is_too_long_keeps_its_beginning_and_ends() -> None:
    tokenizer = GlyphTokenizer(ADDED, 5)
    assert tokenizer.encode("abcd").tolist() == [100, 101, 102, 103, 1]
    assert tokenizer.encode("abcdefgh").tolist() == [100, 101, 102, 103, 1]
