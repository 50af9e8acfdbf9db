"""Thoughts before an answer are not spoken, however the text is cut into deltas."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.text.thoughts import ThoughtFilter

CASES = [
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


def spoken(*deltas: str) -> str:
    thoughts = ThoughtFilter()
    return "".join([thoughts.push(delta) for delta in deltas]) + thoughts.flush()


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_only_the_answer_is_spoken(text: str, expected: str) -> None:
    assert spoken(text) == expected
    assert spoken(*text) == expected


@given(st.sampled_from(CASES), st.lists(st.integers(0, 60), max_size=6))
def test_any_cut_speaks_the_same(case: tuple[str, str], cuts: list[int]) -> None:
    text, expected = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    assert spoken(*(text[a:b] for a, b in itertools.pairwise(places))) == expected


def test_an_answer_without_thoughts_is_passed_on_at_once() -> None:
    thoughts = ThoughtFilter()
    assert thoughts.push("<b>") == "<b>"
    assert thoughts.push("Good <") == "Good <"
