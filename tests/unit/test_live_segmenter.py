"""Live segmenter: when segments leave, their length, and completeness of the text."""

from __future__ import annotations

import itertools
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from spoken_numbers import texts

from mingc.text.reference import live
from mingc.text.reference.live import LiveSegment, LiveSegmenter
from mingc.text.reference.segment import iter_speech_segments

DATA = Path(__file__).parents[1] / "data"
TOKEN = re.compile(r" ?[A-Za-z]{1,6}|\d|\s|.", re.DOTALL)


class Segmenter:
    """A live segmenter whose results are the stripped texts of its segments."""

    def __init__(self, **options: int) -> None:
        self._segmenter = LiveSegmenter(**options)

    def push(self, delta: str) -> list[str]:
        return stripped(self._segmenter.push(delta))

    def flush(self) -> list[str]:
        return stripped(self._segmenter.flush())


def stripped(segments: list[LiveSegment]) -> list[str]:
    return [segment.text.strip() for segment in segments]


def stream(text: str) -> list[LiveSegment]:
    """Segments of `text` that arrives token by token."""
    segmenter = LiveSegmenter()
    return [segment for token in TOKEN.findall(text) for segment in segmenter.push(token)] + segmenter.flush()


def words(segments: list[str]) -> list[str]:
    return re.findall(r"[A-Za-z]+|[^\W_]", " ".join(segments))


def count_units(text: str) -> int:
    """Ideographs and words of the texts below."""
    return len(re.findall(r"[一-鿿]|[A-Za-z0-9]+", text))


def test_a_chinese_sentence_leaves_at_its_end() -> None:
    segmenter = Segmenter()
    assert segmenter.push("今天天气很好") == []
    assert segmenter.push("我们走吧。") == ["今天天气很好我们走吧。"]
    assert segmenter.flush() == []


def test_a_short_sentence_waits_for_more() -> None:
    segmenter = Segmenter()
    assert segmenter.push("好的。") == []
    assert segmenter.push("我马上就来了。") == ["好的。我马上就来了。"]
    assert segmenter.push("好。") == []


def test_the_first_segment_ends_with_the_first_clause_that_is_long_enough() -> None:
    """Without any wait, as soon as more text follows; only the first one does."""
    segmenter = Segmenter()
    assert segmenter.push("Well, let me think,") == [], "a digit may follow the mark"
    assert segmenter.push(" and ") == ["Well, let me think,"]
    assert segmenter.push("talk about that, for ") == []
    chinese = Segmenter()
    assert chinese.push("你好呀，我") == [], "three units"
    assert chinese.push("的朋友，今") == ["你好呀，我的朋友，"]
    assert Segmenter().push("let me think about that for a") == [], "no clause"


def test_the_first_segment_does_not_depend_on_the_size_of_the_deltas() -> None:
    text = "Yes, of course I can. The tide was low, and so on. We walked along the beach, and sat down."
    assert Segmenter().push(text)[0] == stream(text)[0].text.strip() == "Yes, of course I can."


def test_a_word_that_may_grow_is_not_cut() -> None:
    segmenter = Segmenter()
    assert segmenter.push("This is a very, very beauti") == ["This is a very,"]
    segmenter.push("ful day")
    assert segmenter.flush() == ["very beautiful day"]


@pytest.mark.parametrize(
    "text",
    [
        "Our new budget is 1,000,000.25 dollars",
        "All of it together costs $1,299.00 only",
        "So my dear friend, 3 of them",
        "Please look at the page https://local/index",
        "They all said yes,no,perhaps",
        "这个数字大约占3/4",
        "他的电话是：138-1234-5678",
        "序列号写在这里，AB12",
        "比分是很好的１：０",
        "他们说了 $5，还有",
    ],
)
def test_no_cut_is_beside_a_digit_or_inside_its_context(text: str) -> None:
    segmenter = Segmenter()
    for character in text:
        assert segmenter.push(character) == []
    assert segmenter.flush() == [text]


def test_numbers_after_a_cut_keep_the_language_of_their_fragment() -> None:
    segmenter = LiveSegmenter()
    (first,) = segmenter.push("今天天气很好。")
    segmenter.push("3 apples")
    (rest,) = segmenter.flush()
    spoken = [piece for each in (first, rest) for piece in iter_speech_segments(each.text, state=each.state)]
    assert spoken == ["今天天气很好。", "三 apples"]
    assert words(spoken) == words(list(iter_speech_segments("今天天气很好。3 apples")))


@cache
def spoken_words(text: str) -> list[str]:
    return words(list(iter_speech_segments(text)))


@cache
def spoken_pieces(segment: LiveSegment) -> list[str]:
    return list(iter_speech_segments(segment.text, state=segment.state))


@cache
def golden_texts() -> list[str]:
    document = json.loads((DATA / "text.json").read_text(encoding="utf-8"))
    return sorted(
        {case["text"] for kind in ("cases", "segmentation", "end_to_end") for case in document[kind]}
    )


def test_cuts_do_not_change_the_spoken_words() -> None:
    num_early = 0
    for text in [*golden_texts(), *texts(150, seed=3)]:
        segments = stream(text)
        spoken = [piece for each in segments for piece in spoken_pieces(each)]
        assert words(spoken) == spoken_words(text), text
        assert "".join(each.text for each in segments).strip() == text.strip()
        num_early += len(segments) > 1
    assert num_early > 100, "most texts have several segments"


def test_long_texts_without_marks_are_not_cut_beside_numbers() -> None:
    text = (
        "我们一共有三十个人都来到了这里参加这个非常重要的年度会议并且每人都得到了" * 2
        + "1234567元奖金"
        + "大家都很高兴地回家去了" * 6
    )
    segmenter = LiveSegmenter()
    segments = [each for character in text for each in segmenter.push(character)] + segmenter.flush()
    assert len(segments) > 2 and any("1234567元" in each.text for each in segments)
    assert all(count_units(each.text) <= 40 for each in segments)


@pytest.mark.parametrize("num_before", [36, 37, 38, 39])
@pytest.mark.parametrize("number", ["12 kilograms", "1200", "3 千克"])
def test_a_limit_beside_a_number_cuts_before_its_context(num_before: int, number: str) -> None:
    """The limit of 40 words falls on the number or just behind it, and there is no mark."""
    text = " ".join([*["word"] * num_before, number, *["more"] * 30])
    segmenter = LiveSegmenter()
    segments = [each.text for character in text for each in segmenter.push(character)]
    segments += [each.text for each in segmenter.flush()]
    assert len(segments) > 1 and "".join(segments) == text
    for before, after in itertools.pairwise(segments):
        assert not re.search(r"\d", before[-8:] + after[:8]), (before, after)
        assert count_units(before) <= 40


def test_a_decimal_point_at_the_end_waits() -> None:
    segmenter = Segmenter()
    assert segmenter.push("the value of pi is close to 3.") == []
    assert segmenter.push("14 they say.") == ["the value of pi is close to 3.14 they say."]


def test_a_sentence_inside_a_delta_is_found() -> None:
    segmenter = Segmenter()
    assert segmenter.push("one two three four five six seven eight. Ni") == [
        "one two three four five six seven eight."
    ]
    assert segmenter.push("ne ten") == []
    assert segmenter.flush() == ["Nine ten"]


def test_abbreviations_and_addresses_do_not_end_a_sentence() -> None:
    segmenter = Segmenter()
    assert segmenter.push("we all went to see our old friend Dr. ") == []
    assert segmenter.push("Wu and example.com") == []


def test_no_segment_is_longer_than_the_bound() -> None:
    segmenter = Segmenter()
    segments = segmenter.push("字" * 100)
    assert [len(segment) for segment in segments] == [40, 40]
    assert segmenter.flush() == ["字" * 20]
    words = " ".join(f"w{index}" for index in range(90))
    segments = segmenter.push(words)
    assert [count_units(segment) for segment in segments] == [40, 40]
    assert " ".join(segments + segmenter.flush()) == words


def test_a_long_sentence_is_cut_at_a_clause() -> None:
    segmenter = Segmenter()
    first, clause = "字字字字。", "字" * 29 + "，"
    assert segmenter.push(first + clause + "词" * 20) == [first, clause]


WORDS = "zero one two three four five six seven"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        # marks and closing quotes belong to their sentence
        (f"{WORDS} eight; nine", f"{WORDS} eight;"),
        (f"{WORDS} eight?! Nine", f"{WORDS} eight?!"),
        (f"{WORDS} eight... Nine", f"{WORDS} eight..."),
        (f'{WORDS} "eight." Nine', f'{WORDS} "eight."'),
        (f"{WORDS} (eight.) Nine", f"{WORDS} (eight.)"),
        (f"{WORDS} eight!」Nine", f"{WORDS} eight!」"),
        # a dot ends a sentence in front of a space, a mark and other scripts, not inside of a word
        (f"{WORDS} eight.—nine", f"{WORDS} eight."),
        (f"{WORDS} eight.然后", f"{WORDS} eight."),
        (f"{WORDS} eight.nine ten. Eleven", f"{WORDS} eight.nine ten."),
        # abbreviations: two initials, or a title of two letters
        (f"{WORDS} U.S. army. Nine", f"{WORDS} U.S. army."),
        (f"{WORDS} e.g. nine. Ten", f"{WORDS} e.g. nine."),
        (f"{WORDS} Mr. Smith. Nine", f"{WORDS} Mr. Smith."),
        (f"{WORDS} McDr. Smith. Nine", f"{WORDS} McDr. Smith."),
        ("Mr. Smith and all of his many old friends. Nine", "Mr. Smith and all of his many old friends."),
        (
            "U.S. soldiers and all of their many old friends. Nine",
            "U.S. soldiers and all of their many old friends.",
        ),
        (f"{WORDS} usr. Nine ten. Eleven", f"{WORDS} usr."),
        # a link goes on behind an ASCII mark, and ends in front of a Chinese one
        (f"{WORDS} https://a.example/b。然后我们走吧", f"{WORDS} https://a.example/b。"),
        (f"{WORDS} https://a.example/b.c ten. Eleven", f"{WORDS} https://a.example/b.c ten."),
        # the limit of 40 takes the marks behind it, and a clause end in front of it if there is one
        ("字" * 40 + "——好", "字" * 40),
        ("字" * 40 + "。好", "字" * 40 + "。"),
        ("字" * 20 + "，" + "字" * 15 + "：" + "字" * 20, "字" * 20 + "，"),
        ("字" * 20 + "，5" + "字" * 30, "字" * 20 + "，5" + "字" * 19),
    ],
)
def test_where_a_first_segment_ends(text: str, first: str) -> None:
    segments = Segmenter().push(text)
    assert segments[:1] == [first]


def test_one_push_may_give_several_segments() -> None:
    segmenter = Segmenter()
    sentence = "这是一个足够长的完整句子。"
    assert "".join(segmenter.push(sentence * 6) + segmenter.flush()) == sentence * 6


def test_flush_gives_the_rest_once() -> None:
    segmenter = Segmenter()
    segmenter.push("再见 ")
    assert segmenter.flush() == ["再见"]
    assert segmenter.flush() == []
    segmenter.push(" \n")
    assert segmenter.flush() == []


def test_no_text_is_lost_or_repeated_at_any_split() -> None:
    text = (
        "今天我们来聊聊人工智能，它的历史很长。It began in 1956, at a workshop in the U.S. and "
        "went on for e.g. 60 years! 价格是3.14元；“走吧！”他说。Visit example.com now. 一二三四五六七八九十"
        * 3
    )
    for seed in range(60):
        generator = random.Random(seed)
        segmenter = Segmenter()
        segments: list[str] = []
        start = 0
        while start < len(text):
            end = start + generator.randint(1, 12)
            segments += segmenter.push(text[start:end])
            start = end
        segments += segmenter.flush()
        assert "".join("".join(segments).split()) == "".join(text.split())
        assert all(count_units(segment) <= 40 for segment in segments)
        assert all(count_units(segment) >= 8 for segment in segments[1:-1])


def test_bounds_must_be_in_order() -> None:
    with pytest.raises(ValueError, match="got 4, 50, 40"):
        Segmenter(min_units=50)


@pytest.mark.parametrize(
    "link",
    [
        "https://example.com/some.page",
        "www.example.co.uk",
        "http://docs.example.org/guide/index.html",
        "https://example.com/find?q=a.b&r=next",
        "someone@mail.example.com",
    ],
)
@pytest.mark.parametrize(
    "end", [". The rest of the text goes on behind it, as one would expect.", "。然后继续说下去。"]
)
def test_a_link_that_arrives_letter_by_letter_is_not_cut(link: str, end: str) -> None:
    text = f"Please read the whole description of it under {link}{end}"
    segmenter = LiveSegmenter()
    segments = [each for letter in text for each in segmenter.push(letter)] + segmenter.flush()
    assert "".join(each.text for each in segments) == text
    assert any(link in each.text for each in segments), [each.text for each in segments]
    spoken = [piece for each in segments for piece in iter_speech_segments(each.text, state=each.state)]
    assert words(spoken) == words(list(iter_speech_segments(text)))


def test_a_sentence_ends_behind_a_link_once_more_text_arrives() -> None:
    segmenter = Segmenter()
    assert segmenter.push("Please read the whole description of it under https://example.com.") == []
    assert segmenter.push(" ") == ["Please read the whole description of it under https://example.com."]


def test_links_are_searched_once_for_all_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long word with many dots must not take cubic time."""
    searched = 0

    class Counted:
        def __getattr__(self, name: str) -> Any:
            def call(text: str, *limits: int) -> Any:
                nonlocal searched
                searched += len(text)
                return getattr(pattern, name)(text, *limits)

            return call

    pattern = live._LINK
    monkeypatch.setattr(live, "_LINK", Counted())
    text = "one two three four five six seven " + 200 * "a."
    assert LiveSegmenter().push(text) == []
    assert 0 < searched <= 2 * len(text)


@pytest.mark.parametrize("initials", ["U.S.", "e.g."])
def test_initials_that_arrive_letter_by_letter_are_not_cut(initials: str) -> None:
    text = f"we all went to see our old friend from the {initials} army. Nine"
    segmenter = Segmenter()
    segments = [each for letter in text for each in segmenter.push(letter)] + segmenter.flush()
    assert segments == [text.removesuffix(" Nine"), "Nine"]
