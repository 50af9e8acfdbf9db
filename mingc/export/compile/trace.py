"""Trace one graph of a stage: `torch.export` with the dims of its spec, as a backend compiles it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from mingc.artifacts.spec import GraphSpec
from mingc.dtypes import torch_dtype
from mingc.errors import CaptureError, described
from mingc.export.compile.backend import Backend
from mingc.export.stage import GraphDef
from mingc.kernels.dispatch import plain_torch


class _Entry(nn.Module):
    """Calls one method of the stage's module, so that several graphs share one set of weight names (`model.…`)."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model = model
        self._method = method

    def forward(self, *tensors: torch.Tensor) -> Any:
        return getattr(self.model, self._method)(*tensors)


class _SharedEntry(nn.Module):
    """Calls an entry with weights that follow the other tensors, in the order of `names`.

    An engine could also be bound to each layer's weights in turn. But after rebinding, it folds its constants at the
    next run and waits for the device (torch 2.13), which a CUDA graph cannot contain.
    """

    def __init__(self, entry: _Entry, names: tuple[str, ...]) -> None:
        super().__init__()
        self._hidden = [entry]  # not a submodule: its own weights are no part of the graph
        self._names = tuple(f"model.{name}" for name in names)

    def forward(self, *tensors: torch.Tensor) -> Any:
        count = len(self._names)
        weights = dict(zip(self._names, tensors[-count:], strict=True))
        return torch.func.functional_call(self._hidden[0], weights, tensors[:-count])


def trace_graph(
    backend: Backend,
    plan: GraphDef,
    module: nn.Module,
    *,
    stage: str,
    sizes: Mapping[str, int] | None,
    device: str,
) -> torch.export.ExportedProgram:
    """`plan` as `backend` compiles it for `sizes`. Raises: CaptureError."""
    static = {**(sizes or {}), **backend.pool_dims}
    # Backends that cannot compile mingc's kernels get a graph of plain torch operators.
    with nullcontext() if backend.takes_kernels else plain_torch():
        return capture(plan, module, stage=stage, static_shapes=static, device=torch.device(device))


def share_weights(plan: GraphDef, module: nn.Module) -> GraphDef:
    """`plan` with the weights of `module` as arguments if several layer instances share its engines."""
    if len(plan.spec.layer_instances) == 1:
        return plan
    return replace(plan, spec=replace(plan.spec, weights=tuple(module.state_dict())))


def capture(
    plan: GraphDef,
    module: nn.Module,
    *,
    stage: str,
    static_shapes: Mapping[str, int] | None,
    device: torch.device,
) -> torch.export.ExportedProgram:
    """Trace `plan.method` of `module`; weights that the spec names become arguments after the state.

    `static_shapes` maps dims to the sizes they are compiled for; a dim with a single size is static as well. Every
    other dim of the spec stays dynamic in its range.

    Raises: CaptureError with torch's message.
    """
    single = {dim.name: dim.minimum for dim in plan.spec.dims if dim.minimum == dim.maximum}
    static = {**single, **(static_shapes or {})}
    sizes = {**plan.trace_dims, **static}
    example = plan.example(sizes, torch.Generator().manual_seed(0))
    arguments = tuple(example[tensor.name].to(device) for tensor in (*plan.spec.inputs, *plan.spec.state))
    check_example(plan.spec, example, sizes, stage)
    dynamic = _dynamic_shapes(plan.spec, frozenset(static))
    entry: nn.Module = _Entry(module, plan.method)
    if plan.spec.weights:
        entry = _SharedEntry(_Entry(module, plan.method), plan.spec.weights)
        weights = module.state_dict()
        arguments += tuple(weights[name] for name in plan.spec.weights)
        dynamic += tuple({} for _ in plan.spec.weights)
    try:
        with torch.no_grad():
            return torch.export.export(entry, arguments, dynamic_shapes={"tensors": dynamic}, strict=False)
    except Exception as error:  # torch.export raises many kinds; all mean that the graph cannot be captured
        raise CaptureError(
            f"torch.export refused the graph: {described(error)}", where=f"{stage}.{plan.spec.name}"
        ) from error


def check_example(
    spec: GraphSpec, example: Mapping[str, torch.Tensor], sizes: Mapping[str, int], stage: str
) -> None:
    """Raise CaptureError when an example tensor differs from the spec."""
    for tensor in (*spec.inputs, *spec.state):
        shape = tensor.shape_at(sizes)
        value = example[tensor.name]
        if tuple(value.shape) != shape or value.dtype != torch_dtype(tensor.dtype):
            raise CaptureError(
                f"example {tensor.name} is {value.dtype} {list(value.shape)}, spec says {tensor.dtype} {list(shape)}",
                where=f"{stage}.{spec.name}",
            )


def _dynamic_shapes(spec: GraphSpec, static_shapes: frozenset[str]) -> tuple[dict[int, Any], ...]:
    dims: dict[str, Any] = {}
    for dim in spec.dims:
        if dim.name in static_shapes:
            continue
        if dim.multiple == 1:
            dims[dim.name] = torch.export.Dim(dim.name, min=dim.minimum, max=dim.maximum)
        else:
            base = torch.export.Dim(
                f"{dim.name}_units", min=max(1, dim.minimum // dim.multiple), max=dim.maximum // dim.multiple
            )
            dims[dim.name] = dim.multiple * base
    return tuple(
        {axis: dims[size] for axis, size in enumerate(tensor.shape) if isinstance(size, str) and size in dims}
        for tensor in (*spec.inputs, *spec.state)
    )
