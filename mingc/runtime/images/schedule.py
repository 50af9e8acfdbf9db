"""Noise levels of the steps of a picture (spec: imagegen.md §5)."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import ImageDitParameters


def noise_levels(parameters: ImageDitParameters, num_steps: int, num_tokens: int) -> NDArray[np.float32]:
    """σ before each of `num_steps` steps, and 0 after the last one.

    `num_tokens`: of the noisy picture alone. σ before the last step is 0, too, if there are several.
    """
    even = np.linspace(1.0, 0.0, num_steps)
    if parameters.is_shift_dynamic:
        (few, many), (low, high) = parameters.dynamic_tokens, parameters.dynamic_shifts
        shift = math.exp(low + (high - low) / (many - few) * (num_tokens - few))
    else:
        shift = parameters.shift
    # With an exponential shift e^μ / (e^μ + 1/s − 1) is the same.
    levels = shift * even / (1.0 + (shift - 1.0) * even)
    return np.append(levels.astype(np.float32), np.float32(0.0))


def num_evaluations(levels: NDArray[np.float32]) -> int:
    """How many steps change the picture: a step between equal levels does not."""
    return int(np.count_nonzero(np.diff(levels)))


def partial_steps(num_partials: int, num_steps: int) -> tuple[int, ...]:
    """Numbers of done steps after which the partial pictures are sent, evenly spread; each is less than `num_steps`."""
    spread = (round(each * num_steps / (num_partials + 1)) for each in range(1, num_partials + 1))
    return tuple(dict.fromkeys(step for step in spread if 0 < step < num_steps))
