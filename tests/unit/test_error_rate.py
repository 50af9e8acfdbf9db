"""Word error rates against hand-made cases and the textbook recursion."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mingc.text.error_rate import UnitErrors, normalised, word_errors


@pytest.mark.parametrize(
    ("reference", "hypothesis", "words"),
    [
        ("The cat sat.", "the CAT sat", (0, 3)),
        ("the cat sat", "the bat sat down", (2, 3)),
        ("the cat sat", "", (3, 3)),
        ("a b c", "b c", (1, 3)),
        ("", "oh no", (2, 0)),
        ("", " . ", (0, 0)),
        ("“Don’t!” he said — ‘go’.", "don't he said go", (0, 4)),
        ("rock 'n' roll", "rock n roll", (0, 3)),
        ("twenty-one", "twenty one", (2, 1)),
        ("it costs 42", "it costs forty two", (2, 3)),
        ("今天天气很好。", "今天 天氣很好", (1, 6)),
        ("我用 Python 写代码", "我用python写代妈", (1, 6)),
        ("ＡＢＣ，１２３", "abc 123", (1 + 1, 1)),
        ("が", "か\u3099", (0, 1)),
    ],
)
def test_by_hand(reference: str, hypothesis: str, words: tuple[int, int]) -> None:
    assert word_errors(reference, hypothesis) == UnitErrors(*words)


def test_rate_of_an_empty_reference_is_its_insertions() -> None:
    assert word_errors("", "oh no").rate == 2.0
    assert word_errors("the cat sat", "the bat sat down").rate == pytest.approx(2 / 3)


def test_normalised() -> None:
    assert (
        normalised(" It's 3.5 % of\nÄRGER, “so-called” (x'),\u200b 好！") == "it's 35 of ärger socalled x 好"
    )


@settings(deadline=None)
@given(st.text("一二三'", max_size=8), st.text("一二三。", max_size=8))
def test_distance_is_that_of_the_recursion(reference: str, hypothesis: str) -> None:
    wanted, got = (normalised(text).replace(" ", "") for text in (reference, hypothesis))

    @cache
    def distance(i: int, j: int) -> int:
        if not i or not j:
            return i + j
        replaced = distance(i - 1, j - 1) + (wanted[i - 1] != got[j - 1])
        return min(replaced, distance(i - 1, j) + 1, distance(i, j - 1) + 1)

    assert word_errors(reference, hypothesis) == UnitErrors(distance(len(wanted), len(got)), len(wanted))
