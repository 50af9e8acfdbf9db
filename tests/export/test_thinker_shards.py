"""Tensor-parallel thinker: every world size compared with one rank, and geometries that do not divide evenly."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from eager_backend import BACKEND as EAGER
from engine_checks import BACKENDS
from mingc_command import CACHE
from thinker_session import compiled_stage, eager_stage
from torch import Tensor, nn

from mingc.errors import ConfigError
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backend import Backend
from mingc.export.compile.trace import capture, share_weights
from mingc.export.layers.decoder import DecoderConfig
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.weights.loading import float32_module, load_module, write_weights
from mingc.numerics.relative_error import relative_error
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.thinker.layers import ThinkerLayers

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")
TOLERANCE = 1e-5


class Lockstep:
    """Collectives between threads of this process, each thread a rank."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._barrier = threading.Barrier(world_size, timeout=60)
        self._parts: dict[int, Tensor] = {}
        self._rank = threading.local()

    def enter(self, rank: int) -> None:
        self._rank.value = rank

    def gather(self, x: Tensor) -> list[Tensor]:
        self._parts[self._rank.value] = x
        self._barrier.wait()
        parts = [self._parts[rank] for rank in sorted(self._parts)]
        self._barrier.wait()
        return parts

    def all_reduce_(self, x: Tensor) -> None:
        x.copy_(torch.stack(self.gather(x.clone())).sum(0))

    def gather_last(self, x: Tensor) -> Tensor:
        return torch.cat(self.gather(x), dim=-1)


def make_module(config: ThinkerConfig, shard: Shard, tensors: dict[str, Tensor]) -> nn.Module:
    """The rank's module with weights from `tensors` (checkpoint names)."""
    with torch.device("meta"):
        module = STAGE.build(config, shard)
    weights = {}
    for source in STAGE.weights(config, shard):
        assert tuple(tuple(tensors[name].shape) for name in source.tensors) == source.shapes
        value = source.compute(*[tensors[name] for name in source.tensors])
        weights[source.name] = value.float() if value.is_floating_point() else value
    module.load_state_dict(weights, assign=True)
    return module


def random_tensors(config: ThinkerConfig) -> dict[str, Tensor]:
    """A checkpoint of `config` in memory."""
    generator = torch.Generator().manual_seed(11)
    tensors = {}
    for source in STAGE.weights(config, Shard()):
        for name, shape in zip(source.tensors, source.shapes, strict=True):
            width = shape[-1] if len(shape) > 1 else 0
            value = torch.randn(shape, generator=generator)
            tensors[name] = value / width**0.5 if width else 1 + 0.1 * value
    return tensors


@dataclass(frozen=True)
class Step:
    """A step of the whole model: its inputs, and the pages of all KV heads before it."""

    kind: str  # prefill or decode
    inputs: dict[str, Tensor]
    pages: dict[str, Tensor]

    def shard_pages(self, config: DecoderConfig, rank: int, world_size: int) -> dict[str, Tensor]:
        """The rank's KV heads of the pages."""
        _, count = config.local_heads(world_size)
        first = rank * config.num_kv_heads // world_size
        return {name: value[:, first : first + count].clone() for name, value in self.pages.items()}


def make_step(config: ThinkerConfig, kind: str) -> Step:
    plans = {plan.spec.name: plan for plan in STAGE.graphs(config, Shard(), StageOptions())}
    attention, embed = plans[f"{kind}_attention"], plans["embed"]
    generator = torch.Generator().manual_seed(5)
    place = attention.example(attention.check_dims, generator)
    tokens = {"N": len(place["residual"])}
    inputs = {**place, **embed.example(tokens, generator)}
    if kind == "decode":
        inputs["embed_kind"].zero_()
    else:
        inputs["last"] = (place["index"] >= 0).sum(0, keepdim=True) - 1
    pages = {
        f"{instance}.{each.name}": torch.randn(place[each.name].shape, generator=generator)
        for instance in attention.spec.layer_instances
        for each in attention.spec.state
    }
    return Step(kind, inputs, pages)


def run_step(stage: LoadedStage, config: ThinkerConfig, step: Step, group: Lockstep, rank: int) -> Tensor:
    """The logits of one rank."""
    group.enter(rank)
    layers = ThinkerLayers(
        stage,
        step.shard_pages(config.decoder, rank, group.world_size),
        vocab_size=config.decoder.vocab_size,
        all_reduce_=group.all_reduce_,
        gather=group.gather_last,
    )
    return layers.prefill(step.inputs)[0] if step.kind == "prefill" else layers.decode(step.inputs)


def run_ranks(stages: Sequence[LoadedStage], config: ThinkerConfig, step: Step) -> list[Tensor]:
    """The logits of every rank, ranks being threads."""
    group = Lockstep(len(stages))
    with ThreadPoolExecutor(len(stages)) as pool:
        ranks = [pool.submit(run_step, stage, config, step, group, rank) for rank, stage in enumerate(stages)]
        return [rank.result(timeout=120) for rank in ranks]


def eager_ranks(config: ThinkerConfig, tensors: dict[str, Tensor], world_size: int) -> list[LoadedStage]:
    shards = [Shard(rank=rank, world_size=world_size) for rank in range(world_size)]
    return [
        eager_stage(make_module(config, shard, tensors), STAGE.graphs(config, shard, StageOptions()))
        for shard in shards
    ]


def check_ranks(config: ThinkerConfig, tensors: dict[str, Tensor], world_size: int, kind: str) -> None:
    step = make_step(config, kind)
    (expected,) = run_ranks(eager_ranks(config, tensors, 1), config, step)
    for logits in run_ranks(eager_ranks(config, tensors, world_size), config, step):
        assert relative_error(logits, expected) < TOLERANCE


@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_agree_with_one(
    world_size: int, kind: str, checkpoint: Checkpoint, config: ThinkerConfig
) -> None:
    """4 query heads and 2 KV heads: at 4 ranks KV heads are stored twice, at 8 every head is."""
    tensors = {
        name: checkpoint.main.read(name) for name in checkpoint.main.tensors if name.startswith("model.")
    }
    check_ranks(config, tensors, world_size, kind)


CHANGES: dict[str, dict[str, int]] = {
    "no dense layer": {"num_dense_layers": 0},
    "dense only": {"num_dense_layers": 3},
    "no shared expert": {"shared_intermediate_size": 0},
    "two shared experts": {"shared_intermediate_size": 64},
    "one KV head": {"num_kv_heads": 1},
    "as many KV heads as heads": {"num_kv_heads": 4},
    "odd vocabulary": {"vocab_size": 577},
    "odd widths": {
        "expert_intermediate_size": 36,
        "dense_intermediate_size": 100,
        "shared_intermediate_size": 20,
    },
    "one group": {"num_expert_groups": 1, "num_kept_groups": 1},
    "one expert a group": {"num_expert_groups": 16, "num_kept_groups": 8},
    "narrow heads": {"head_dim": 64, "rotary_dim": 32},
    "all experts": {"num_kept_groups": 4, "num_experts_per_token": 16},
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_geometries(change: str, config: ThinkerConfig) -> None:
    other = replace(config, decoder=replace(config.decoder, **{"num_layers": 2, **CHANGES[change]}))
    tensors = random_tensors(other)
    for kind in ("prefill", "decode"):
        check_ranks(other, tensors, 4, kind)


def test_tied_head_reads_the_embedding(config: ThinkerConfig) -> None:
    tied = replace(config, is_tied=True)
    module = make_module(tied, Shard(), random_tensors(tied)).state_dict()
    assert torch.equal(module["head.lm_head"], module["embed.word_embeddings"])


def test_heads_that_cannot_be_divided(config: ThinkerConfig) -> None:
    odd = replace(config, decoder=replace(config.decoder, num_heads=6, num_kv_heads=2))
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match="6 query heads cannot be divided among 4 ranks"),
    ):
        STAGE.build(odd, Shard(world_size=4))


def test_ranks_have_one_layout(config: ThinkerConfig) -> None:
    """One engine serves every rank, so names and shapes must not depend on the rank."""
    tensors = random_tensors(config)
    layouts = [
        {
            name: tuple(value.shape)
            for name, value in make_module(config, Shard(rank=rank, world_size=8), tensors)
            .state_dict()
            .items()
        }
        for rank in range(8)
    ]
    assert all(layout == layouts[0] for layout in layouts)


@BACKENDS
def test_compiled_ranks(
    backend: Backend, checkpoint: Checkpoint, config: ThinkerConfig, tmp_path: Path
) -> None:
    """One engine per graph serves both ranks, each with its own weights.

    `backend` makes the graph whose weights are bound: a compiler could keep the weights of the rank that it has seen.
    """
    small = replace(config, decoder=replace(config.decoder, num_layers=3))
    shards = [Shard(rank=rank, world_size=2) for rank in range(2)]
    modules = []
    for shard in shards:
        path = tmp_path / f"rank{shard.rank}"
        write_weights(checkpoint, STAGE, small, shard, torch.float32, path)
        modules.append(load_module(STAGE, small, shard, path))
    plans = [
        share_weights(plan, modules[0].get_submodule(plan.spec.layer_instances[0]))
        for plan in STAGE.graphs(small, shards[0], StageOptions())
    ]
    files = {}
    for plan in plans:
        name = plan.spec.name
        used = backend if name == "head" else EAGER
        part = modules[0].get_submodule(plan.spec.layer_instances[0])
        program = capture(plan, part, stage="thinker", static_shapes=None, device=CPU)
        files[name] = used.name, tmp_path / f"{name}{used.suffix}"
        with torch._inductor.config.patch({"aot_inductor.precompile_headers": False}):  # for one engine
            used.compile(program, files[name][1], device="cpu", cache=CACHE, where=name)
    specs = [plan.spec for plan in plans]
    stages = [
        compiled_stage(specs, {name: load_engine(*file, CPU) for name, file in files.items()}, module)
        for module in modules
    ]
    whole = eager_stage(
        float32_module(STAGE, small, checkpoint), STAGE.graphs(small, Shard(), StageOptions())
    )
    for kind in ("prefill", "decode"):
        step = make_step(small, kind)
        (expected,) = run_ranks([whole], small, step)
        for logits in run_ranks(stages, small, step):
            assert relative_error(logits, expected) < TOLERANCE, kind
