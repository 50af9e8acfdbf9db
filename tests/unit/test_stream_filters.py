"""Stream filters: stop strings and thoughts give the same text for any split into deltas."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.text.stream_filters import SpaceAroundCalls, StopStrings, ThoughtSplitter

THOUGHT_CASES = [  # answer, its thought, its text
    ("Good morning.", "", "Good morning."),
    ("<think>The user greets me.</think>Good morning.", "The user greets me.", "Good morning."),
    ("\n <think>\nHm < 3 </ think>?\n</think>\n\nThree. ", "Hm < 3 </ think>?", "Three. "),
    ("<think></think>Yes.", "", "Yes."),
    ("<think> \n </think> \n", "", ""),
    ("<think>No end\n", "No end", ""),
    ("<think>Half an end </thi", "Half an end </thi", ""),
    ("<thin", "", "<thin"),
    (" \n", "", " \n"),
    ("<thinker> is a word.", "", "<thinker> is a word."),
    ("The mark <think> opens, </think> closes.", "", "The mark <think> opens, </think> closes."),
    ("<think>a\n\nb</think>Then <think>b</think>.", "a\n\nb", "Then <think>b</think>."),
    ("", "", ""),
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


def split(*deltas: str) -> tuple[str, str]:
    thoughts = ThoughtSplitter()
    pieces = [*map(thoughts.push, deltas), thoughts.flush()]
    return "".join(thought for thought, _ in pieces), "".join(text for _, text in pieces)


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(st.sampled_from(THOUGHT_CASES), st.lists(st.integers(0, 60), max_size=6))
def test_thoughts_do_not_depend_on_the_split(case: tuple[str, str, str], cuts: list[int]) -> None:
    whole, thought, text = case
    assert split(whole) == split(*whole) == split(*pieces_of(whole, cuts)) == (thought, text)


def test_an_answer_without_thoughts_passes_immediately() -> None:
    thoughts = ThoughtSplitter()
    assert thoughts.push("<b>") == ("", "<b>")
    assert thoughts.push("Good <") == ("", "Good <")


@pytest.mark.parametrize(
    ("parts", "expected"),  # None: a call
    [
        ([" Hi \n"], " Hi \n"),
        ([" Hi \n", None, "\n", None, "\n"], " Hi"),
        (["\n", None, "\n Done. "], "Done."),
        (["A\n", None, "\nB"], "A\n\nB"),
        (["\n", None], ""),
    ],
)
def test_white_space_around_calls_is_left_out(parts: list[str | None], expected: str) -> None:
    for size in (1, 2, 99):
        space = SpaceAroundCalls()
        shown = ""
        for part in parts:
            if part is None:
                space.add_call()
            else:
                shown += "".join(space.push(part[i : i + size]) for i in range(0, len(part), size))
        assert shown + space.flush() == expected
