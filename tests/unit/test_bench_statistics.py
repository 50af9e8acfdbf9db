"""Estimates and intervals against numpy and scipy; verdicts over many runs that do not differ."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import scipy  # loads `stats` when it is used: a second that not all processes need
from numpy.typing import NDArray

from mingc.bench.statistics import Measure, Quantile, Ratio, estimate

Floats = NDArray[np.float64]
RANDOM = np.random.default_rng(5)
TIMES = RANDOM.lognormal(3, 0.5, 80)
TOKENS = RANDOM.poisson(40, 80) + 1.0


def quantile(values: Floats, q: float) -> Quantile:
    return Quantile(values, np.arange(len(values)), q, len(values))


@pytest.mark.parametrize(
    ("measure", "data", "statistic"),
    [
        (Ratio(TIMES, np.ones(80)), (TIMES,), lambda x, axis: np.mean(x, axis=axis)),
        (Ratio(TOKENS, TIMES), (TOKENS, TIMES), lambda x, y, axis: x.sum(axis) / y.sum(axis)),
        (quantile(TIMES, 0.5), (TIMES,), lambda x, axis: np.quantile(x, 0.5, axis=axis)),
        (quantile(TIMES, 0.9), (TIMES,), lambda x, axis: np.quantile(x, 0.9, axis=axis)),
    ],
    ids=["mean", "ratio", "median", "quantile"],
)
def test_one_run_is_estimated_as_scipy_does(
    measure: Measure, data: tuple[Floats, ...], statistic: Callable[..., Floats]
) -> None:
    found = estimate([measure], seed=1)
    assert found is not None and found.low is not None and found.high is not None and found.error is not None
    assert found.mean == pytest.approx(float(statistic(*data, axis=-1))) and found.sd is None
    wanted = scipy.stats.bootstrap(
        data, statistic, paired=True, vectorized=True, method="percentile", n_resamples=4000, rng=2
    )
    width = wanted.confidence_interval.high - wanted.confidence_interval.low
    assert found.low == pytest.approx(wanted.confidence_interval.low, abs=0.1 * width)
    assert found.high == pytest.approx(wanted.confidence_interval.high, abs=0.1 * width)
    assert found.error == pytest.approx(wanted.standard_error, rel=0.1)
    assert estimate([measure], seed=1) == found, "the seed decides"


def test_values_of_a_request_are_drawn_together() -> None:
    """Ten requests of equal pauses tell ten things, not a thousand."""
    levels = np.arange(10.0)
    grouped = Quantile(np.repeat(levels, 100), np.repeat(np.arange(10), 100), 0.5, 10)
    found, alone = estimate([grouped], seed=3), estimate([quantile(levels, 0.5)], seed=3)
    assert found is not None and alone is not None and found.error is not None and alone.error is not None
    assert found.mean == alone.mean == 4.5 and found.error == pytest.approx(alone.error, rel=0.2)


def test_repeats_that_differ_widen_the_interval() -> None:
    """Mean and standard error of the repeats' means, of which each repeat knows its own nearly exactly."""
    levels = np.array([10.0, 11.0, 13.0, 12.0, 9.0])
    repeats = [Ratio(level + RANDOM.normal(0, 0.01, 50), np.ones(50)) for level in levels]
    found = estimate(repeats, seed=4)
    assert found is not None and found.error is not None
    assert found.mean == pytest.approx(11, abs=0.01) and found.sd == pytest.approx(
        np.std(levels, ddof=1), abs=0.01
    )
    assert found.error == pytest.approx(scipy.stats.sem(levels), rel=0.1)


def test_nothing_is_made_of_nothing() -> None:
    assert estimate([], seed=0) is None
    assert estimate([Ratio(np.zeros(3), np.zeros(3))], seed=0) is None
    single = estimate([Ratio(np.array([3.0]), np.array([2.0]))], seed=0)
    assert single is not None and single.mean == 1.5 and single.low is None and single.error is None
