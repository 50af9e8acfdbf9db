"""Quantized weights: stored values, results of modules that read them, and the reported loss."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_checks import BACKENDS, check_engine
from safetensors import safe_open
from stage_checks import graph_of
from torch import Tensor, nn

from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.spec import Quantization
from mingc.errors import ExportError
from mingc.export.checkpoint import Checkpoint
from mingc.export.checks.eager_reference import run_eager
from mingc.export.checks.quantization_error import decoder_quantization_error
from mingc.export.compile.backend import Backend
from mingc.export.recipe import ExportRecipe
from mingc.export.stage import GraphDef, Shard, Stage, WeightSource
from mingc.export.stages import find
from mingc.export.tasks.quantization import measure_quantization_error
from mingc.export.weights.loading import float32_module, load_module, write_weights
from mingc.export.weights.quantization import in_float32, prepare, stored_names, stored_tensors
from mingc.kernels.quantized import dequantize, quantize_int4
from mingc.numerics.relative_error import relative_error

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
# Limit on the relative error of any output of the tiny stages; random weights of these sizes give 0.04 to 0.13.
MAX_ERROR = 0.2


def plan_of(stage: str, graph: str, checkpoint: Checkpoint) -> GraphDef:
    return graph_of(find(stage), find(stage).config(checkpoint), graph)


def rounded_module(stage: Stage, config: object, checkpoint: Checkpoint, module: nn.Module) -> nn.Module:
    """The float32 module with the dequantized weights of `module`."""
    state = module.state_dict()
    reference = float32_module(stage, config, checkpoint)
    names = [name for name in state if name + "_scale" in state]
    assert names
    values = {name: dequantize(state[name], state[name + "_scale"], torch.float32) for name in names}
    # Assigned, not copied: the float32 module reads from the memory-mapped checkpoint itself.
    reference.load_state_dict(values, strict=False, assign=True)
    return reference


@pytest.mark.parametrize(
    ("name", "graph"), [("talker", "step"), ("talker", "prefill"), ("cfm", "sample"), ("audio_vae", "stream")]
)
def test_a_stage_computes_with_its_quantized_weights(
    name: str, graph: str, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    stage, plan = find(name), plan_of(name, graph, checkpoint)
    config = stage.config(checkpoint)
    sizes = {
        kind: write_weights(checkpoint, stage, config, Shard(), torch.float32, tmp_path / "weights", kind)
        for kind in (None, "fp8")
    }
    assert sizes["fp8"] < sizes[None]
    module = load_module(stage, config, Shard(), tmp_path / "weights", "fp8")
    example = plan.example(plan.check_dims, torch.Generator().manual_seed(1))
    got = run_eager(plan, module, example)
    stored = run_eager(plan, rounded_module(stage, config, checkpoint, module), example)
    exact = run_eager(plan, float32_module(stage, config, checkpoint), example)
    for key, value in got.items():
        assert relative_error(value, stored[key]) < 1e-6, key
    worst = max(relative_error(value, exact[key]) for key, value in got.items())
    assert 1e-4 < worst < MAX_ERROR


def test_only_weight_matrices_of_layers_are_quantized(checkpoint: Checkpoint, tmp_path: Path) -> None:
    stage = find("audio_vae")
    config = stage.config(checkpoint)
    write_weights(checkpoint, stage, config, Shard(), torch.bfloat16, tmp_path / "weights", "fp8")
    with safe_open(tmp_path / "weights/000.safetensors", framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    quantized = {name for name, value in tensors.items() if value.dtype == torch.float8_e4m3fn}
    layers = config.decoder.stack.num_layers
    assert quantized == {
        f"decoder.stack.layers.{layer}.{matrix}.weight"
        for layer in range(layers)
        for matrix in ("qkv", "out", "gate_up", "down")
    }
    for name in quantized:
        scale = tensors[name + "_scale"]
        assert (scale.dtype, scale.shape) == (torch.float32, tensors[name].shape[:1])


@BACKENDS
def test_a_captured_graph_runs_with_quantized_weights(
    checkpoint: Checkpoint, tmp_path: Path, backend: Backend
) -> None:
    stage = find("talker")
    config = stage.config(checkpoint)
    write_weights(checkpoint, stage, config, Shard(), torch.float32, tmp_path / "weights", "fp8")
    module = load_module(stage, config, Shard(), tmp_path / "weights", "fp8")
    check_engine(module, plan_of("talker", "step", checkpoint), [{"B": 1}, {"B": 3}], tmp_path, 1e-5, backend)


def experts_source() -> WeightSource:
    return WeightSource(name="experts.down", part="main", quantizable="experts")


def test_int4_quantizes_experts_to_int4_and_the_rest_to_fp8() -> None:
    value = torch.randn(3, 8, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    stored = stored_tensors(experts_source(), value, "int4", torch.bfloat16)
    weight, scale = quantize_int4(value)
    assert torch.equal(stored["experts.down"], weight)
    assert torch.equal(stored["experts.down_scale"], scale)
    given = stored_tensors(experts_source(), value, "int4", torch.bfloat16, torch.device("cpu"))
    assert all(torch.equal(given[name], tensor) for name, tensor in stored.items())
    linear = WeightSource(name="dense", part="main", quantizable="linear")
    assert stored_tensors(linear, value[0], "int4", torch.bfloat16)["dense"].dtype == torch.float8_e4m3fn
    assert stored_names(experts_source(), None) == ("experts.down",)


def test_a_float32_module_keeps_its_stored_weights_and_their_scales() -> None:
    """FP8 values without their scale are other weights: they are dequantized where they are used."""
    module = nn.Module()
    stored, plain = torch.randn(4, 8).to(torch.float8_e4m3fn), torch.randn(3).bfloat16()
    module.register_parameter("weight", nn.Parameter(stored, requires_grad=False))
    module.register_parameter("weight_scale", nn.Parameter(torch.rand(4), requires_grad=False))
    module.register_parameter("bias", nn.Parameter(plain, requires_grad=False))
    in_float32(module)
    assert (module.weight.dtype, module.weight_scale.dtype) == (torch.float8_e4m3fn, torch.float32)
    assert torch.equal(module.bias, plain.float()) and module.bias.dtype == torch.float32


@pytest.mark.parametrize("kind", ["fp8", "int4"])
def test_prepare_registers_parameters_of_the_stored_shapes(kind: Quantization) -> None:
    module = nn.Module()
    with torch.device("meta"):
        inner = nn.Module()
        inner.register_parameter("down", nn.Parameter(torch.empty(3, 8, 192)))
        inner.register_parameter("down_scale", None)
    module.add_module("experts", inner)
    prepare(module, [experts_source()], kind)
    value = torch.randn(3, 8, 192, generator=torch.Generator().manual_seed(0))
    stored = stored_tensors(experts_source(), value, kind, torch.bfloat16)
    module.load_state_dict(stored, strict=True, assign=True)
    back = dequantize(inner.get_parameter("down"), inner.get_parameter("down_scale"), torch.float32)
    assert (back - value).norm() / value.norm() < 0.12


def test_a_module_without_a_scale_parameter_is_refused() -> None:
    module = nn.Module()
    module.add_module("experts", nn.Linear(4, 4))
    module.experts.register_parameter("down", nn.Parameter(torch.empty(2, 4, 4)))
    with pytest.raises(ExportError, match="no parameter down_scale"):
        prepare(module, [experts_source()], "fp8")


def recipe(*words: str) -> ExportRecipe:
    return ExportRecipe(checkpoint=TINY, output=Path("out"), quantize=words)


@pytest.mark.parametrize(("kind", "world_size"), [("fp8", 1), ("int4", 2)])
def test_quantization_error_of_the_thinker(
    kind: Quantization, world_size: int, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    """Every layer has the loss of its format for any number of ranks; no loss is reported as zero."""
    stage = find("thinker")
    config = stage.config(checkpoint)

    def measure(quantization: Quantization | None) -> QuantizationError:
        files = []
        for rank in range(world_size):
            shard = Shard(rank=rank, world_size=world_size)
            files.append(f"{quantization}{rank}")
            path = tmp_path / files[-1]
            write_weights(checkpoint, stage, config, shard, torch.float32, path, quantization)
        words = () if quantization is None else (f"thinker={quantization}",)
        made = measure_quantization_error(recipe(*words), "thinker", tmp_path, tuple(files))
        assert made is not None
        return made

    exact, lossy = measure(None), measure(kind)
    assert min(exact.layer_cosine) > 0.99999
    assert exact.logit_kl < 1e-6
    assert exact.same_argmax == 1.0
    least = {"fp8": 0.99, "int4": 0.96}[kind]
    assert len(lossy.layer_cosine) == config.decoder.num_layers
    assert all(least < value < 0.9999 for value in lossy.layer_cosine)
    assert all(value == pytest.approx(1, abs=1e-4) for value in exact.layer_scale)
    assert len(lossy.layer_scale) == config.decoder.num_layers
    assert all(least < value < 1.01 and value != 1 for value in lossy.layer_scale)
    assert 0.01 < lossy.logit_kl < 1.0
    assert lossy.same_argmax < 1.0


class Columns(nn.Module):
    """A part of the head: the same logits (T, n) for every residual stream."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, residual: Tensor, delta: Tensor) -> tuple[Tensor]:
        return (self.logits,)


class Silent(nn.Module):
    """An embedding (T, 1) of zeros, without positions."""

    def forward(self, ids: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        return (torch.zeros(len(ids), 1),) * 4


def test_the_divergence_weighs_by_the_exact_distribution(checkpoint: Checkpoint) -> None:
    """A decoder without layers, whose heads give (3/4, 1/4) and, quantized, (1/2, 1/2) for every second token."""
    decoder = replace(find("thinker").config(checkpoint).decoder, num_layers=0, vocab_size=2)
    exact = torch.tensor([0.75, 0.25]).log().repeat(64, 1) + 3.0
    stored = torch.cat([exact, torch.full((64, 1), 9.0)], dim=1)  # a row beyond the vocabulary
    stored[::2, :2] = -5.0
    found = decoder_quantization_error(
        decoder,
        lambda path: Silent() if path == "embed" else Columns(exact),
        lambda path: [Columns(stored[:, :1]), Columns(stored[:, 1:])],
    )
    # 0.131; the divergence in the other direction is 0.144.
    expected = 0.75 * math.log(0.75 / 0.5) + 0.25 * math.log(0.25 / 0.5)
    assert found.logit_kl == pytest.approx(expected / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "formats"),
    [("fp8", {torch.float8_e4m3fn}), ("int4", {torch.float8_e4m3fn, torch.uint8})],
)
def test_formats_of_the_thinker(
    kind: Quantization, formats: set[torch.dtype], checkpoint: Checkpoint, tmp_path: Path
) -> None:
    stage = find("thinker")
    config = stage.config(checkpoint)
    write_weights(checkpoint, stage, config, Shard(), torch.bfloat16, tmp_path / "weights", kind)
    with safe_open(tmp_path / "weights/000.safetensors", framework="pt") as file:
        names = set(file.keys())
        dtypes = {name: file.get_tensor(name).dtype for name in names}
    quantized = {name for name in names if name + "_scale" in names}
    assert {dtypes[name] for name in quantized} == formats
    experts = {name for name in quantized if dtypes[name] == torch.uint8}
    assert all(".feed_forward." in name and "layers.0." not in name for name in experts)
    kept = {name.rpartition(".")[2] for name in names - quantized if not name.endswith("_scale")}
    tables = {"word_embeddings", "inv_freq", "position_rows"}
    assert kept == tables | {"norm", "q_norm", "k_norm", "weight", "bias"}  # the last two are the router's
