"""The thinker divided among ranks: every world size against one rank, and geometries that do not divide evenly."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compiled_graph import relative_error
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from mingc.errors import ConfigError
from mingc.export.backends.aoti import compile_graph
from mingc.export.capture import capture
from mingc.export.checkpoint import Checkpoint
from mingc.export.layers import decoder as decoder_file
from mingc.export.layers.decoder import DecoderConfig
from mingc.export.stages.base import GraphPlan, Shard, StageOptions
from mingc.export.stages.thinker import STAGE, ThinkerConfig
from mingc.export.tensor_parallel import stand_in_group
from mingc.export.weights import float32_module, load_module, write_weights
from mingc.runtime import distributed

DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")
TOLERANCE = 1e-5


class Lockstep:
    """Collectives between threads of this process, each thread a rank."""

    def __init__(self, world_size: int) -> None:
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

    def all_reduce(self, x: Tensor, world_size: int) -> Tensor:
        return torch.stack(self.gather(x)).sum(0)

    def all_gather_last(self, x: Tensor, world_size: int) -> Tensor:
        return torch.cat(self.gather(x), dim=-1)


def make_module(config: ThinkerConfig, shard: Shard, tensors: dict[str, Tensor]) -> nn.Module:
    """The rank's module, its weights made from `tensors` (checkpoint names)."""
    with torch.device("meta"):
        module = STAGE.build(config, shard)
    weights = {}
    for source in STAGE.weights(config, shard):
        assert tuple(tuple(tensors[name].shape) for name in source.tensors) == source.shapes
        value = source.make(*[tensors[name] for name in source.tensors])
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


def share_state(
    config: DecoderConfig, example: dict[str, Tensor], rank: int, world_size: int
) -> dict[str, Tensor]:
    """The rank's inputs: its KV heads of the whole pools."""
    _, count = config.local_heads(world_size)
    first = rank * config.num_kv_heads // world_size
    return {
        name: value[:, first : first + count].clone() if "pages" in name else value.clone()
        for name, value in example.items()
    }


def plan_of(config: ThinkerConfig, shard: Shard, name: str) -> GraphPlan:
    plans = {plan.spec.name: plan for plan in STAGE.graphs(config, shard, StageOptions())}
    return plans[name]


def run_ranks(
    config: ThinkerConfig,
    tensors: dict[str, Tensor],
    world_size: int,
    graph: str,
    monkeypatch: pytest.MonkeyPatch,
) -> list[Tensor]:
    """The logits of every rank, ranks being threads."""
    group = Lockstep(world_size)
    whole = plan_of(config, Shard(), graph)
    example = whole.example(whole.check_dims, torch.Generator().manual_seed(5))
    logits: dict[int, Tensor] = {}

    def work(rank: int) -> None:
        group.enter(rank)
        module = make_module(config, Shard(rank=rank, world_size=world_size), tensors)
        with torch.no_grad():
            outputs = getattr(module, whole.method)(
                *share_state(config.decoder, example, rank, world_size).values()
            )
        logits[rank] = outputs[0]

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(world_size)]
    with monkeypatch.context() as patched:
        patched.setattr(decoder_file, "all_reduce", group.all_reduce)
        patched.setattr(decoder_file, "all_gather_last", group.all_gather_last)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return [logits[rank] for rank in range(world_size)]


def run_whole(config: ThinkerConfig, tensors: dict[str, Tensor], graph: str) -> Tensor:
    plan = plan_of(config, Shard(), graph)
    example = plan.example(plan.check_dims, torch.Generator().manual_seed(5))
    with torch.no_grad():
        outputs: tuple[Tensor, ...] = getattr(make_module(config, Shard(), tensors), plan.method)(
            *example.values()
        )
    return outputs[0]


@pytest.mark.parametrize("graph", ["prefill", "decode"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ranks_agree_with_one(
    world_size: int,
    graph: str,
    checkpoint: Checkpoint,
    config: ThinkerConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4 query heads and 2 KV heads: at 4 ranks KV heads are kept twice, at 8 every head is."""
    tensors = {
        name: checkpoint.main.read(name) for name in checkpoint.main.tensors if name.startswith("model.")
    }
    expected = run_whole(config, tensors, graph)
    for logits in run_ranks(config, tensors, world_size, graph, monkeypatch):
        assert relative_error(logits, expected) < TOLERANCE


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
def test_other_geometries(change: str, config: ThinkerConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(config, decoder=replace(config.decoder, **{"num_layers": 2, **CHANGES[change]}))
    tensors = random_tensors(other)
    for graph in ("prefill", "decode"):
        expected = run_whole(other, tensors, graph)
        for logits in run_ranks(other, tensors, 4, graph, monkeypatch):
            assert relative_error(logits, expected) < TOLERANCE


def test_tied_head_reads_the_embedding(config: ThinkerConfig) -> None:
    tied = replace(config, is_tied=True)
    module = make_module(tied, Shard(), random_tensors(tied)).state_dict()
    assert torch.equal(module["lm_head"], module["word_embeddings"])


def test_heads_that_cannot_be_shared(config: ThinkerConfig) -> None:
    odd = replace(config, decoder=replace(config.decoder, num_heads=6, num_kv_heads=2))
    with torch.device("meta"), pytest.raises(ConfigError, match="6 query heads cannot be shared by 4 ranks"):
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


def test_compiled_ranks_in_processes(checkpoint: Checkpoint, config: ThinkerConfig, tmp_path: Path) -> None:
    """One engine a graph, two processes over gloo, each with its own weights; neither loads the compiler."""
    small = replace(config, decoder=replace(config.decoder, num_layers=2))
    world_size = 2
    weights: list[Path] = []
    for rank in range(world_size):
        weights.append(tmp_path / f"weights-{rank}.safetensors")
        shard = Shard(rank=rank, world_size=world_size)
        write_weights(checkpoint, STAGE, small, shard, torch.float32, weights[-1])
    module = load_module(STAGE, small, Shard(world_size=world_size), weights[0])
    reference = float32_module(STAGE, small, checkpoint)
    jobs: list[list[dict[str, object]]] = [[] for _ in range(world_size)]
    expected: dict[str, Tensor] = {}
    for plan in STAGE.graphs(small, Shard(world_size=world_size), StageOptions()):
        name = plan.spec.name
        engine = tmp_path / f"{name}.pt2"
        with stand_in_group(world_size):
            program = capture(plan, module, stage="thinker", fixed=None, device=CPU)
            compile_graph(program, engine, device="cpu", cache=None, where=name)
        whole = plan_of(small, Shard(), name)
        example = whole.example(whole.check_dims, torch.Generator().manual_seed(3))
        for rank, job in enumerate(jobs):
            inputs = tmp_path / f"{name}-{rank}.in.safetensors"
            save_file(share_state(small.decoder, example, rank, world_size), inputs)
            names = [spec.name for spec in (*plan.spec.inputs, *plan.spec.state)]
            outputs = tmp_path / f"{name}-{rank}.out.safetensors"
            job.append(
                {"engine": str(engine), "inputs": str(inputs), "outputs": str(outputs), "names": names}
            )
        with torch.no_grad():
            expected[name] = getattr(reference, whole.method)(*example.values())[0]
    run_processes(jobs, weights)
    for name, logits in expected.items():
        for rank in range(world_size):
            got = load_file(tmp_path / f"{name}-{rank}.out.safetensors")["logits"]
            assert relative_error(got, logits) < TOLERANCE, f"{name}, rank {rank}"


def run_processes(jobs: list[list[dict[str, object]]], weights: list[Path]) -> None:
    """One process a rank; raises with the words of the first that fails."""
    store = distributed.host_store(timeout_s=60)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    children = []
    for rank, graphs in enumerate(jobs):
        job = {
            "rank": rank,
            "world_size": len(jobs),
            "port": store.port,
            "weights": str(weights[rank]),
            "graphs": graphs,
        }
        script = Path(__file__).with_name("thinker_rank.py")
        command = [sys.executable, str(script), json.dumps(job)]
        children.append(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment))
    try:
        for child in children:
            _, words = child.communicate(timeout=240)
            assert child.returncode == 0, words
    finally:
        for child in children:
            child.kill()
            child.communicate()
