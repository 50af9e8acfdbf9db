"""Fitted scales: rounding errors hardly move them, a wrong scale does."""

from __future__ import annotations

import numpy as np
import pytest

from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.scale import _ERRORS, _LIMIT, Scale, fit_scale


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


def test_a_scale_is_the_projection_on_the_reference() -> None:
    """value · reference / reference²; allowed: 2 % and the rounding errors that the values show."""
    reference, value = np.array([3.0, 4.0]), np.array([3.0, 4.5])
    scale = fit_scale(value, reference)
    assert scale is not None
    assert scale.factor == pytest.approx((9 + 18) / 25)
    lost = 0.25 / 25
    assert scale.allowed == pytest.approx(_LIMIT + _ERRORS * (lost / 2) ** 0.5 + lost)
    exact = fit_scale(reference, reference)
    assert exact == Scale(factor=1.0, allowed=_LIMIT) and not exact.is_off


def test_the_ends_of_an_allowance_are_inside() -> None:
    for factor, is_off in (
        (1.25, False),
        (0.75, False),
        (1.2501, True),
        (0.7499, True),
        (float("nan"), True),
    ):
        assert Scale(factor=factor, allowed=0.25).is_off == is_off
