"""Vision encoder compared with goldens (spec: vision.md): padding, tracing and compilation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from engine_checks import compiled_engine
from safetensors.torch import load_file
from stage_checks import altered, assert_close, check_sources, with_random_weights
from torch import Tensor

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.trace import capture, check_example
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.vision_encoder import STAGE, VisionConfig, VisionEncoder
from mingc.export.weights.loading import float32_module

DATA = Path(__file__).parents[1] / "data"
CASES = ("one", "multi", "video_interleaved_grid", "video_TxHxW_grid")
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    tensors = load_file(DATA / "vision.safetensors")
    tensors["video_TxHxW_grid.pixel_values"] = tensors["video_interleaved_grid.pixel_values"]
    return tensors


def tables(grids: list[list[int]], side: int, merge: int) -> tuple[np.ndarray, ...]:
    """Index, weight, coordinates and segment of the patches of `grids`, computed as in spec: vision.md §4, §5."""
    index, weight, coordinates = [], [], []
    segment: list[list[int]] = []
    for frames, height, width in grids:
        rows, cols = np.linspace(0, side - 1, height), np.linspace(0, side - 1, width)
        for _ in range(frames):
            start = len(segment)
            for block_row in range(0, height, merge):
                for block_col in range(0, width, merge):
                    for row in range(block_row, block_row + merge):
                        for col in range(block_col, block_col + merge):
                            y, x = int(rows[row]), int(cols[col])
                            dy, dx = rows[row] - y, cols[col] - x
                            y1, x1 = min(y + 1, side - 1), min(x + 1, side - 1)
                            index.append([y * side + x, y * side + x1, y1 * side + x, y1 * side + x1])
                            weight.append([(1 - dy) * (1 - dx), (1 - dy) * dx, dy * (1 - dx), dy * dx])
                            coordinates.append([row, col])
                            segment.append([start, start + height * width])
    return np.array(index), np.array(weight, np.float32), np.array(coordinates), np.array(segment, np.int32)


def inputs_for(config: VisionConfig, pixels: Tensor, grids: list[list[int]]) -> tuple[Tensor, ...]:
    """The five inputs of `encode`."""
    group = config.patches_per_token
    made = (torch.from_numpy(table) for table in tables(grids, config.position_grid_size, config.merge_size))
    return tuple(tensor.view(-1, group, tensor.shape[1]) for tensor in (pixels, *made))


def pad(inputs: tuple[Tensor, ...], num_tokens: int) -> tuple[Tensor, ...]:
    """`inputs` in a bucket of `num_tokens`: each padding token is a frame with noise as pixels."""
    own, group = inputs[0].shape[:2]
    padded = [torch.cat((t, t.new_zeros(num_tokens - own, *t.shape[1:]))) for t in inputs]
    padded[0][own:] = torch.randn(num_tokens - own, *inputs[0].shape[1:], dtype=inputs[0].dtype)
    for token in range(own, num_tokens):
        padded[4][token] = torch.tensor([token * group, (token + 1) * group], dtype=torch.int32)
    return tuple(padded)


@pytest.mark.parametrize("case", CASES)
def test_embeddings_match_golden(
    case: str, module: VisionEncoder, config: VisionConfig, golden: dict[str, Tensor]
) -> None:
    grids = golden[f"{case}.grid_thw"].tolist()
    (embeddings,) = module.encode(*inputs_for(config, golden[f"{case}.pixel_values"], grids))
    assert_close(embeddings, golden[f"{case}.embeds"])
    torch.testing.assert_close(embeddings.norm(dim=-1), torch.ones(len(embeddings)))


@pytest.mark.parametrize("case", CASES[:3])
def test_intermediates_match_golden(
    case: str, module: VisionEncoder, config: VisionConfig, golden: dict[str, Tensor]
) -> None:
    seen: dict[str, Any] = {}
    watched = {"patch_embed": module.patch_embed, "merger": module.merger, "projector": module.projector}
    watched |= {f"block{index}": block for index, block in enumerate(module.blocks)}
    handles = [
        part.register_forward_hook(lambda _module, _inputs, output, name=name: seen.update({name: output}))
        for name, part in watched.items()
    ]
    inputs = inputs_for(config, golden[f"{case}.pixel_values"], golden[f"{case}.grid_thw"].tolist())
    module.encode(*inputs)
    for handle in handles:
        handle.remove()
    assert_close(seen["patch_embed"], golden[f"{case}.patch_embed"])
    for index, block_out in enumerate(golden[f"{case}.block_out"]):
        stream, update = seen[f"block{index}"]
        assert_close(stream + update, block_out)
    assert_close(seen["merger"], golden[f"{case}.vision_out"])
    assert_close(seen["projector"], golden[f"{case}.proj"])
    positions = module.interpolate_positions(inputs[1].flatten(0, 1), inputs[2].flatten(0, 1))
    assert_close(positions, golden[f"{case}.pos_embed_interp"])
    assert_close(module.rotary_angles(inputs[3].flatten(0, 1)), golden[f"{case}.rot_pos_emb"])


def test_patch_embedding_is_the_convolution(
    module: VisionEncoder, checkpoint: Checkpoint, config: VisionConfig, golden: dict[str, Tensor]
) -> None:
    pixels = golden["one.pixel_values"]
    kernel = checkpoint.main.read("vision.patch_embed.proj.weight").float()
    bias = checkpoint.main.read("vision.patch_embed.proj.bias").float()
    volume = pixels.view(-1, *kernel.shape[1:])
    convolved = F.conv3d(volume, kernel, bias, stride=kernel.shape[2:]).flatten(1)
    assert_close(module.patch_embed(pixels), convolved)


def test_full_size_grid_reproduces_the_table(module: VisionEncoder, config: VisionConfig) -> None:
    side = config.position_grid_size
    index, weight, coordinates, _ = tables([[1, side, side]], side, config.merge_size)
    positions = module.interpolate_positions(torch.from_numpy(index), torch.from_numpy(weight))
    rows = torch.from_numpy(coordinates[:, 0] * side + coordinates[:, 1])
    torch.testing.assert_close(positions, module.position_table[rows])


def test_what_the_module_keeps_in_float32_is_stored_so(config: VisionConfig) -> None:
    """Tables stay float32 in any export, because bfloat16 would round them again."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            state = STAGE.build(config, Shard()).state_dict()
    finally:
        torch.set_default_dtype(default)
    kept = {name for name, value in state.items() if value.dtype == torch.float32}
    stored = {source.name for source in STAGE.weights(config, Shard()) if source.dtype == torch.float32}
    assert kept == stored and "position_table" in kept


def test_images_of_a_batch_are_independent(
    module: VisionEncoder, config: VisionConfig, golden: dict[str, Tensor]
) -> None:
    first, second = golden["multi.grid_thw"].tolist()
    pixels = golden["multi.pixel_values"]
    split = first[1] * first[2]
    alone = [
        module.encode(*inputs_for(config, part, [grid]))[0]
        for part, grid in ((pixels[:split], first), (pixels[split:], second))
    ]
    assert_close(torch.cat(alone), golden["multi.embeds"])


@pytest.mark.parametrize("bucket", [11, 16, 64])
def test_padding_never_changes_results(
    bucket: int, module: VisionEncoder, config: VisionConfig, golden: dict[str, Tensor]
) -> None:
    inputs = inputs_for(config, golden["multi.pixel_values"], golden["multi.grid_thw"].tolist())
    (padded,) = module.encode(*pad(inputs, bucket))
    assert padded.isfinite().all()
    assert_close(padded[:10], golden["multi.embeds"])


def test_bfloat16_stays_near_golden(
    checkpoint: Checkpoint, config: VisionConfig, golden: dict[str, Tensor]
) -> None:
    module = float32_module(STAGE, config, checkpoint)
    assert isinstance(module, VisionEncoder)
    kept = {"position_table", "inverse_frequency"}
    halved = {n: t if n in kept else t.bfloat16() for n, t in module.state_dict().items()}
    module.load_state_dict(halved, assign=True)
    inputs = inputs_for(config, golden["multi.pixel_values"], golden["multi.grid_thw"].tolist())
    (embeddings,) = module.encode(inputs[0].bfloat16(), *inputs[1:])
    assert embeddings.dtype == torch.bfloat16
    assert F.cosine_similarity(embeddings.float(), golden["multi.embeds"]).min() > 0.999


def test_weight_sources_match_module_and_checkpoint(checkpoint: Checkpoint, config: VisionConfig) -> None:
    used = {name for source in check_sources(STAGE, checkpoint, config) for name in source.tensors}
    ignored = tuple(prefix for prefix, _why in STAGE.ignored(checkpoint))
    stored = [name for name in checkpoint.main.tensors if name.startswith(("vision.", "linear_proj."))]
    assert [name for name in stored if name not in used and not name.startswith(ignored)] == []
    assert not any(name.startswith(ignored) for name in used)


def odd_configs(config: VisionConfig) -> list[VisionConfig]:
    """Geometries that differ from the tiny and the released model."""
    return [
        replace(config, depth=1, width=40, num_heads=5, mlp_width=33, projector_depth=1, patch_size=14),
        replace(config, depth=2, merge_size=3, temporal_patch_size=1, in_channels=1, patch_size=4),
        replace(
            config, position_grid_size=7, merger_width=24, hidden_size=20, projector_depth=4, gelu="none"
        ),
        replace(config, width=72, num_heads=1, merge_size=1),
    ]


@pytest.mark.parametrize("which", range(4))
def test_other_geometries_trace_with_any_number_of_tokens(which: int, config: VisionConfig) -> None:
    config = odd_configs(config)[which]
    module = with_random_weights(VisionEncoder(config))
    for source in STAGE.weights(config, Shard()):
        value = source.compute(*[torch.zeros(shape) for shape in source.shapes])
        assert value.shape == module.state_dict()[source.name].shape, source.name
    (plan,) = STAGE.graphs(config, Shard(), StageOptions())
    program = capture(plan, module, stage=STAGE.name, static_shapes=None, device=CPU)
    for tokens in (1, 2, 7, 30):
        example = plan.example({"M": tokens}, torch.Generator().manual_seed(tokens))
        check_example(plan.spec, example, {"M": tokens}, STAGE.name)
        inputs = tuple(example[tensor.name] for tensor in plan.spec.inputs)
        (traced,), (eager,) = program.module()(*inputs), module.encode(*inputs)
        assert traced.shape == (tokens, config.hidden_size)
        assert_close(traced, eager, 1e-5)


def test_compiled_engine_matches_golden_at_every_size(
    module: VisionEncoder, config: VisionConfig, golden: dict[str, Tensor], compiled_artifact: Path
) -> None:
    (plan,) = STAGE.graphs(config, Shard(), StageOptions())
    engine = compiled_engine(compiled_artifact, STAGE.name, "encode")
    engine.bind(module.state_dict())
    for case in CASES:
        inputs = inputs_for(config, golden[f"{case}.pixel_values"], golden[f"{case}.grid_thw"].tolist())
        own = len(inputs[0])
        for bucket in (own, 16, 33):
            (embeddings,) = engine.run(pad(inputs, bucket))
            assert_close(embeddings[:own], golden[f"{case}.embeds"])
    for tokens in (1, 2, 3, 100):
        example = plan.example({"M": tokens}, torch.Generator().manual_seed(tokens))
        inputs = tuple(example[tensor.name] for tensor in plan.spec.inputs)
        assert_close(engine.run(inputs)[0], module.encode(*inputs)[0])


def test_released_geometry_has_the_released_size(config: VisionConfig) -> None:
    released = replace(
        config,
        depth=27,
        width=1152,
        mlp_width=4304,
        num_heads=16,
        position_grid_size=48,
        merger_width=4096,
        hidden_size=4096,
    )
    with torch.device("meta"):
        weights = STAGE.build(released, Shard()).state_dict()
    total = sum(tensor.numel() for name, tensor in weights.items() if name != "inverse_frequency")
    # spec: checkpoint.md §7: vision without the deepstack mergers, and the projector.
    assert total == 576_388_336 - 120_377_856 + 33_562_624
    assert len(weights["inverse_frequency"]) == 18


def test_static_buckets_reach_the_largest_image_where_no_mask_is_needed(config: VisionConfig) -> None:
    options = StageOptions(static_buckets=True, device="cuda", dtype=torch.bfloat16)
    (plan,) = STAGE.graphs(config, Shard(), options)
    dim = plan.spec.dim("M")
    assert (dim.buckets[0], dim.buckets[-1], dim.maximum) == (64, 16384, 16384)
    assert [tensor.dtype for tensor in plan.spec.inputs] == ["bfloat16", "int64", "float32", "int64", "int32"]
    assert STAGE.parameters(config, options).max_patches == 65536
    for each, smallest in ((StageOptions(), 1), (StageOptions(static_buckets=True), 64)):  # a CPU, RTX cards
        assert STAGE.parameters(config, each).max_patches == 16384
        (plan,) = STAGE.graphs(config, Shard(), each)
        assert plan.spec.dim("M").buckets[0] == smallest


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("vision_config", "depth"), None, "vision_config.depth is missing"),
        (("mlp_depth",), None, "mlp_depth is missing"),
        (("vision_config", "num_heads"), 5, "not a multiple of 4 × num_heads 5"),
        (("vision_config", "num_position_embeddings"), 143, "143 is not a square"),
        (("vision_config", "hidden_act"), "relu", "hidden_act is 'relu'; supported: gelu_pytorch_tanh"),
        (("vision_config", "patch_size"), 14, "patch_size is 16, but vision_config of config.json has 14"),
    ],
)
def test_config_errors_name_the_key(
    checkpoint: Checkpoint, path: tuple[str, ...], value: object, words: str
) -> None:
    with pytest.raises(CheckpointError) as caught:
        STAGE.config(altered(checkpoint, *path, value=value))
    assert words in caught.value.message
    assert caught.value.where


def test_missing_preprocessor_config_says_where_to_get_it(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        STAGE.config(replace(checkpoint, root=tmp_path))
    assert "preprocessor_config.json" in str(caught.value)
    (tmp_path / "preprocessor_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"missing key.*image_mean"):
        STAGE.config(replace(checkpoint, root=tmp_path))
