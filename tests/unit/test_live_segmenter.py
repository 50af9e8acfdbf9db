"""Live segmenter: when segments leave, their length, and completeness of the text."""

from __future__ import annotations

import random

import pytest

from mingc.runtime.text.live import LiveSegmenter, count_units


class Clock:
    """A clock that advances only on request."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def move(self, milliseconds: float) -> None:
        self.now_s += milliseconds / 1000.0


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_units_are_characters_and_words() -> None:
    assert count_units("你好，world it's 3.5！") == 5
    assert count_units("—— ！ ...") == 0


def test_a_chinese_sentence_leaves_at_its_end(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("今天天气很好") == []
    assert segmenter.push("，我们走吧。") == ["今天天气很好，我们走吧。"]
    assert segmenter.flush() == []


def test_a_short_sentence_waits_for_more(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("好的。") == []
    assert segmenter.push("我马上就来了。") == ["好的。我马上就来了。"]


def test_the_first_segment_leaves_after_the_wait(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("Well, let me think ") == []
    clock.move(449)
    assert segmenter.tick() == []
    clock.move(2)
    assert segmenter.tick() == ["Well, let me think"]
    assert segmenter.push("about that for ") == []
    clock.move(5000)
    assert segmenter.tick() == [], "only the first segment is hurried"


def test_the_wait_needs_enough_units(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("你好呀") == []
    clock.move(1000)
    assert segmenter.tick() == []
    assert segmenter.push("朋") == ["你好呀朋"]


def test_the_wait_counts_from_the_first_text(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    segmenter.push("  ")
    clock.move(1000)
    assert segmenter.push("你好朋友") == []
    clock.move(450)
    assert segmenter.tick() == ["你好朋友"]


def test_a_word_that_may_grow_is_not_cut(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    segmenter.push("This is a very beauti")
    clock.move(500)
    assert segmenter.tick() == ["This is a very"]
    segmenter.push("ful day")
    assert segmenter.flush() == ["beautiful day"]


def test_a_decimal_point_at_the_end_waits(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("the value of pi is close to 3.") == []
    assert segmenter.push("14 they say.") == ["the value of pi is close to 3.14 they say."]


def test_a_sentence_inside_a_delta_is_found(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("one two three four five six seven eight. Ni") == [
        "one two three four five six seven eight."
    ]
    assert segmenter.push("ne ten") == []
    assert segmenter.flush() == ["Nine ten"]


def test_abbreviations_and_addresses_do_not_end_a_sentence(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    assert segmenter.push("we all went to see our old friend Dr. ") == []
    assert segmenter.push("Wu and example.com") == []


def test_no_segment_is_longer_than_the_bound(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    segments = segmenter.push("字" * 100)
    assert [len(segment) for segment in segments] == [40, 40]
    assert segmenter.flush() == ["字" * 20]
    words = " ".join(f"w{index}" for index in range(90))
    segments = segmenter.push(words)
    assert [count_units(segment) for segment in segments] == [40, 40]
    assert " ".join(segments + segmenter.flush()) == words


def test_a_long_sentence_is_cut_at_a_clause(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    clause = "字" * 29 + "，"
    assert segmenter.push(clause + "词" * 20) == [clause]


def test_one_push_may_give_several_segments(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    sentence = "这是一个足够长的完整句子。"
    assert "".join(segmenter.push(sentence * 6) + segmenter.flush()) == sentence * 6


def test_flush_gives_the_rest_once(clock: Clock) -> None:
    segmenter = LiveSegmenter(clock)
    segmenter.push("再见 ")
    assert segmenter.flush() == ["再见"]
    assert segmenter.flush() == []
    segmenter.push(" \n")
    assert segmenter.flush() == []


def test_no_text_is_lost_or_repeated_at_any_split(clock: Clock) -> None:
    text = (
        "今天我们来聊聊人工智能，它的历史很长。It began in 1956, at a workshop in the U.S. and "
        "went on for e.g. 60 years! 价格是3.14元；“走吧！”他说。Visit example.com now. 一二三四五六七八九十"
        * 3
    )
    for seed in range(60):
        generator = random.Random(seed)
        segmenter = LiveSegmenter(clock)
        segments: list[str] = []
        start = 0
        while start < len(text):
            end = start + generator.randint(1, 12)
            segments += segmenter.push(text[start:end])
            clock.move(generator.choice([0, 20, 300]))
            segments += segmenter.tick()
            start = end
        segments += segmenter.flush()
        assert "".join("".join(segments).split()) == "".join(text.split())
        assert all(count_units(segment) <= 40 for segment in segments)
        assert all(count_units(segment) >= 8 for segment in segments[1:-1])


def test_bounds_must_be_in_order(clock: Clock) -> None:
    with pytest.raises(ValueError, match="got 4, 50, 40"):
        LiveSegmenter(clock, min_units=50)
