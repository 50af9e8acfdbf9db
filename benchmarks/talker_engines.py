"""Builds the talker's engines at the released dims with random weights, in parallel processes."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from harness import compiler_pool
from torch import nn

from mingc.artifacts.spec import Quantization
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backends import aoti
from mingc.export.compile.trace import capture
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.weights.quantization import prepare, stored_tensors

CONFIGS = Path(__file__).resolve().parent / "released"
GRAPHS = (("talker", "step"), ("cfm", "sample"), ("audio_vae", "stream"))


@dataclass(frozen=True, kw_only=True)
class Built:
    """One engine file and how long its compilation took."""

    stage: str
    graph: str
    batch: int
    path: Path
    seconds: float


def options(dtype: torch.dtype = torch.bfloat16) -> StageOptions:
    sizes = (1, 2, 4, 8, 16, 32, 64)
    return StageOptions(dtype=dtype, device="cuda", static_buckets=True, batch_sizes=sizes)


def module_of(stage_name: str, dtype: torch.dtype, quantization: Quantization | None = None) -> nn.Module:
    """The stage's module on the device over the checkpoint's random weights (the same in every process)."""
    return load_module(find(stage_name), open_synthetic(CONFIGS, "cuda"), dtype, "cuda", quantization)


def load_module(
    stage: Stage,
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: str,
    quantization: Quantization | None = None,
) -> nn.Module:
    """The module of `stage` on `device` over the weights of `checkpoint`, as an export stores them."""
    config = stage.config(checkpoint)
    sources = stage.weights(config, Shard())
    with torch.device("meta"):
        module = prepare(stage.build(config, Shard()), sources, quantization)
    tensors = {}
    for source in sources:
        part = checkpoint.parts.get(source.part)
        assert part is not None
        value = source.compute(*[part.read(name) for name in source.tensors])
        plain = source.dtype or (dtype if value.is_floating_point() else value.dtype)
        for name, tensor in stored_tensors(source, value, quantization, plain).items():
            tensors[name] = tensor.to(device).contiguous()
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def plan_of(stage_name: str, graph: str, dtype: torch.dtype = torch.bfloat16) -> GraphDef:
    stage = find(stage_name)
    config: Any = stage.config(open_synthetic(CONFIGS))
    return next(plan for plan in stage.graphs(config, Shard(), options(dtype)) if plan.spec.name == graph)


def engine_file(stage: str, graph: str, batch: int, quantization: Quantization | None) -> str:
    """The engine's file name in the folder of engines."""
    return f"{stage}.{graph}-B{batch}{f'-{quantization}' if quantization else ''}.pt2"


def build(stage: str, graph: str, batch: int, folder: Path, quantization: Quantization | None) -> Built:
    path = folder / engine_file(stage, graph, batch, quantization)
    module = module_of(stage, torch.bfloat16, quantization)
    program = capture(
        plan_of(stage, graph), module, stage=stage, static_shapes={"B": batch}, device=torch.device("cuda")
    )
    started = time.perf_counter()
    aoti.compile_graph(program, path, device="cuda", cache=None, where=f"{stage}.{graph}")
    return Built(stage=stage, graph=graph, batch=batch, path=path, seconds=time.perf_counter() - started)


def build_all(
    batches: list[int], folder: Path, jobs: int, quantization: Quantization | None = None
) -> list[Built]:
    """Every graph at every batch size; the longest compiles start first."""
    tasks = [(*graph, batch) for graph in (GRAPHS[1], GRAPHS[2], GRAPHS[0]) for batch in batches]
    with compiler_pool(jobs) as pool:
        futures = [pool.submit(build, *task, folder, quantization) for task in tasks]
        return [future.result() for future in futures]
