"""Memory that the tasks of an export take, planned from shapes before anything is built.

Sums of what a task holds at the same time; the shapes are those of one layer instance, which is all that a task loads.
What a library needs for itself is in `PROCESS_DEVICE` and `PROCESS_HOST`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mingc.artifacts.spec import TensorSpec, join_path
from mingc.dtypes import torch_dtype
from mingc.export.checkpoint import Checkpoint
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.stage import GraphDef, Shard, Stage, WeightSource
from mingc.export.weights.loading import stored_meta_module

# CUDA context, library workspaces and loaded kernels of a process, also while it is idle.
PROCESS_DEVICE = 1 << 30
PROCESS_HOST = 3 << 29  # torch, its compiler and their modules
# A task that takes so much of a device runs in a process of its own: only the end of a process surely returns what its
# allocator and libraries hold, and thirty idle processes that keep some gigabytes each fill a device.
_OWN_PROCESS = 4 << 30
_COMPILE_HOST = 2 << 30  # graphs, generated code and the C++ compiler of one compile
_ITEM_BYTES = {"F64": 8, "F32": 4, "BF16": 2, "F16": 2}
# Checks of experts: perturbations of a token, times twice the tokens that each expert shall get.
_PERTURBED = 32 * 32


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """Memory of one task in bytes, beside what idle processes hold.

    `has_process`: the task runs in a process of its own, which is counted and ends with it.
    """

    device: int = 0
    host: int = 0
    has_process: bool = False


Needs = Mapping[tuple[str, str], Need]
"""By kind (engine, check, weights, compare) and name (of the graph, or of the stage)."""


def stage_needs(
    recipe: ExportRecipe, checkpoint: Checkpoint, stage: Stage, config: Any, graphs: Sequence[GraphDef]
) -> Needs:
    """What every task of `stage` takes."""
    quantization, dtype = recipe.quantization(stage.name), torch_dtype(recipe.dtype)
    shard, sources = first_shard(stage, recipe), stage.weights(config, Shard())
    stored = stored_meta_module(stage, config, shard, quantization, dtype).state_dict()
    exact = {source.name: _exact_bytes(checkpoint, source) for source in sources}
    is_cuda = recipe.device == "cuda"
    found: dict[tuple[str, str], Need] = {}
    for graph in graphs:
        inside = join_path(graph.spec.layer_instances[0], "")
        weights = {name: value for name, value in stored.items() if name.startswith(inside)}
        held = sum(value.nbytes for value in weights.values())
        whole = sum(size for name, size in exact.items() if name.startswith(inside))
        tensors = _tensor_bytes(recipe, graph)
        name = f"{stage.name}.{graph.spec.name}"
        compiles = _compile_bytes(weights, held, tensors) if is_cuda else 0
        found["engine", name] = _need(compiles, _COMPILE_HOST + (0 if is_cuda else tensors))
        # The module, the engine's weights, and in low precision the other ranks' modules.
        others = 0 if dtype == torch.float32 else shard.world_size - 1
        checks = (2 + others) * held + tensors
        references = whole + (held * shard.world_size if quantization else 0)
        on_host = 2 * references
        if graph.routing is not None and is_cuda:
            # Its references are on the device, too. Experts are stacked there, before the rest is loaded.
            checks += references + _routing_bytes(stage, config, shard)
            on_host = 2 * (references - whole)
        found["check", name] = _need(checks if is_cuda else 0, on_host + tensors + (0 if is_cuda else checks))
    quantized = [
        _count(source) for source in sources if source.quantizable is not None and len(source.tensors) == 1
    ]
    largest = max(exact.values(), default=0)
    # Quantizing computes in float32: the values, their quotients and two temporaries.
    device = 16 * max(quantized, default=0) if quantization is not None and is_cuda else 0
    if recipe.synthetic and is_cuda:
        # Random values are scaled in float32.
        device = max([device, *(8 * math.prod(shape) for source in sources for shape in source.shapes)])
    found["weights", stage.name] = Need(device=device, host=2 * largest)
    found["compare", stage.name] = Need(host=4 * max(_by_half_layer(exact), default=0))
    return found


def _need(device: int, host: int) -> Need:
    """What a compile or a check takes, in a process of its own where it is large."""
    if device < _OWN_PROCESS:
        return Need(device=device, host=host)
    return Need(device=device + PROCESS_DEVICE, host=host + PROCESS_HOST, has_process=True)


def _compile_bytes(weights: Mapping[str, torch.Tensor], held: int, tensors: int) -> int:
    """Device memory of a compile: the module, and what Inductor tries the kernels of a graph with.

    It makes random values of the shapes of all weights and tensors at once; of FP8 in float16 first.
    """
    narrow = max(
        (value.numel() for value in weights.values() if value.dtype == torch.float8_e4m3fn), default=0
    )
    return 2 * held + 2 * narrow + 2 * tensors


def _routing_bytes(stage: Stage, config: Any, shard: Shard) -> int:
    """Device memory of the search for tokens that rounding does not reroute: all perturbed tokens are routed at once.

    At most six float32 copies of an input are there at the same time.
    """
    dims = stage.experts(config, shard)
    if dims is None:
        return 0
    return _PERTURBED * max(1, dims.num_experts // dims.top_k) * 6 * 4 * dims.hidden_size


def _tensor_bytes(recipe: ExportRecipe, graph: GraphDef) -> int:
    """Inputs, outputs and state at the largest sizes that are traced or checked: two copies, and two in float32."""
    options = stage_options(recipe)
    sizes = [{**graph.trace_dims, **(each or {})} for each in options.engine_sizes(graph)]
    sizes += [{**graph.check_dims, **(each or {})} for each in options.engine_sizes(graph)]
    tensors: tuple[TensorSpec, ...] = (*graph.spec.inputs, *graph.spec.outputs, *graph.spec.state)
    return max(
        sum(
            math.prod(each.shape_at(size)) * (2 * torch_dtype(each.dtype).itemsize + 2 * 4)
            for each in tensors
        )
        for size in sizes
    )


def _exact_bytes(checkpoint: Checkpoint, source: WeightSource) -> int:
    """Bytes of a weight in the float32 reference, which keeps routed experts in the checkpoint's dtype."""
    part = checkpoint.parts.get(source.part)
    entry = part.tensors.get(source.tensors[0]) if part is not None and source.tensors else None
    is_routed = source.quantizable == "experts" and len(source.tensors) > 2
    return _count(source) * (_ITEM_BYTES.get(entry.dtype, 4) if is_routed and entry is not None else 4)


def _count(source: WeightSource) -> int:
    return sum(map(math.prod, source.shapes))


def _by_half_layer(sizes: Mapping[str, int]) -> Iterator[int]:
    """Sums of `sizes` by the first three words of their names: `layers.7.feed_forward`."""
    sums: dict[str, int] = {}
    for name, size in sizes.items():
        path = ".".join(name.split(".")[:3])
        sums[path] = sums.get(path, 0) + size
    yield from sums.values()
