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


def test_no_two_patches_have_the_same_noise_and_a_patch_has_it_again_after_others() -> None:
    places = [(seed, 1, 5) for seed in (0, 7, 1 << 32 | 7, 1 << 63 | 7)]
    places += [(7, 5, 1), (7, 0, 5), (7, 1, 0), (7, 1, 1)]

    def draw(seed: int, segment: int, patch: int, size: int) -> list[bytes]:
        noise = PhiloxNoise(seed)
        return [kind(segment, patch, (size,)).tobytes() for kind in (noise.start, noise.diffusion)]

    found = [draw(*place, 5) for place in places]
    assert len({each for kinds in found for each in kinds}) == 2 * len(places)
    for place, kinds in zip(places, found, strict=True):
        draw(*places[0], 3)  # an odd number of values: half of a draw is left over
        assert draw(*place, 5) == kinds
