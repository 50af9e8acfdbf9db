"""Comparisons with recorded values: pass or fail."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mingc.artifacts.codec import encode
from mingc.errors import RequestError
from mingc.verify.comparison import Comparison
from mingc.verify.comparison_log import ComparisonLog


def make_log() -> ComparisonLog:
    references = {"a.out": np.array([[1.0, -2.0]], np.float32), "a.ids": np.array([1, 2, 3])}
    return ComparisonLog("file.safetensors", references, tolerance=1e-4, is_exact=True)


def last(log: ComparisonLog) -> Comparison:
    return log.comparisons[-1]


@pytest.mark.parametrize("off, outcome", [(0.0, "pass"), (1.9e-4, "pass"), (2.1e-4, "FAIL")])
def test_tensors_pass_within_the_tolerance_of_their_largest_value(off: float, outcome: str) -> None:
    log = make_log()
    log.tensor("a.out", np.array([[1.0 + off, -2.0]], np.float64))
    assert last(log).name == "file: a.out"
    assert last(log).outcome == outcome
    assert last(log).error == pytest.approx(off / 2)


@pytest.mark.parametrize("value", [[[1.0, np.nan]], [[1.0, np.inf]], [[1.0]], [1.0, -2.0]])
def test_another_shape_or_a_non_finite_value_fails_and_encodes_as_json(value: list[list[float]]) -> None:
    log = make_log()
    log.tensor("a.out", value)
    assert last(log).outcome == "FAIL"
    assert last(log).error is None
    assert "shape" in last(log).note
    json.dumps(encode(last(log)), allow_nan=False)


def test_ids_must_be_identical() -> None:
    log = make_log()
    log.ids("a.ids", [1, 2, 3])
    assert (last(log).outcome, last(log).identical) == ("pass", True)
    log.ids("a.ids", [1, 2, 4])
    assert (last(log).outcome, last(log).identical) == ("FAIL", False)
    log.ids("a.ids", [1, 2])
    assert last(log).outcome == "FAIL"


def test_rows_are_near_within_the_tolerance_of_the_largest_reference() -> None:
    value = [[1.0, 2.00019], [1.0, 2.00021], [np.nan, 2.0]]
    assert make_log().is_near(value, [[1.0, 2.0]] * 3).tolist() == [True, False, False]


@pytest.mark.parametrize("same, outcome", [(20, "pass"), (19, "pass"), (18, "FAIL")])
def test_a_share_of_cases_must_be_identical(same: int, outcome: str) -> None:
    log = make_log()
    log.share("cases", same=same, total=20, minimum=0.95)
    assert last(log).outcome == outcome


def test_an_error_fails_its_case_and_the_next_case_runs() -> None:
    log = make_log()
    with log.case("first"):
        raise RequestError("too long")
    with log.case("second"):
        log.tensor("a.out", [[1.0, -2.0]])
    assert [each.outcome for each in log.comparisons] == ["FAIL", "pass"]
    assert "too long" in log.comparisons[0].note


@pytest.mark.parametrize(("holds", "outcome"), [(True, "pass"), (False, "FAIL")])
def test_a_rule_that_does_not_hold_fails(holds: bool, outcome: str) -> None:
    log = make_log()
    log.rule("a.out", holds, "the sum is 1")
    assert (last(log).outcome, last(log).note) == (outcome, "the sum is 1")
    assert log.summary().failed == (not holds)
