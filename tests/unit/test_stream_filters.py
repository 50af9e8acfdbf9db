"""Stream filters: stop strings and thoughts give the same text for any split into deltas."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.text.stream_filters import StopStrings, ThoughtFilter

THOUGHT_CASES = [
    ("Good morning.", "Good morning."),
    ("<think>The user greets me.</think>Good morning.", "Good morning."),
    ("\n <think>\nHm < 3 </ think>?\n</think>\n\nThree.", "\n\nThree."),
    ("<think></think>Yes.", "Yes."),
    ("<think>No end", ""),
    ("<think>Half an end </thi", ""),
    ("<thin", "<thin"),
    ("<thinker> is a word.", "<thinker> is a word."),
    ("The mark <think> opens, </think> closes.", "The mark <think> opens, </think> closes."),
    ("<think>a</think>Then <think>b</think>.", "Then <think>b</think>."),
    ("", ""),
]


def show(stops: list[str], pieces: list[str]) -> tuple[list[str], bool]:
    matcher = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, is_stopped = matcher.push(piece)
        shown.append(text)
        if is_stopped:
            return shown, True
    return [*shown, matcher.flush()], False


def test_text_without_stop_strings_passes_immediately() -> None:
    assert show([], ["a", "b"]) == (["a", "b", ""], False)


def test_a_possible_start_of_a_stop_string_is_held_back() -> None:
    assert show(["END"], ["xE", "N", "y"]) == (["x", "", "ENy", ""], False)
    assert show(["END"], ["xE", "N", "Dy"]) == (["x", "", ""], True)


@pytest.mark.parametrize(
    ("stops", "text", "expected"),
    [
        (["cd", "b"], "abcd", "a"),
        (["abcd", "bc"], "abcd", "a"),  # `bc` is complete while `abcd` is not
        (["bc", "abc"], "abcd", ""),  # complete with the same character
        (["aab"], "aaab", "a"),
    ],
)
def test_the_stop_string_that_is_complete_first_counts(stops: list[str], text: str, expected: str) -> None:
    for pieces in ([text], list(text), [text[:2], text[2:]]):
        shown, is_stopped = show(stops, pieces)
        assert ("".join(shown), is_stopped) == (expected, True)


def test_held_text_is_flushed_at_the_end() -> None:
    assert show(["END"], ["xEN"]) == (["x", "EN"], False)


def cut_at_stop(text: str, stops: list[str]) -> str:
    """The answer of a model that writes `text` one character at a time until it has written a stop string."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(
    st.lists(st.text("ab", max_size=4), max_size=12),
    st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_stop_strings_do_not_depend_on_the_split(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    shown, is_stopped = show(stops, pieces)
    assert is_stopped == any(stop in whole for stop in stops)
    assert "".join(shown) == cut_at_stop(whole, stops)


def spoken(*deltas: str) -> str:
    thoughts = ThoughtFilter()
    return "".join([thoughts.push(delta) for delta in deltas]) + thoughts.flush()


@pytest.mark.parametrize(("text", "expected"), THOUGHT_CASES)
def test_a_leading_thought_is_removed(text: str, expected: str) -> None:
    assert spoken(text) == expected
    assert spoken(*text) == expected


@given(st.sampled_from(THOUGHT_CASES), st.lists(st.integers(0, 60), max_size=6))
def test_thoughts_do_not_depend_on_the_split(case: tuple[str, str], cuts: list[int]) -> None:
    text, expected = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert spoken(*(text[a:b] for a, b in itertools.pairwise(places))) == expected


def test_an_answer_without_thoughts_passes_immediately() -> None:
    thoughts = ThoughtFilter()
    assert thoughts.push("<b>") == "<b>"
    assert thoughts.push("Good <") == "Good <"
