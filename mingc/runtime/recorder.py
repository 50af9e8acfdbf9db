"""Values of one request that no client gets: logits, latents, stop probabilities. Verification passes a `Recorder`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Recorder:
    """Filled by the engine threads, each value before the event of its token or patch.

    Attributes:
        logits: (V,) float32 that each token of the answer was sampled from.
        latents: (p, latent) float32 that each patch was decoded from.
        stop_probabilities: what the stop rule compared with its threshold, for each patch.
    """

    logits: list[Floats] = field(default_factory=list)
    latents: list[Floats] = field(default_factory=list)
    stop_probabilities: list[float] = field(default_factory=list)
