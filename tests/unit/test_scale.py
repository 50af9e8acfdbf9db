"""Fitted scales: rounding errors hardly move them, a wrong scale does."""

from __future__ import annotations

import numpy as np
import pytest

from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.scale import Scale, SublayerFit, fit_scale, worst_scale


def rounded(values: np.ndarray, random: np.random.Generator, share: float) -> np.ndarray:
    """Values with random errors of `share` times their root mean square."""
    return values + share * np.sqrt(np.square(values).mean()) * random.normal(size=values.shape)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("count, share", [(1, 0.02), (8, 0.03), (64, 0.05), (4096, 0.01), (4096, 0.1)])
def test_rounding_errors_pass(count: int, share: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    reference = random.normal(size=count)
    scale = fit_scale(rounded(reference, random, share), reference)
    assert scale is not None and not scale.is_off


@pytest.mark.parametrize("factor", [0.95, 1.05])
@pytest.mark.parametrize("count, share", [(256, 0.01), (4096, 0.05)])
def test_a_wrong_scale_is_found_among_rounding_errors(count: int, share: float, factor: float) -> None:
    random = np.random.default_rng(0)
    reference = random.normal(size=count)
    scale = fit_scale(factor * rounded(reference, random, share), reference)
    assert scale is not None and scale.is_off
    assert f"{factor:.2f}" in scale.describe()


def test_a_reference_of_zeros_has_no_scale() -> None:
    assert fit_scale(np.ones(3), np.zeros(3)) is None


@pytest.mark.parametrize(
    "tolerance, factor, outcome", [(0.1, 1.05, "FAIL"), (0.1, 1.005, "pass"), (0.01, 1.009, "pass")]
)
def test_with_a_loose_tolerance_the_scale_is_bounded_too(
    tolerance: float, factor: float, outcome: str
) -> None:
    reference = np.random.default_rng(1).normal(size=1000)
    log = ComparisonLog("file", {"out": reference}, tolerance=tolerance, is_exact=False)
    log.tensor("out", factor * reference)
    (found,) = log.comparisons
    assert found.outcome == outcome
    assert ("1.050 times the reference" in found.note) == (outcome == "FAIL")


def test_a_waiver_covers_a_scale() -> None:
    log = ComparisonLog("file", {"out": np.ones(1000)}, tolerance=0.1, is_exact=False)
    log.tensor("out", np.full(1000, 1.05), waiver="other experts")
    assert [each.outcome for each in log.comparisons] == ["expected difference"]
    assert log.comparisons[0].note == "other experts"


def sublayers(seed: int) -> tuple[np.ndarray, np.ndarray, np.random.Generator]:
    random = np.random.default_rng(seed)
    return random.normal(size=(20, 64)), 2 * random.normal(size=(20, 64)), random


@pytest.mark.parametrize("wrong", [None, "attention", "feed_forward"])
@pytest.mark.parametrize("seed", range(5))
def test_the_wrong_sublayer_is_named(wrong: str | None, seed: int) -> None:
    attention, feed_forward, random = sublayers(seed)
    fit = SublayerFit()
    for rows in (slice(0, 7), slice(7, 20)):
        fit.add(
            rounded(attention[rows], random, 0.01) * (1.05 if wrong == "attention" else 1),
            rounded(feed_forward[rows], random, 0.01) * (1.05 if wrong == "feed_forward" else 1),
            attention[rows] + feed_forward[rows],
        )
    scales = dict(fit.scales())
    assert {name for name, scale in scales.items() if scale.is_off} == ({wrong} if wrong else set())
    if wrong:
        assert worst_scale(scales)[0] == wrong
        assert scales[wrong].factor == pytest.approx(1.05, abs=0.003)


def test_too_few_numbers_are_not_fitted() -> None:
    fit = SublayerFit()
    fit.add(np.zeros((0, 4)), np.zeros((0, 4)), np.zeros((0, 4)))
    assert not dict(fit.scales())


def test_a_scale_of_nan_is_off() -> None:
    assert Scale(factor=float("nan"), allowed=0.1).is_off


@pytest.mark.parametrize("factor", [-1.0, 0.0])
def test_outputs_of_the_right_size_in_another_direction_are_off(factor: float) -> None:
    """Their lengths are equal: what counts is the length along the reference."""
    reference = np.tile([1.0, 2.0], 50)
    across = np.tile([-2.0, 1.0], 50)
    scale = fit_scale(factor * reference + (1 - abs(factor)) * across, reference)
    assert scale is not None
    assert scale.factor == pytest.approx(factor)


def test_the_worst_scale_is_the_one_that_exceeds_its_own_allowance() -> None:
    noisy, wrong = Scale(factor=1.2, allowed=0.3), Scale(factor=1.1, allowed=0.05)
    assert worst_scale({"noisy": noisy, "wrong": wrong}) == ("wrong", wrong)
    assert worst_scale({"wrong": wrong, "noisy": noisy}) == ("wrong", wrong)
