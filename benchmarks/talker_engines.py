"""Builds the engines of the talker at the released dims over random weights, in parallel processes."""

from __future__ import annotations

import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mingc.export.backends import aoti
from mingc.export.capture import capture
from mingc.export.stages import find
from mingc.export.stages.base import GraphPlan, Shard, StageOptions
from mingc.export.synthetic import open_synthetic
from mingc.export.weights import part_of

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


def module_of(stage_name: str, dtype: torch.dtype) -> nn.Module:
    """The stage's module on the device over the checkpoint's random weights (the same in every process)."""
    stage = find(stage_name)
    checkpoint = open_synthetic(CONFIGS, "cuda")
    config = stage.config(checkpoint)
    with torch.device("meta"):
        module = stage.build(config, Shard())
    tensors = {}
    for source in stage.weights(config, Shard()):
        part = part_of(checkpoint, source.part)
        assert part is not None
        value = source.make(*[part.read(name) for name in source.tensors])
        if value.is_floating_point():
            value = value.to(source.dtype or dtype)
        tensors[source.name] = value.to("cuda").contiguous()
    module.load_state_dict(tensors, strict=True, assign=True)
    return module.eval().requires_grad_(False)


def plan_of(stage_name: str, graph: str, dtype: torch.dtype = torch.bfloat16) -> GraphPlan:
    stage = find(stage_name)
    config: Any = stage.config(open_synthetic(CONFIGS))
    return next(plan for plan in stage.graphs(config, Shard(), options(dtype)) if plan.spec.name == graph)


def build(stage: str, graph: str, batch: int, folder: Path) -> Built:
    path = folder / f"{stage}.{graph}-B{batch}.pt2"
    module = module_of(stage, torch.bfloat16)
    program = capture(
        plan_of(stage, graph), module, stage=stage, fixed={"B": batch}, device=torch.device("cuda")
    )
    started = time.perf_counter()
    aoti.compile_graph(program, path, device="cuda", cache=None, where=f"{stage}.{graph}")
    return Built(stage=stage, graph=graph, batch=batch, path=path, seconds=time.perf_counter() - started)


def build_all(batches: list[int], folder: Path, jobs: int) -> list[Built]:
    """Every graph at every batch size; the longest compiles start first."""
    tasks = [(*graph, batch) for graph in (GRAPHS[1], GRAPHS[2], GRAPHS[0]) for batch in batches]
    with ProcessPoolExecutor(
        jobs, mp_context=multiprocessing.get_context("spawn"), initializer=_quiet
    ) as pool:
        futures = [pool.submit(build, *task, folder) for task in tasks]
        return [future.result() for future in futures]


def _quiet() -> None:
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    torch.set_num_threads(2)
    warnings.simplefilter("ignore")
