"""Recorded noise of a request's speech: the `NoiseSource` of all speech in verification."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class RecordedNoise:
    """Noise of all patches of a request in order.

    Args:
        patches: number of patches of each segment.
        start_noise: (n, P, C).
        step_noise: (n, steps, P, C); None for speech without temperature.
    """

    patches: Sequence[int]
    start_noise: Floats
    step_noise: Floats | None = None

    def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        return self._at(self.start_noise, segment, patch, shape)

    def diffusion(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        return self._at(self.step_noise, segment, patch, shape)

    def _at(self, noise: Floats | None, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        """Zeros after the last recorded patch, where a surplus patch is computed and discarded."""
        if noise is None or segment >= len(self.patches) or patch >= self.patches[segment]:
            return np.zeros(shape, np.float32)
        found: Floats = noise[sum(self.patches[:segment]) + patch]
        return found
