"""Task of a worker process: compile one engine of one graph."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from torch import nn

from mingc.artifacts.artifact import writing
from mingc.artifacts.manifest import EngineRecord
from mingc.export.autotune.tuning import tuned_table
from mingc.export.compile.backend import Backend
from mingc.export.compile.backends import find_backend
from mingc.export.compile.engine_cache import trim
from mingc.export.compile.trace import trace_graph
from mingc.export.cost.graph_cost import count_cost
from mingc.export.process_pool import gives_memory_back, peak_rss_bytes
from mingc.export.tasks.graph_task import GraphTask, OpenGraph, engine_label, library_errors, open_graph
from mingc.kernels.triton.moe_config import use_tuned_configs


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltEngine:
    """A compiled engine, and the peak memory of its process."""

    record: EngineRecord
    peak_rss_bytes: int


@gives_memory_back()
def build_engine(task: GraphTask, static_shapes: dict[str, int] | None) -> BuiltEngine:
    """Trace and compile `task.graph` for the sizes `static_shapes`.

    Raises: CaptureError, CompileError.
    """
    opened = open_graph(task)
    table = {}
    if opened.plan.routing is not None and static_shapes is not None:
        (tokens,) = static_shapes.values()
        table = tuned_table(task.kernel_configs, tokens)
    try:
        with use_tuned_configs(table):
            record = compile_engine(task, opened, static_shapes)
    finally:
        _free_weights(opened.module)
    return BuiltEngine(record=record, peak_rss_bytes=peak_rss_bytes())


def compile_engine(task: GraphTask, opened: OpenGraph, static_shapes: dict[str, int] | None) -> EngineRecord:
    """Trace the opened graph, write its engine for `static_shapes` and count the cost of a call."""
    plan, device = opened.plan, opened.options.device
    backend = find_backend(task.backend).for_graph(plan, static_shapes, task.recipe.target)
    file = f"engines/{engine_label(task.name, static_shapes)}{_suffix(task, backend)}"
    program = trace_graph(backend, plan, opened.module, stage=task.stage, sizes=static_shapes, device=device)
    with writing(task.folder / file), library_errors(f"{backend.name} does not compile the graph", task.name):
        seconds = backend.compile(
            program, task.folder / file, device=task.recipe.target, cache=task.recipe.cache, where=task.name
        )
    if task.recipe.cache is not None:
        trim(task.recipe.cache, task.recipe.cache_gigabytes * 1e9)
    return EngineRecord(
        backend=backend.name,
        file=file,
        dims=static_shapes,
        compile_seconds=round(seconds, 1),
        cost=count_cost(program, plan.spec, static_shapes, plan.typical_dims),
    )


def _free_weights(module: nn.Module) -> None:
    """Free the memory of the module's weights. torch 2.11 keeps references to them after a compile for a GPU."""
    for weight in chain(module.parameters(), module.buffers()):
        storage = weight.untyped_storage()
        if storage.resizable():  # unlike a mapped file
            storage.resize_(0)


def _suffix(task: GraphTask, backend: Backend) -> str:
    """Suffix of an engine file; starts with the backend's name if another backend of the stage has the same suffix."""
    others = [find_backend(name) for name in task.recipe.backends_of(task.stage) if name != backend.name]
    is_shared = any(each.suffix == backend.suffix for each in others)
    return f".{backend.name}{backend.suffix}" if is_shared else backend.suffix
