"""One graph of one stage, as the worker processes of an export compile, check and time it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mingc.artifacts.manifest import TunedKernel
from mingc.errors import CompileError, ExportError, MingcError, WorkerError, described
from mingc.export.compile.trace import share_weights
from mingc.export.recipe import BACKEND, ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions
from mingc.export.stages import find
from mingc.export.weights.loading import load_module

_OTHER_BACKEND = "compile this stage with another backend: --backend NAME:STAGE"


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphTask:
    """One graph to compile with `backend` and to check.

    Attributes:
        folder: the artifact under construction.
        weights: one folder per rank, relative to `folder`.
        kernel_configs: the timed configurations of the stage's kernels.
    """

    recipe: ExportRecipe
    stage: str
    graph: str
    folder: Path
    weights: tuple[str, ...]
    kernel_configs: tuple[TunedKernel, ...] = ()
    backend: str = BACKEND

    @property
    def name(self) -> str:
        """The graph's name among the graphs of all stages: `cfm.sample`."""
        return f"{self.stage}.{self.graph}"


@dataclass(frozen=True, slots=True)
class OpenGraph:
    """The definition of a task's graph, and its module with the stored weights of rank 0 on the export's device."""

    stage: Stage
    config: Any
    options: StageOptions
    plan: GraphDef
    module: nn.Module


def engine_label(graph: str, static_shapes: dict[str, int] | None) -> str:
    """Name of an engine of the graph `STAGE.GRAPH`, and of its file without a suffix."""
    return graph + "".join(f"-{name}{size}" for name, size in (static_shapes or {}).items())


def open_graph(task: GraphTask) -> OpenGraph:
    """Load what a task compiles or checks. Raises: CheckpointError, ExportError."""
    stage, config, plan = find_graph(task)
    options, shard = stage_options(task.recipe), first_shard(stage, task.recipe)
    module = load_shard(task, stage, config, shard, plan).to(options.device)
    return OpenGraph(stage, config, options, share_weights(plan, module), module)


def find_graph(task: GraphTask) -> tuple[Stage, Any, GraphDef]:
    """The stage, its config and the graph. Raises: ExportError when the stage lacks the graph."""
    stage = find(task.stage)
    config = stage.config(open_source(task.recipe))
    for plan in stage.graphs(config, first_shard(stage, task.recipe), stage_options(task.recipe)):
        if plan.spec.name == task.graph:
            return stage, config, plan
    raise ExportError(f"stage {stage.name} has no graph {task.graph}")


def load_shard(task: GraphTask, stage: Stage, config: Any, shard: Shard, plan: GraphDef) -> nn.Module:
    """The part of the stage's module that the graph runs, with the stored weights of `shard`."""
    quantization = task.recipe.quantization(stage.name)
    path = task.folder / task.weights[shard.rank]
    return load_module(stage, config, shard, path, quantization, submodule=plan.spec.layer_instances[0])


def shards_of(weights: tuple[str, ...]) -> list[Shard]:
    """A shard for each rank's weights."""
    return [Shard(rank=rank, world_size=len(weights)) for rank in range(len(weights))]


@contextmanager
def library_errors(problem: str, where: str) -> Iterator[None]:
    """Convert any error of a library that compiles or runs engines into an error of the export.

    `problem` begins its message. Engines report that their library failed by a WorkerError, as a server expects.
    """
    try:
        yield
    except WorkerError as error:
        raise CompileError(f"{problem}: {error.message}", where=where, fix=_OTHER_BACKEND) from error
    except (MingcError, OSError, torch.OutOfMemoryError, AssertionError):
        raise
    except Exception as error:  # libraries have no common base class
        raise CompileError(f"{problem}: {described(error)}", where=where, fix=_OTHER_BACKEND) from error
