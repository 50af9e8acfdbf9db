"""Noise of speech, made from a request's seed and counted: the same numbers in any batch and any slot. No torch."""

from __future__ import annotations

import secrets

import numpy as np
from numpy.typing import NDArray

_STREAM = 2  # second word of the key; the sampler of text uses another
_START, _DIFFUSION = 0, 1  # third word of the counter


def random_seed() -> int:
    """A seed for a request that names none."""
    return secrets.randbits(63)


def philox_key(seed: int, stream: int) -> NDArray[np.uint64]:
    """The key (2,) of a generator. Left to numpy, seeds from 2^63 on become floats and lose their low bits."""
    return np.array([seed & (2**64 - 1), stream], np.uint64)


def start_noise(seed: int, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal noise that the flow of one patch starts from (spec: talker.md §6, step 1)."""
    return _normal(seed, segment, patch, _START, shape)


def diffusion_noise(seed: int, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Standard normal noise added after the steps of one patch when its temperature is not 0 (§6, step 4)."""
    return _normal(seed, segment, patch, _DIFFUSION, shape)


def _normal(seed: int, segment: int, patch: int, kind: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
    # The lowest counter word counts the draws themselves.
    bits = np.random.Philox(key=philox_key(seed, _STREAM), counter=[0, patch, kind, segment])
    return np.random.Generator(bits).standard_normal(shape, dtype=np.float32)
