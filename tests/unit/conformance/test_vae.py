"""Frames of a wave that the VAE encodes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.vae import num_frames
from mingc.artifacts.spec import GraphSpec, TensorSpec


class FakeEngines:
    """An encoder of 40 samples a latent, 4 frames a latent."""

    def parameters_of(self, stage: str, kind: type) -> SimpleNamespace:
        return SimpleNamespace(frames_per_latent=4)

    def stage(self, name: str) -> dict[str, SimpleNamespace]:
        wave = TensorSpec(name="waveform", dtype="float32", shape=("T", 40))
        spec = GraphSpec(name="encode", inputs=(wave,), outputs=(), dims=(), state=())
        return {"encode": SimpleNamespace(spec=spec)}


@pytest.mark.parametrize(("samples", "frames"), [(1, 1), (10, 1), (11, 2), (40, 4), (41, 5)])
def test_a_partial_frame_counts(samples: int, frames: int) -> None:
    engines: Any = FakeEngines()
    assert num_frames(engines, np.zeros(samples, np.float32)) == frames
