"""Configs of image generation with values of the wrong kind: an error names the file and the key."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from image_checkpoint import lay_image_checkpoint
from mingc_command import mingc_here

from mingc.errors import CheckpointError
from mingc.export.checkpoint import open_configs
from mingc.export.stage import Stage
from mingc.export.stages import glyph, image_condition, image_dit, image_vae

CONDITION, GLYPH, DIT, VAE = (each.STAGE for each in (image_condition, glyph, image_dit, image_vae))
# By file: the numbers that must be whole, others, and those that may also be absent or 0 or less.
NUMBERS: dict[str, tuple[Stage, str, str, str]] = {
    "mlp/config.json": (CONDITION, "img_gen_scales diffusion_c_input_dim", "", ""),
    "connector/config.json": (
        CONDITION,
        "hidden_size intermediate_size num_attention_heads num_hidden_layers",
        "rms_norm_eps rope_theta",
        "",
    ),
    "byt5/byt5.json": (GLYPH, "byt5_max_length", "", ""),
    "byt5/font_uni_10-lang_idx.json": (GLYPH, "", "", "cn-HuXiaoBo-Bold"),
    "byt5/google__byt5-small/config.json": (
        GLYPH,
        "d_model d_ff d_kv num_heads num_layers relative_attention_num_buckets relative_attention_max_distance",
        "layer_norm_epsilon",
        "",
    ),
    "transformer/config.json": (
        DIT,
        "dim n_heads n_kv_heads n_layers n_refiner_layers in_channels cap_feat_dim axes_dims axes_lens all_patch_size",
        "norm_eps rope_theta t_scale",
        "",
    ),
    "scheduler/scheduler_config.json": (DIT, "base_image_seq_len use_dynamic_shifting", "shift", "max_shift"),
    "vae/config.json": (
        VAE,
        "block_out_channels norm_num_groups layers_per_block latent_channels use_quant_conv",
        "scaling_factor",
        "shift_factor",
    ),
}
NEVER: tuple[Any, ...] = ("x", math.nan, [], ["a"], {}, True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return lay_image_checkpoint(tmp_path_factory.mktemp("images") / "tiny-ming")


@pytest.mark.parametrize("file", NUMBERS)
def test_a_number_of_the_wrong_kind_is_refused_by_file_and_key(file: str, folder: Path) -> None:
    stage, whole, real, signed = NUMBERS[file]
    path = folder / file
    config = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()
    wrong = ((whole, (*NEVER, -1, 0, 1.5, [0])), (real, (*NEVER, -1, 0)), (signed, NEVER))
    for key, value in [(key, value) for keys, values in wrong for key in keys.split() for value in values]:
        if key.startswith("use_") and value is True:
            continue
        path.write_text(json.dumps({**config, key: value}), encoding="utf-8")
        with pytest.raises(CheckpointError) as refused:
            stage.config(open_configs(folder))
        assert key in refused.value.message and str(path) in str(refused.value.where), (key, value)
        assert refused.value.fix
    path.write_text(json.dumps(config), encoding="utf-8")
    stage.config(open_configs(folder))


def test_folders_without_the_others_are_refused_by_name(tmp_path: Path) -> None:
    """An artifact of them would have the weights, and draw nothing."""
    names = ("mlp", "connector", "transformer", "scheduler", "vae")
    for absent in (*[{name} for name in names], {*names}):
        root = lay_image_checkpoint(tmp_path / "-".join(sorted(absent)))
        for name in absent:
            shutil.rmtree(root / name)
        done = mingc_here("export", root, "--output", tmp_path / "artifact", "--backend", "eager")
        assert done.code == 1 and all(f"{name}/" in done.stderr for name in absent), done.stderr
        assert "--stages without" in done.stderr and not (tmp_path / "artifact").exists()
