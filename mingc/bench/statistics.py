"""Estimates over requests and repeats, with intervals by the bootstrap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 1000
CONFIDENCE = 0.95
_MAX_ELEMENTS = 1 << 22  # of a temporary array

Floats = NDArray[np.float64]


class Measure(Protocol):
    """A figure of one run as a function of how often each of its requests counts."""

    @property
    def num_requests(self) -> int:
        """Requests that may be drawn."""

    def of(self, counts: Floats) -> Floats:
        """Compute the figure for each row of `counts` (B, requests); NaN where nothing is left."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Σ amounts / Σ weights; both (requests,)."""

    amounts: Floats
    weights: Floats

    @property
    def num_requests(self) -> int:
        return len(self.amounts)

    def of(self, counts: Floats) -> Floats:
        total = counts @ self.weights
        found: Floats = np.divide(
            counts @ self.amounts, total, out=np.full(len(counts), np.nan), where=total > 0
        )
        return found


@dataclass(frozen=True, slots=True)
class Quantile:
    """Quantile `q` of `values`, between neighbours as numpy does it.

    `owners` are the requests of the values; each has at least one. The values of a request, such as the pauses between
    its tokens, are drawn together.
    """

    values: Floats
    owners: NDArray[np.int64]
    q: float
    num_requests: int

    def of(self, counts: Floats) -> Floats:
        order = np.argsort(self.values)
        values, owners = self.values[order], self.owners[order]
        rows = max(1, _MAX_ELEMENTS // max(1, len(values)))
        parts = [
            _quantiles(values, counts[at : at + rows, owners], self.q) for at in range(0, len(counts), rows)
        ]
        return np.concatenate(parts)


def _quantiles(values: Floats, counts: Floats, q: float) -> Floats:
    """Quantile of sorted `values` that occur `counts` (B, values) times."""
    ends = np.cumsum(counts, axis=1)
    places = q * (ends[:, -1] - 1)
    low, high = (values[(ends <= at[:, None]).sum(axis=1)] for at in (np.floor(places), np.ceil(places)))
    found: Floats = low + (high - low) * (places % 1)
    return found


@dataclass(frozen=True, slots=True)
class Estimate:
    """A figure over all repeats of a load.

    Attributes:
        mean: of the repeats' values.
        sd: their standard deviation (n - 1); None of a single repeat.
        low, high: bootstrap interval of the mean, at `CONFIDENCE`; None where there is but one request.
        error: standard error of the mean by the bootstrap; None as above.
        num_repeats: that have a value.
    """

    mean: float
    sd: float | None
    low: float | None
    high: float | None
    error: float | None
    num_repeats: int


def estimate(repeats: Sequence[Measure], seed: int) -> Estimate | None:
    """Estimate a figure from its measure in each repeat; None if no repeat has a value.

    A resample draws repeats, and requests within each of them, both with replacement: the variation from run to run
    counts as well as the variation from request to request.
    """
    values, resampled = [], []
    random = np.random.default_rng(seed)
    for measure in repeats:
        size = measure.num_requests
        if not size or np.isnan(value := measure.of(np.ones((1, size)))[0]):
            continue
        values.append(value)
        counts = random.multinomial(size, np.full(size, 1 / size), size=RESAMPLES).astype(np.float64)
        resampled.append(measure.of(counts))
    if not values:
        return None
    num = len(values)
    mean, sd = float(np.mean(values)), float(np.std(values, ddof=1)) if num > 1 else None
    if sum(measure.num_requests for measure in repeats) < 2:
        return Estimate(mean, sd, None, None, None, num)
    drawn = random.integers(num, size=(RESAMPLES, num))
    means = np.stack(resampled)[drawn, random.integers(RESAMPLES, size=(RESAMPLES, num))].mean(axis=1)
    means = means[~np.isnan(means)]
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, [edge, 1 - edge])
    # Of a few repeats, those drawn vary less than repeats do.
    error = float(np.std(means)) * (num / (num - 1)) ** 0.5 if num > 1 else float(np.std(means))
    return Estimate(mean, sd, float(low), float(high), error, num)
