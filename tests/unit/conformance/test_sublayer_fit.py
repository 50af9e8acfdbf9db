"""Fits of attention and feed-forward: the sublayer with a wrong scale is named."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.sublayer_fit import SublayerFit, worst_scale
from mingc.verify.scale import _ERRORS, _LIMIT, Scale


def rounded(values: np.ndarray, random: np.random.Generator, share: float) -> np.ndarray:
    """Values with random errors of `share` times their root mean square."""
    return values + share * np.sqrt(np.square(values).mean()) * random.normal(size=values.shape)


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


@pytest.mark.parametrize("seed", range(5))
def test_sublayers_are_fitted_by_least_squares(seed: int) -> None:
    """numpy's solver and the textbook's covariance of its solution give the same factors and errors."""
    random = np.random.default_rng(seed)
    attention, feed_forward = random.normal(size=(2, 6, 8))
    recorded = 1.1 * attention + 0.8 * feed_forward + 0.05 * random.normal(size=(6, 8))
    fit = SublayerFit()
    for row in range(0, 6, 2):  # in parts
        fit.add(attention[row : row + 2], feed_forward[row : row + 2], recorded[row : row + 2])
    x = np.stack([attention.ravel(), feed_forward.ravel()], axis=1)
    found, (rest,), *_ = np.linalg.lstsq(x, recorded.ravel(), rcond=None)
    covariance = rest / (48 - 2) * np.linalg.inv(x.T @ x)
    errors = np.sqrt(np.diag(covariance))
    scales = dict(fit.scales())
    assert [*scales] == ["attention", "feed_forward"]
    for scale, share, error in zip(scales.values(), found, errors, strict=True):
        assert scale.factor == pytest.approx(1 / share)
        lost = rest / np.square(recorded).sum()
        assert scale.allowed == pytest.approx(_LIMIT + _ERRORS * error + lost)


def test_a_fit_needs_more_values_than_factors() -> None:
    fit = SublayerFit()
    fit.add(np.ones((1, 2)), np.ones((1, 2)), np.ones((1, 2)))
    assert not [*fit.scales()]
    fit.add(np.zeros((1, 1)), np.zeros((1, 1)), np.zeros((1, 1)))
    assert len([*fit.scales()]) == 2
    silent = SublayerFit()
    silent.add(np.ones((4, 1)), np.zeros((4, 1)), np.zeros((4, 1)))
    assert {scale.factor for _, scale in silent.scales()} == {float("inf")}


def test_the_worst_scale_exceeds_its_allowance_the_most() -> None:
    scales = {
        "near": Scale(factor=1.5, allowed=0.4),
        "far": Scale(factor=0.7, allowed=0.1),
        "wide": Scale(factor=3.0, allowed=2.5),
    }
    assert worst_scale(scales) == ("far", scales["far"])
