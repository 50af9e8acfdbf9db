"""What the steps of pictures are made of, against the tables of the official code."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from image_checkpoint import IMAGE_DATA
from safetensors.torch import load_file

from mingc.artifacts.parameters import ImageDitParameters
from mingc.runtime.images.schedule import noise_levels, num_evaluations, partial_steps
from mingc.runtime.images.tokens import start_noise, to_latents, to_tokens, token_layout

GOLDEN = json.loads((IMAGE_DATA / "imagegen.json").read_text(encoding="utf-8"))


def parameters(*, is_shift_dynamic: bool = False) -> ImageDitParameters:
    return ImageDitParameters(
        latent_channels=16,
        patch_size=2,
        token_multiple=32,
        caption_width=48,
        hidden_size=96,
        feed_forward_size=256,
        max_positions=(1536, 512, 512),
        num_train_steps=1000,
        shift=3.0,
        is_shift_dynamic=is_shift_dynamic,
        dynamic_tokens=(256, 4096),
        dynamic_shifts=(0.5, 1.15),
        num_steps=30,
        guidance=2.0,
    )


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_noise_levels_are_those_of_the_official_scheduler(kind: str) -> None:
    for case in GOLDEN["scheduler"][kind]:
        levels = noise_levels(
            parameters(is_shift_dynamic=kind == "dynamic"), case["steps"], case.get("image_seq_len", 4096)
        )
        assert levels.dtype == np.float32
        np.testing.assert_allclose(levels, case["sigmas"], rtol=0, atol=1e-7)


def test_a_step_between_equal_levels_is_not_evaluated() -> None:
    assert [num_evaluations(noise_levels(parameters(), count, 64)) for count in (1, 2, 30)] == [1, 1, 29]


def test_partial_pictures_are_spread_over_the_steps_and_none_is_the_last() -> None:
    assert partial_steps(3, 29) == (7, 14, 22)
    assert partial_steps(1, 29) == (14,)  # 14.5, to even
    assert partial_steps(3, 2) == (1,)
    assert partial_steps(2, 1) == ()


@pytest.mark.parametrize("case", GOLDEN["torch_randn"], ids=lambda case: str(case["seed"]))
def test_noise_is_that_of_torch_on_the_cpu(case: dict[str, Any]) -> None:
    noise = start_noise(case["seed"], case["shape"][1:])
    assert noise.flatten()[:8].tolist() == pytest.approx(case["first8"], abs=0)


def test_positions_count_captions_frames_rows_and_columns() -> None:
    golden = load_file(IMAGE_DATA / "imagegen_dit.safetensors")
    found = {name.removesuffix(".inner.x_pos"): value for name, value in golden.items() if "x_pos" in name}
    assert found
    for name, expected in found.items():
        channels, frames, *size = golden[f"{name}.latent"].shape
        num_frames = 2 if f"{name}.ref" in golden or f"{name}.ref_latent" in golden else frames
        rows = -(-len(golden[f"{name}.caption"]) // 32) * 32
        layout = token_layout(parameters(), (size[0], size[1]), num_frames, rows)
        assert channels == 16 and layout.num_noisy == size[0] * size[1] // 4
        caption = golden[f"{name}.inner.cap_pos"]
        assert torch.equal(layout.positions, torch.cat((expected, caption)).long())


def test_tokens_are_patches_by_row_and_column_with_channels_innermost() -> None:
    latents = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    tokens = to_tokens(latents, 2)
    assert tokens.shape == (2, 6, 12)
    assert tokens[1, 4].reshape(2, 2, 3)[1, 0].tolist() == latents[1, :, 3, 2].tolist()
    assert torch.equal(to_latents(tokens, 2, (4, 6)), latents)
