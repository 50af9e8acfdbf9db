"""Counter-based noise for speech: a seed gives a request the same numbers in any batch and slot. Imports no torch."""

from __future__ import annotations

import secrets
import threading
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

_STREAM = 2  # second word of the key; the sampler of text uses 1
_START, _DIFFUSION = 0, 1  # third word of the counter


def random_seed() -> int:
    """A random seed for a request that has none."""
    return secrets.randbits(63)


def philox_key(seed: int, stream: int) -> NDArray[np.uint64]:
    """Philox key (2,). As plain numpy input, seeds from 2^63 on would become floats and lose their low bits."""
    return np.array([seed & (2**64 - 1), stream], np.uint64)


class NoiseSource(Protocol):
    """Noise of one request's speech. `segment` and `patch` count from 0."""

    def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Standard normal start noise of the flow of one patch (spec: talker.md §6, step 1)."""
        ...

    def diffusion(self, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Standard normal noise added after the steps of one patch when its temperature is not 0 (§6, step 4)."""
        ...


@dataclass(frozen=True, slots=True)
class PhiloxNoise:
    """The noise of a served request: Philox, keyed by its seed."""

    seed: int

    def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return _generator.normal(self.seed, segment, patch, _START, shape)

    def diffusion(self, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return _generator.normal(self.seed, segment, patch, _DIFFUSION, shape)


@dataclass(frozen=True, slots=True)
class ShiftedNoise:
    """The noise of the segments from `first_segment` on, for a part of a request that another service generates."""

    noise: NoiseSource
    first_segment: int

    def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return self.noise.start(self.first_segment + segment, patch, shape)

    def diffusion(self, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        return self.noise.diffusion(self.first_segment + segment, patch, shape)


class _Generator(threading.local):
    """One generator per thread, whose state every draw sets: making a generator takes as long as a small draw."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(key=0)
        self._generator = np.random.Generator(self._bits)
        self._state = self._bits.state  # with nothing buffered; setting it copies these arrays
        self._key, self._counter = self._state["state"]["key"], self._state["state"]["counter"]
        self._key[1] = _STREAM

    def normal(
        self, seed: int, segment: int, patch: int, kind: int, shape: tuple[int, ...]
    ) -> NDArray[np.float32]:
        self._key[0] = seed & (2**64 - 1)
        self._counter[1:] = (
            patch,
            kind,
            segment,
        )  # Philox increments the lowest word, which is 0, with each draw
        self._bits.state = self._state
        return self._generator.standard_normal(shape, dtype=np.float32)


_generator = _Generator()
