"""`torch.export` of one graph of a stage with the dims of its spec."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mingc.artifacts.spec import GraphSpec
from mingc.errors import CaptureError
from mingc.export.stages.base import GraphPlan


class _Entry(nn.Module):
    """Calls one method of the stage's module, so that several graphs share one set of weight names (`model.…`)."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model = model
        self._method = method

    def forward(self, *tensors: torch.Tensor) -> Any:
        return getattr(self.model, self._method)(*tensors)


def capture(
    plan: GraphPlan, module: nn.Module, *, stage: str, fixed: Mapping[str, int] | None, device: torch.device
) -> torch.export.ExportedProgram:
    """Trace `plan.method` of `module`.

    `fixed` gives sizes of dims that become static; every other dim of the spec stays dynamic in its range.

    Raises: CaptureError with torch's own words.
    """
    sizes = {**plan.trace_dims, **(fixed or {})}
    example = plan.example(sizes, torch.Generator().manual_seed(0))
    arguments = tuple(example[tensor.name].to(device) for tensor in (*plan.spec.inputs, *plan.spec.state))
    check_example(plan.spec, example, sizes, stage)
    dynamic = _dynamic_shapes(plan.spec, frozenset(fixed or ()))
    try:
        with torch.no_grad():
            return torch.export.export(
                _Entry(module, plan.method), arguments, dynamic_shapes={"tensors": dynamic}, strict=False
            )
    except Exception as error:  # torch.export raises many kinds; all mean that the graph cannot be captured
        raise CaptureError(
            f"torch.export refused the graph: {error}", where=f"{stage}.{plan.spec.name}"
        ) from error


def check_example(
    spec: GraphSpec, example: Mapping[str, torch.Tensor], sizes: Mapping[str, int], stage: str
) -> None:
    """Raise CaptureError when an example tensor is not what the spec says."""
    for tensor in (*spec.inputs, *spec.state):
        shape = tuple(size if isinstance(size, int) else sizes[size] for size in tensor.shape)
        value = example[tensor.name]
        if tuple(value.shape) != shape or str(value.dtype) != f"torch.{tensor.dtype}":
            raise CaptureError(
                f"example {tensor.name} is {value.dtype} {list(value.shape)}, spec says {tensor.dtype} {list(shape)}",
                where=f"{stage}.{spec.name}",
            )


def _dynamic_shapes(spec: GraphSpec, fixed: frozenset[str]) -> tuple[dict[int, Any], ...]:
    dims: dict[str, Any] = {}
    for dim in spec.dims:
        if dim.name in fixed:
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
