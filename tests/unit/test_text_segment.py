"""Segmentation: the recorded official cases, and properties of every cut."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mingc.text.reference.segment import (
    FragmentState,
    cut_by_length,
    iter_elements,
    iter_fragments,
    iter_speech_segments,
    semantic_length,
)

DATA = Path(__file__).parents[1] / "data"
GOLDEN: dict[str, list[dict[str, Any]]] = json.loads((DATA / "text.json").read_text(encoding="utf-8"))
LONG_CHINESE = "春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少？" * 5


def case_ids(cases: list[dict[str, Any]]) -> list[str]:
    return [f"{index}-{case['text'][:16]}" for index, case in enumerate(cases)]


@pytest.mark.parametrize("case", GOLDEN["segmentation"], ids=case_ids(GOLDEN["segmentation"]))
def test_length_cut_matches_the_recorded_case(case: dict[str, Any]) -> None:
    assert cut_by_length(case["text"], case["max_semantic_length"]) == case["fragments"]


@pytest.mark.parametrize("case", GOLDEN["end_to_end"], ids=case_ids(GOLDEN["end_to_end"]))
def test_strings_for_the_acoustic_model_match(case: dict[str, Any]) -> None:
    expected = [call["text"] for call in case["synthesis_calls"]]
    assert list(iter_speech_segments(case.get("chunks", case["text"]), case["max_length"])) == expected


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=case_ids(GOLDEN["cases"]))
def test_elements_and_length_match(case: dict[str, Any]) -> None:
    assert list(iter_elements([case["text"]])) == case["tokenize_mixed_text"]
    assert semantic_length(case["text"]) == case["semantic_length"]


def test_a_later_fragment_needs_fewer_elements() -> None:
    first, later = "一二三四五六七八九十十二，", "一二三四五六七八，"
    assert list(iter_fragments(first + later + later)) == [first, later, later]
    assert list(iter_fragments(later + later)) == [later + later]


def test_a_dot_after_a_digit_does_not_cut() -> None:
    assert list(iter_fragments("value of pi is 3.14159 indeed.")) == ["value of pi is 3.14159 indeed."]


def test_words_count_as_one_element_in_deltas() -> None:
    text = "One two three four five. Six seven."
    assert len(list(iter_fragments(text))) == 1 + 1
    assert list(iter_fragments(["One two three, ", "four five."])) == ["One two three, four five."]


def test_segments_leave_while_deltas_arrive() -> None:
    read: list[str] = []

    def deltas() -> Iterator[str]:
        for delta in ("今天的天气真的非常好，", "我们一起出去走走吧。", "好不好？"):
            read.append(delta)
            yield delta

    segments = iter_speech_segments(deltas())
    assert next(segments) == "今天的天气真的非常好，我们一起出去走走吧。"
    assert len(read) == 2
    assert list(segments) == ["好不好?"]


def test_no_fragment_is_longer_than_the_limit_and_no_character_is_lost() -> None:
    alphabet = "中文字符春夏秋冬ab cd，。！？；,.!?\n"
    generator = random.Random(7)
    for _ in range(300):
        text = "".join(generator.choice(alphabet) for _ in range(generator.randint(1, 120)))
        limit = generator.randint(5, 30)
        fragments = cut_by_length(text, limit)
        assert all(semantic_length(fragment) <= limit for fragment in fragments)
        if len(fragments) > 1:
            spoken = [c for c in text if c.isalnum()]
            assert [c for fragment in fragments for c in fragment if c.isalnum()] == spoken


def test_dot_placeholders_are_replaced() -> None:
    digits = "圆周率约为3.14159而自然常数约为2.71828黄金分割约为1.618" * 3
    fragments = cut_by_length(digits, 10)
    assert "".join(fragments).removesuffix("。") == digits


@pytest.mark.parametrize(
    ("text", "limit", "fragments"),
    [
        # a text without a mark at its end gets one
        ("一二三四五六七八", 5, ["一二三四五", "六七八。"]),
        ("一二三四五六七八！", 5, ["一二三四五", "六七八！"]),
        # a clause of up to 4 joins the next one, if both fit
        ("一二，三四五六七八，九十一二三四", 12, ["一二，三四五六七八，", "九十一二三四。"]),
        ("一二三四五，六七八九十，一二三四五。", 10, ["一二三四五，六七八九十，", "一二三四五。"]),
        ("一二三四五，六七八九十，一二三四五。", 9, ["一二三四五，", "六七八九十，", "一二三四五。"]),
        # marks of a text that is cut become wide; English sentences of a fragment have a space between them
        (
            "One two three. Four five six. Seven eight nine.",
            8,
            ["One two three。", "Four five six。", "Seven eight nine。"],
        ),
        (
            "一二三四五六七八九十。One two three four five. Six seven eight nine ten.",
            10,
            ["一二三四五六七八九十。", "One two three four five。 Six seven eight nine ten。"],
        ),
        # a tail of up to 4 behind a sentence is a fragment of its own
        (
            "一二三四五六七八九十。一二三四五六。七八九十。",
            10,
            ["一二三四五六七八九十。", "一二三四五六。", "七八九十。"],
        ),
        (
            "一二三四五六七八九十。一二三四。五六七八九。",
            10,
            ["一二三四五六七八九十。", "一二三四。五六七八九。"],
        ),
    ],
)
def test_where_a_text_is_cut(text: str, limit: int, fragments: list[str]) -> None:
    assert cut_by_length(text, limit) == fragments


def test_fragments_of_marks_alone_are_dropped() -> None:
    assert list(iter_speech_segments("!" * 13 + "你好")) == ["你好"]
    assert list(iter_speech_segments("...")) == []


def test_long_texts_are_cut_at_clauses() -> None:
    fragments = cut_by_length(LONG_CHINESE, 50)
    assert "".join(fragments) == LONG_CHINESE
    assert all(fragment.endswith(("，", "。", "？")) for fragment in fragments)


def test_a_limit_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        list(iter_speech_segments("你好", 0))


def test_a_fragment_that_normalises_to_nothing_is_skipped() -> None:
    text = "Hello there, how are you doing today my good old friends? http://a.b/ is what I saw."
    assert [each for each in iter_fragments(text)][1] == " http://a."
    assert list(iter_speech_segments(text)) == [
        "Hello there, how are you doing today my good old friends?",
        "b/ is what I saw.",
    ]


# Number patterns take quadratic or cubic time.
@pytest.mark.parametrize("text", ["7" * 32_768, "中" + "1:" * 16_000, "中" + "7" * 32_767, "." * 32_767])
def test_a_very_long_text_without_breaks_is_normalised_in_pieces(text: str) -> None:
    assert all(iter_speech_segments(text + "a"))


def test_long_fragments_without_marks_are_cut_at_spaces() -> None:
    pieces = list(iter_speech_segments("1 " * 1_000))
    assert " ".join(pieces) == " ".join(["one"] * 1_000)


def test_a_fragment_continues_in_chinese_and_the_next_one_does_not() -> None:
    """A cut inside a Chinese fragment keeps its language; sentences behind that fragment have their own."""
    text = " 12! We count 15 apples in the big box today."
    state = FragmentState(num_elements=30, has_chinese=True, has_spoken=True)
    first, *later = list(iter_speech_segments(text, state=state))
    assert "十二" in first
    assert later and "fifteen" in " ".join(later) and "十五" not in " ".join(later)
    assert "twelve" in next(iter_speech_segments(text))
