"""Speech planner: caps of a segment, exactly at their borders; the history before its first patch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_talker import FLOW, TALKER, VAE

from mingc.errors import RequestError
from mingc.runtime.request import SpeechParams
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.voices import VoicePack

# As released (talker.md §0, §5): a patch is 4 latents of 3528 samples at 44,100 Hz, 0.32 s.
RELEASED = replace(
    TALKER, slot_tokens=2048, max_steps=1000, cap_min_seconds=2.0, cap_seconds_per_character=5818 / 16000
)
PATCH = {"flow": replace(FLOW, latents_per_patch=4), "vae": replace(VAE, samples_per_latent=3528)}


def planner(**changed: Any) -> SpeechPlanner:
    builder: Any = None  # no prompt is built
    return SpeechPlanner(builder, {}, parameters=replace(RELEASED, **changed), **PATCH)


@pytest.mark.parametrize(
    ("characters", "prompt_tokens", "requested", "patches"),
    [
        (1, 100, None, 7),  # 2 s are 6.25 patches
        (5, 100, None, 7),  # 1.82 s, so still 2 s
        (6, 100, None, 7),  # 2.18 s are 6.8 patches
        (7, 100, None, 8),  # 2.55 s are 7.95
        (8, 100, None, 10),  # 2.91 s are 9.09
        (100, 100, None, 114),  # 36.36 s are 113.6
        (879, 100, None, 999),  # 998.83
        (880, 100, None, 1000),  # 999.97
        (881, 100, None, 1000),  # 1001.1, beyond the model's cap
        (10_000, 100, None, 1000),
        (100, 100, 5, 5),
        (100, 100, 113, 113),
        (100, 100, 114, 114),
        (100, 100, 115, 114),
        (10_000, 100, 999, 999),
        (10_000, 100, 1001, 1000),
        (10_000, 1048, None, 1000),  # the slot has room for 1000
        (10_000, 1049, None, 999),
        (100, 2000, None, 48),
        (100, 2046, None, 2),
        (100, 2047, None, 1),
        (100, 2047, 1, 1),
    ],
)
def test_a_segment_has_as_many_patches_as_its_smallest_cap(
    characters: int, prompt_tokens: int, requested: int | None, patches: int
) -> None:
    assert planner().max_patches("x" * characters, prompt_tokens, requested) == patches


def test_invalid_instructions_are_refused_before_anything_is_spoken() -> None:
    planner(default_voice=None).check(SpeechParams(instructions="calmly"))
    planner(default_voice=None).check(SpeechParams())
    with pytest.raises(RequestError, match="instructions start like a JSON object") as refused:
        planner(default_voice=None).check(SpeechParams(instructions='{"style": '))
    assert (refused.value.status, refused.value.param) == (400, "instructions")


@pytest.mark.parametrize(("characters", "patches"), [(4, 4), (5, 5), (100, 100)])
def test_speech_that_fills_its_last_patch_gets_no_further_one(characters: int, patches: int) -> None:
    """One patch a character, and a least length of four."""
    exact = planner(cap_seconds_per_character=0.32, cap_min_seconds=4 * 0.32)
    assert exact.max_patches("x" * characters, 100, None) == patches
    assert exact.max_patches("x", 100, None) == 4


@pytest.mark.parametrize("prompt_tokens", [2048, 2049, 5000])
def test_a_prompt_that_fills_its_slot_is_refused(prompt_tokens: int) -> None:
    with pytest.raises(RequestError, match=f"has {prompt_tokens} tokens, a slot holds 2048"):
        planner().max_patches("x", prompt_tokens, None)


@pytest.mark.parametrize("length", [0, 2, 5, 6, 7, 40])
def test_the_history_ends_with_the_recording(length: int) -> None:
    """talker.md §5: the last latents, right-aligned; silence before a recording that is shorter than the history."""
    latents = np.arange(1, length * 4 + 1, dtype=np.float32).reshape(length, 4)
    voice = VoicePack(
        name="one", transcript="", latents=latents, embeds=np.zeros((0, 8)), speaker=np.zeros(8, np.float32)
    )
    whole = np.concatenate([np.zeros((6, 4), np.float32), latents])
    assert np.array_equal(planner().history(voice), whole[-6:])
    assert not planner().history(None).any()
