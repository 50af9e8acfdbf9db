"""Natural reading of texts: what a person reads aloud, for a whole text and for one that arrives in deltas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.text.natural.markup import plain_text
from mingc.text.natural.reading import read_clause
from mingc.text.spoken import SPEECH_TEXTS, SpeechText, SpokenText, spoken_pieces
from mingc.text.spoken_piece import SpokenPiece

DATA = Path(__file__).parents[1] / "data"
# Readings by a person who did not write the rules: language, kind, text, and all readings that are right.
CASES: list[dict[str, Any]] = [
    json.loads(line) for line in (DATA / "spoken_text.jsonl").read_text(encoding="utf-8").splitlines()
]
TEXTS = [case["text"] for case in CASES] + [
    "10-\n20",
    "Dr. Smith met J. K. Rowling in the U.S. at 5 a.m. on Jan. 5, e.g. for 3.14 hours.",
    "Read https://example.com/a.b?c=1,2. Then write to a.b@mail.example.com, please.",
    "Run ``a `b` c`` now:\n```python\nx = 1. + 2\n```\nand `pip install x`.",
    'a < b, <speak>c <break time="1s"/> d</speak> and [a link](https://a.example/b) or [1] or [two words].',
    "今天是2024-05-01，共1,234.5元。第3-5页（约20%）：https://example.com/页。",
    "Привет, мир. Как дела? 안녕하세요. 반갑습니다. こんにちは。元気ですか。",
    "one two three " * 40,
    "一二三四五六七八九十" * 12,
    "~~~\nx\n~~~\n~5 ~~gone~~ *it* __is__",
]


def plain(text: str) -> str:
    """`text` in lower case without marks; hyphens and dashes separate words."""
    text = re.sub("[-–—/]", " ", text.lower())
    text = " ".join("".join(each for each in text if each.isalnum() or each.isspace()).split())
    return re.sub(r"(?<=[一-鿿〇]) (?=[一-鿿〇])", "", text)


def read(text: str) -> str:
    return " ".join(spoken_pieces(text, 50, "natural"))


def pieces_of(
    parts: Iterable[str], rules: SpeechText = "natural", *, starts_early: bool = True
) -> list[SpokenPiece]:
    live = SpokenText(50, rules, starts_early=starts_early)
    return [piece for part in parts for piece in live.push(part)] + list(live.finish())


def live_pieces(parts: Iterable[str], *, starts_early: bool = True) -> list[str]:
    return [piece.text for piece in pieces_of(parts, starts_early=starts_early)]


def words(pieces: list[str]) -> list[str]:
    return re.findall(r"[一-鿿]|[^\W一-鿿]+", " ".join(pieces))


@pytest.mark.parametrize("kind", sorted({case["kind"] for case in CASES}))
def test_a_text_is_read_as_a_person_reads_it(kind: str) -> None:
    cases = [case for case in CASES if case["kind"] == kind]
    found = [
        (case["text"], plain(read(case["text"])), [plain(each) for each in case["spoken"]]) for case in cases
    ]
    assert not [each for each in found if each[1] not in each[2]]


@st.composite
def deltas(draw: st.DrawFn) -> list[str]:
    """A text of several cases in random deltas."""
    text = draw(st.sampled_from([" ", "\n", "\n\n", "，", ". "])).join(
        draw(st.lists(st.sampled_from(TEXTS), min_size=1, max_size=4))
    )
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=60)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


@given(deltas())
def test_a_live_text_has_the_words_of_the_whole_text(parts: list[str]) -> None:
    pieces = live_pieces(parts)
    assert words(pieces) == words(list(spoken_pieces("".join(parts), 50, "natural")))


def test_a_text_that_arrives_letter_by_letter_has_the_same_pieces() -> None:
    for text in TEXTS:
        assert live_pieces(text) == live_pieces([text])


@pytest.mark.parametrize(
    "text",
    [
        "Привет, мир. Как у вас дела сегодня? Спасибо, хорошо.",
        "안녕하세요. 오늘 날씨가 좋네요.",
        "こんにちは。元気ですか。",
        "今日は良い天気ですね。散歩に行きましょう。",
        "مرحبا بالعالم. كيف حالك اليوم؟",
        "नमस्ते दुनिया। आप कैसे हैं?",
        "Γειά σου Κόσμε, café naïve Über.",
    ],
)
def test_every_letter_of_any_script_is_spoken_with_its_blanks(text: str) -> None:
    assert words([read(text)]) == words([text])


@given(st.text("abZ ,.!?;:'\"\n今天㐀，。！？；：、", max_size=20))
def test_words_without_markup_are_left_as_they_are(text: str) -> None:
    """With and without a character that makes all rules run."""
    assert plain_text(text) == text
    assert plain_text(f"{text}\u200b") == f"{text} "


_DELICATE = (
    "the", "It's", "don’t", "I", "A", "x", "St", "Dr", "vs", "WW", "II", "VI", "Mon", "etc", "min", "No", "Mr", "Ph",
    "chapter", "well-known", "Mon-Fri",
)  # fmt: skip


@pytest.mark.parametrize("first", ["the", "King", "part"])
def test_words_are_read_as_by_all_rules(first: str) -> None:
    """With and without a sign before them, for which all rules run."""
    for second, third, mark in product(_DELICATE, _DELICATE, ("", ".", ",")):
        text = f"{first} {second} {third}{mark}"
        assert read_clause(f"¥ {text}", "en") == (f"yen {read_clause(text, 'en')[0]}", "en")


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("0", "zero"),
        ("½", "one half"),
        ("Line one\nLine two", "Line one. Line two"),
        ("第一行\n第二行", "第一行。第二行"),
        ("Before.\n```python\nprint(1)\n```\nAfter.", "Before. After."),
        ("An open block:\n```\nx = 1", "An open block:"),
        ("if a < b then", "if a is less than b then"),
        ("a<b and c>d", "a is less than b and c is greater than d"),
        ("Use the <name> field", "Use the name field"),
        ("Then a - b = c", "Then a minus b equals c"),
        ("Read chapter XC", "Read chapter ninety"),
        ("10-\n20", "ten. twenty"),
    ],
)
def test_pauses_code_and_tags(text: str, spoken: str) -> None:
    assert read(text) == spoken


@pytest.mark.parametrize(
    ("text", "spoken"),
    [
        ("Qwen2.5 and USB3.0", "Qwen two point five and USB three point zero"),
        ("Q4'23", "Q four twenty three"),
        ("Rated 4.5/5 stars.", "Rated four point five out of five stars"),
        ("Blood pressure is 120/80.", "Blood pressure is one twenty over eighty"),
        ("$5/kg, 100 tokens/s, 3 meals/day",
         "five dollars per kilogram one hundred tokens per second three meals per day"),
        ("$50k-$60k", "fifty thousand dollars to sixty thousand dollars"),
        ("30 min. by bus, the min. age", "thirty minutes by bus the minimum age"),
        ("Wait 30s. In the 30s.", "Wait thirty seconds In the thirties"),
        ("1980s-1990s", "nineteen eighties to nineteen nineties"),
        ("y = 2x + 1 and 3x faster", "y equals two x plus one and three times faster"),
        ("f = 3x - 1, b² - 4ac", "f equals three x minus one b squared minus four ac"),
        ("5 x 4 = 20, 4 x 6 inches", "five times four equals twenty four by six inches"),
        (".NET and .env", "dot NET and dot env"),
        ("A 401(k) of Malcolm X", "A four oh one k of Malcolm X"),
        ("3:45.2 and NO.1", "three forty five point two and number one"),
        ("us$5, yr$60, -$3", "us five dollars yr sixty dollars minus three dollars"),
        ("12 Aprıl 2024, ſep 1st", "twelve Aprıl twenty twenty four ſep first"),
        ("4111 1111 1111 1111", "four" + " one" * 15),
        ("Call 020 7946 0958", "Call zero two zero seven nine four six zero nine five eight"),
        ("2点30分开会，2.5点", "两点三十分开会二点五点"),
        ("打85折或8折", "打八五折或八折"),
        ("110报警，120急救，或119。911事件", "幺幺零报警幺二零急救或幺幺九九幺幺事件"),
        ("第3.1节，第12章，图3-1", "第三点一节第十二章图三杠一"),
        ("血压120/80，4.5/5分", "血压一百二十八十五分之四点五分"),
        ("3·15晚会，9·18事变", "三一五晚会九一八事变"),
        ("电话021-5555 8888", "电话零二幺五五五五八八八八"),
        ("身高1米75，1米75厘米", "身高一米七五一米七十五厘米"),
        ("8080端口，404错误", "八零八零端口四零四错误"),
        ("好的。-20℃。120m²。30min。", "好的零下二十摄氏度一百二十平方米三十分钟"),
    ],
)  # fmt: skip
def test_notations_of_frequent_texts(text: str, spoken: str) -> None:
    assert plain(read(text)) == plain(spoken)


@pytest.mark.parametrize("text", ["***", "🎉", "```\nx\n```", "<break/>", " \n"])
def test_a_text_without_words_has_no_piece(text: str) -> None:
    assert list(spoken_pieces(text, 50, "natural")) == []


@pytest.mark.parametrize("text", ["字" * 200, "word " * 200, "7" * 3_000, "a." * 3_000])
def test_no_piece_is_longer_than_the_limit(text: str) -> None:
    assert all(len(words([piece])) <= 30 for piece in spoken_pieces(text, 30, "natural"))


@pytest.mark.parametrize(
    "text",
    [
        each * (32_768 // len(each))
        for each in ("7", "1:", ".", "<", "[`", "1-", "$1 ", "\n", "a.", "1/", "(555) ", "@a.")
    ],
)
def test_hostile_texts_are_read_in_parts(text: str) -> None:
    """Patterns see a bounded part of the text; with unbounded ones this takes hours."""
    assert all(spoken_pieces(text, 50, "natural"))


def test_speech_begins_with_the_first_clause_of_four_units() -> None:
    live = SpokenText(50, "natural")
    first, rest = "Well, let me think about it,", " and then, after all of that, talk "
    assert list(live.push(first + rest[:5])) == [(first, len(first))]
    assert list(live.push(rest[5:])) == [], "only the first segment ends with a clause"
    assert list(live.finish()) == [(rest.strip(), len(first + rest))]


@pytest.mark.parametrize("after", ["就好", "3点", "，，", "”他说"])
def test_a_chinese_clause_ends_with_its_comma_whatever_follows(after: str) -> None:
    first = "如果改到周四，"
    assert pieces_of([first + after + "。"])[0] == (first, len(first))
    assert list(SpokenText(50, "natural").push(first)) == [(first, len(first))], "no token is waited for"


@pytest.mark.parametrize("after", [" he went", " 20 of us", ",, so", "and", '" he said', "** yes"])
def test_a_clause_of_plain_words_ends_with_its_comma_whatever_follows(after: str) -> None:
    first = "Well, as he's a well-known cook,"
    assert pieces_of([first + after + "."])[0] == (first, len(first))
    assert list(SpokenText(50, "natural").push(first)) == [(first, len(first))], "no token is waited for"


@pytest.mark.parametrize(
    "begun",
    [
        "一共有一千零1，",
        "He came here in January,",
        "It was on a Tuesday in Sept,",
        "They met him on 24 June,",
        "It is the 2nd of the rooms,",
        "They chose the plan A,",
        'She said "come with us,',
        "See https://a.example/of/b,",
        "Call the `function f,",
        "The **best of them,",
    ],
)
def test_a_comma_waits_where_a_number_or_markup_may_go_on(begun: str) -> None:
    assert not list(SpokenText(50, "natural").push(begun))


@given(deltas(), st.sampled_from(SPEECH_TEXTS), st.sampled_from(["", "<think>Well.\n Hm.</think>\n\n"]))
def test_pieces_say_where_they_end_in_the_text(parts: list[str], rules: SpeechText, thought: str) -> None:
    text = thought + "".join(parts)
    pieces = pieces_of([*thought, *parts], rules)
    assert rules == "reference" or pieces == pieces_of([text]), "wherever the text is cut"
    ends = [piece.end for piece in pieces]
    assert None not in ends and ends == sorted(ends, key=lambda end: end or 0)
    assert not list(spoken_pieces(text[ends[-1] or 0 :], 50, rules)), "what is left has nothing to say"
    assert len(thought) < (ends[0] or 0)
    assert "Hm" not in live_pieces([text])[0]


def test_a_piece_says_its_part_of_the_text() -> None:
    """Every part is read alone as it is read within the text, also its numbers and markup."""
    for text in (*TEXTS, *(f"He said it. {text}\n\nSo did she." for text in TEXTS)):
        start = 0
        for piece in pieces_of([text]):
            part = text[start : piece.end]
            assert words([read(part)]) == words([piece.text]), part
            start = piece.end or 0
        assert not text[start:].strip() or not read(text[start:]), text


@pytest.mark.parametrize("tail", [" 🎉", "\n```\ncode\n```", " \n\n "])
def test_the_last_piece_ends_with_what_is_not_spoken_behind_it(tail: str) -> None:
    assert pieces_of(["Hi there." + tail])[-1].end == len("Hi there." + tail)


def test_parts_of_a_clause_that_is_too_long_end_between_its_words() -> None:
    """Such as a number whose words are more than a segment holds: their places are estimates."""
    text = "The number " + "7" * 30 + " and the code " + "8" * 30 + " are both long."
    first, last = pieces_of([text])
    assert text[: first.end].endswith((" and ", " the ", " code "))
    assert last.end == len(text)


@pytest.mark.parametrize("starts_early", [True, False])
def test_pieces_do_not_depend_on_where_the_text_is_cut(starts_early: bool) -> None:
    text = "Well now, this is a rather long sentence, which ends at 3 pm. 还有一句话，说的是别的事。 Let us hear $5.20!"
    whole = list(spoken_pieces(text, 50, "natural"))

    def pieces(*parts: str) -> list[str]:
        return live_pieces(parts, starts_early=starts_early)

    assert (pieces(text) == whole) is not starts_early, "only then the first clause is a piece"
    assert pieces(*text) == pieces(text)
    for cut in range(len(text)):
        assert pieces(text[:cut], text[cut:]) == pieces(text)
