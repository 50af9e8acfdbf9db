"""VAE of pictures compared with goldens: decode, encode; quant convolutions; what its config may be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checks import BACKENDS_AND_ONNX, check_bfloat16, check_engine
from image_checkpoint import IMAGE_DATA
from image_sampler import to_uint8
from safetensors.torch import load_file
from stage_checks import assert_close, check_sources, graph_of
from torch import Tensor, nn

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint, open_configs
from mingc.export.checks.coverage import check_coverage
from mingc.export.compile.backend import Backend
from mingc.export.layers.image_vae import ImageVae, ImageVaeConfig
from mingc.export.stage import Shard
from mingc.export.stages.image_vae import STAGE

RELEASED = Path(__file__).parents[2] / "benchmarks" / "released-images"
GOLDEN = load_file(IMAGE_DATA / "imagegen_vae.safetensors")
LIMIT = 5e-6  # tests/data/imagegen/README.md §6


def cells(pixels: Tensor) -> Tensor:
    """Pixels (B, 3, H, W) as the graphs have them."""
    return pixels.unflatten(3, (-1, 8)).unflatten(2, (-1, 8))


def rows(pixels: Tensor) -> Tensor:
    return pixels.flatten(4, 5).flatten(2, 3)


def recorded(
    module: ImageVae, case: str, names: dict[str, str], run: Callable[[], object]
) -> dict[str, tuple[Tensor, Tensor]]:
    """By submodule: its output in `run`, and the golden value of the name given for it."""
    made: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _module, _inputs, output: made.__setitem__(name, output)

    hooks = [module.get_submodule(path).register_forward_hook(keep(path)) for path in names]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return {path: (made[path], GOLDEN[f"{case}.inner.{name}"]) for path, name in names.items()}


@pytest.mark.parametrize("case", ["dec_square", "dec_wide", "dec_batch"])
def test_decode_matches(case: str, module: ImageVae) -> None:
    assert_close(rows(module.decode(GOLDEN[f"{case}.latent"])[0]), GOLDEN[f"{case}.image"], LIMIT)


@pytest.mark.parametrize("case", ["enc_square", "enc_tall"])
def test_encode_matches(case: str, module: ImageVae) -> None:
    pixels = GOLDEN[f"{case}.pixels"]
    assert_close(module.moments(pixels), GOLDEN[f"{case}.moments"], LIMIT)
    assert_close(module.encode(cells(pixels))[0], GOLDEN[f"{case}.latent"], LIMIT)


def test_every_part_matches(module: ImageVae) -> None:
    decoder = {
        "conv_in": "conv_in",
        "mid_block": "mid",
        "mid_block.attentions.0": "mid_attn",
        "up_blocks.0": "up0",
    }
    encoder = {"down_blocks.2": "down2", "down_blocks.3": "down3", "mid_block": "mid"}
    pairs = recorded(
        module,
        "dec_square",
        {f"decoder.{path}": name for path, name in decoder.items()},
        lambda: module.decode(GOLDEN["dec_square.latent"]),
    ) | recorded(
        module,
        "enc_square",
        {f"encoder.{path}": name for path, name in encoder.items()},
        lambda: module.encode(cells(GOLDEN["enc_square.pixels"])),
    )
    assert len(pairs) == 7
    for value, reference in pairs.values():
        assert_close(value, reference, LIMIT)


def test_the_tests_make_bytes_as_the_reference_does() -> None:
    assert torch.equal(to_uint8(GOLDEN["post.float"])[0], GOLDEN["post.u8"])


def test_quant_convolutions_are_those_of_diffusers(config: ImageVaeConfig, module: ImageVae) -> None:
    """1 × 1: a matrix for each place, after the encoder and before the decoder."""
    torch.manual_seed(0)
    full = ImageVae(replace(config, has_quant_conv=True, has_post_quant_conv=True)).requires_grad_(False)
    lacking = full.load_state_dict(module.state_dict(), strict=False).missing_keys
    assert {name.rpartition(".")[0] for name in lacking} == {"quant_conv", "post_quant_conv"}
    pixels, latents = GOLDEN["enc_square.pixels"], GOLDEN["dec_square.latent"]
    mixed = torch.einsum("oi,bihw->bohw", full.quant_conv.weight[:, :, 0, 0], GOLDEN["enc_square.moments"])
    assert_close(full.moments(pixels), mixed + full.quant_conv.bias[:, None, None], LIMIT)
    raw = latents / config.scaling + config.shift
    given = torch.einsum("oi,bihw->bohw", full.post_quant_conv.weight[:, :, 0, 0], raw)
    given = given + full.post_quant_conv.bias[:, None, None]
    assert_close(full.decode(latents)[0], module.decode((given - config.shift) * config.scaling)[0], LIMIT)


def test_every_graph_runs_in_bfloat16(checkpoint: Checkpoint, tmp_path: Path) -> None:
    check_bfloat16(STAGE, checkpoint, tmp_path, 0.999)


@BACKENDS_AND_ONNX
@pytest.mark.parametrize("name", ["decode", "encode"])
def test_one_engine_takes_every_size(
    name: str, module: nn.Module, config: ImageVaeConfig, backend: Backend, tmp_path: Path
) -> None:
    sizes = [{"h": 2, "w": 9}, {"h": 12, "w": 12}]
    check_engine(module, graph_of(STAGE, config, name), sizes, tmp_path, 1e-5, backend)


def test_weights_are_those_of_the_checkpoint_and_all_are_used(
    checkpoint: Checkpoint, config: ImageVaeConfig
) -> None:
    check_sources(STAGE, checkpoint, config)
    assert check_coverage(checkpoint, {STAGE.name: config}, [STAGE]) == []


def test_the_released_checkpoint_has_the_tensors_of_the_specification() -> None:
    """imagegen.md §6 and §10: 0.17 GB in bfloat16; some keys and shapes of either half."""
    sources = STAGE.weights(STAGE.config(open_configs(RELEASED)), Shard())
    read = {source.tensors[0]: tuple(source.shapes[0]) for source in sources}
    assert all(source.name == source.tensors[0] for source in sources)
    assert {
        "encoder.conv_in.weight": (128, 3, 3, 3),
        "encoder.down_blocks.1.resnets.0.conv_shortcut.weight": (256, 128, 1, 1),
        "encoder.down_blocks.2.downsamplers.0.conv.weight": (512, 512, 3, 3),
        "encoder.down_blocks.3.resnets.1.norm2.bias": (512,),
        "encoder.mid_block.attentions.0.to_out.0.weight": (512, 512),
        "encoder.mid_block.attentions.0.group_norm.weight": (512,),
        "encoder.conv_norm_out.weight": (512,),
        "encoder.conv_out.weight": (32, 512, 3, 3),
        "decoder.conv_in.weight": (512, 16, 3, 3),
        "decoder.mid_block.attentions.0.to_q.bias": (512,),
        "decoder.up_blocks.0.resnets.2.conv1.weight": (512, 512, 3, 3),
        "decoder.up_blocks.2.resnets.0.conv_shortcut.weight": (256, 512, 1, 1),
        "decoder.up_blocks.2.upsamplers.0.conv.weight": (256, 256, 3, 3),
        "decoder.up_blocks.3.resnets.0.conv1.weight": (128, 256, 3, 3),
        "decoder.conv_out.weight": (3, 128, 3, 3),
    }.items() <= read.items()
    assert not any(
        "quant_conv" in name or "blocks.3.downsamplers" in name or "blocks.3.upsamplers" in name
        for name in read
    )
    assert round(2 * sum(torch.Size(shape).numel() for shape in read.values()) / 1e9, 2) == 0.17


def test_quant_convolutions_are_there_unless_the_config_says_otherwise(checkpoint: Checkpoint) -> None:
    """As in diffusers' `AutoencoderKL`."""
    given = checkpoint.part("image_vae")
    left = {name: value for name, value in given.config.items() if "quant_conv" not in name}
    config = STAGE.config(checkpoint.with_part(replace(given, config=left)))
    assert config.has_quant_conv and config.has_post_quant_conv


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("act_fn", "relu"),
        ("norm_num_groups", 5),
        ("mid_block_add_attention", False),
        ("latents_mean", [0.1]),
        ("down_block_types", ["DownEncoderBlock2D", "AttnDownEncoderBlock2D"]),
        ("up_block_types", ["UpDecoderBlock2D"]),
        ("in_channels", 4),
        ("shift_factor", None),
        ("block_out_channels", []),
    ],
)
def test_a_config_that_is_not_implemented_is_refused_by_file_and_key(
    key: str, value: Any, checkpoint: Checkpoint
) -> None:
    given = checkpoint.part("image_vae")
    config = {name: each for name, each in {**given.config, key: value}.items() if each is not None}
    with pytest.raises(CheckpointError) as caught:
        STAGE.config(checkpoint.with_part(replace(given, config=config)))
    assert key in caught.value.message and caught.value.where == str(given.config_file)
