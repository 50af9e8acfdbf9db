"""Noise of speech: a part of a request that is spoken on its own has the noise of the whole request."""

from __future__ import annotations

import numpy as np

from mingc.runtime.noise import PhiloxNoise, ShiftedNoise


def test_segments_spoken_on_their_own_have_the_noise_of_the_request() -> None:
    whole = PhiloxNoise(7)
    part = ShiftedNoise(whole, 2)
    for kind in ("start", "diffusion"):
        noise = getattr(part, kind)(1, 5, (3, 2))
        np.testing.assert_array_equal(noise, getattr(whole, kind)(3, 5, (3, 2)))
        assert not np.array_equal(noise, getattr(whole, kind)(1, 5, (3, 2)))
