"""Comparisons with references: what passes, what fails, what is only reported."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mingc.artifacts.codec import encode
from mingc.errors import RequestError
from mingc.verify.comparison import Comparison
from mingc.verify.comparison_log import ComparisonLog


def ledger(is_exact: bool = True) -> ComparisonLog:
    references = {
        "a.out": np.array([[1.0, -2.0]], np.float32),
        "a.in": np.array([3.0], np.float32),
        "a.ids": np.array([1, 2, 3]),
        "b.out": np.zeros(0, np.float32),
        "b.hidden": np.ones(4, np.float32),
    }
    return ComparisonLog("file.safetensors", references, tolerance=1e-4, is_exact=is_exact)


def last(book: ComparisonLog) -> Comparison:
    return book.comparisons[-1]


@pytest.mark.parametrize("off, outcome", [(0.0, "pass"), (1.9e-4, "pass"), (2.1e-4, "FAIL")])
def test_tensors_pass_within_the_tolerance_of_their_largest_value(off: float, outcome: str) -> None:
    book = ledger()
    book.tensor("a.out", np.array([[1.0 + off, -2.0]], np.float64))
    assert last(book).name == "file: a.out"
    assert last(book).outcome == outcome
    assert last(book).error == pytest.approx(off / 2)


@pytest.mark.parametrize(
    "value, outcome",
    [([[1.0, -2.0]], "pass"), ([[1.5, -2.0]], "expected difference"), ([[np.nan, -2.0]], "FAIL")],
)
def test_an_excuse_covers_a_difference_but_nothing_that_is_no_number(
    value: list[list[float]], outcome: str
) -> None:
    book = ledger()
    book.tensor("a.out", value, excuse="tokens went elsewhere")
    assert last(book).outcome == outcome
    assert (last(book).note == "tokens went elsewhere") == (outcome == "expected difference")


@pytest.mark.parametrize(
    "off, outcome", [(1e-4, "pass"), (0.3, "expected difference"), (0.5, "FAIL"), (np.nan, "FAIL")]
)
def test_quantized_weights_may_be_off_by_a_few_times_what_the_manifest_says(off: float, outcome: str) -> None:
    book = ComparisonLog(
        "file", {"out": np.array([1.0, -2.0])}, tolerance=1e-4, is_exact=True, quantization=0.05
    )
    book.tensor("out", [1.0 + off, -2.0])
    assert last(book).outcome == outcome
    assert ("takes 0.05" in last(book).note) == (outcome == "expected difference")
    book.tensor("out", [1.3, -2.0], tolerance=0.01)  # no engine's output
    assert last(book).outcome == "FAIL"


@pytest.mark.parametrize("value", [[[1.0, np.nan]], [[1.0, np.inf]], [[1.0]], [1.0, -2.0]])
def test_what_has_another_shape_or_is_not_finite_fails_and_is_still_json(value: list[list[float]]) -> None:
    book = ledger()
    book.tensor("a.out", value)
    assert last(book).outcome == "FAIL"
    assert last(book).error is None
    assert "shape" in last(book).note
    json.dumps(encode(last(book)), allow_nan=False)


def test_a_name_that_the_file_lacks_is_no_failure() -> None:
    book = ledger()
    book.tensor("absent", [1.0])
    book.ids("absent", [1])
    book.differs("absent", [1.0], "why")
    assert not book.comparisons


def test_ids_must_be_identical() -> None:
    book = ledger()
    book.ids("a.ids", [1, 2, 3])
    assert (last(book).outcome, last(book).identical) == ("pass", True)
    book.ids("a.ids", [1, 2, 4])
    assert (last(book).outcome, last(book).identical) == ("FAIL", False)
    book.ids("a.ids", [1, 2])
    assert last(book).outcome == "FAIL"


def test_ids_may_differ_with_an_excuse_but_not_in_number() -> None:
    book = ledger()
    book.ids("a.ids", [1, 2, 4], excuse="two tokens score alike")
    assert (last(book).outcome, last(book).note) == ("expected difference", "two tokens score alike")
    book.ids("a.ids", [1, 2, 3], excuse="two tokens score alike")
    assert (last(book).outcome, last(book).note) == ("pass", "")
    book.ids("a.ids", [1, 2], excuse="two tokens score alike")
    assert last(book).outcome == "FAIL"


def test_rows_are_near_within_the_tolerance_of_the_largest_reference() -> None:
    value = [[1.0, 2.00019], [1.0, 2.00021], [np.nan, 2.0]]
    assert ledger().is_near(value, [[1.0, 2.0]] * 3).tolist() == [True, False, False]


def test_text_shows_what_differs() -> None:
    book = ledger()
    book.text("t", "abc", "abd")
    assert last(book).outcome == "FAIL"
    assert "'abc' is not 'abd'" in last(book).note


@pytest.mark.parametrize("same, outcome", [(20, "pass"), (19, "pass"), (18, "FAIL")])
def test_a_share_of_cases_must_be_identical(same: int, outcome: str) -> None:
    book = ledger()
    book.share("cases", same=same, total=20, minimum=0.95)
    assert last(book).outcome == outcome


def test_an_error_of_one_case_is_a_failure_and_the_next_case_runs() -> None:
    book = ledger()
    with book.case("first"):
        raise RequestError("too long")
    with book.case("second"):
        book.tensor("a.out", [[1.0, -2.0]])
    assert [each.outcome for each in book.comparisons] == ["FAIL", "pass"]
    assert "too long" in book.comparisons[0].note


def test_a_reference_that_the_file_lacks_fails_its_case_alone() -> None:
    book = ledger()
    with book.case("first"):
        book.input("absent")
    with book.case("second"):
        book.tensor("a.out", [[1.0, -2.0]])
    assert [each.outcome for each in book.comparisons] == ["FAIL", "pass"]
    assert "file.safetensors lacks absent" in book.comparisons[0].note


def test_a_summary_counts_what_was_compared_fed_in_and_left() -> None:
    book = ledger()
    assert book.cases("out") == ["a", "b"]
    book.input("a.in")
    book.tensor("a.out", [[1.0, -2.0002]])
    book.differs("b.out", np.zeros(0), "another variant")
    book.skip("a.ids", "no engine")
    summary = book.summary("note")
    assert (summary.checked, summary.failed, summary.inputs, summary.not_outputs) == (2, 0, 1, 2)
    assert summary.worst_error == pytest.approx(1e-4, rel=1e-2)
    assert book.not_outputs() == ["a.ids", "b.hidden"]


def test_cells_say_it_in_three_columns() -> None:
    book = ledger()
    book.tensor("a.out", [[1.0, -2.0]], how="again")
    book.ids("a.ids", [1, 2, 3])
    book.differs("b.out", np.zeros(0), "another variant")
    assert [each.cells() for each in book.comparisons] == [
        {"name": "file: a.out (again)", "error": "0.0e+00 of 1e-04", "outcome": "pass"},
        {"name": "file: a.ids", "error": "identical", "outcome": "pass"},
        {"name": "file: b.out", "error": "0.0e+00", "outcome": "expected difference: another variant"},
    ]
