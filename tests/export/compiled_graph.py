"""Traces and compiles one graph of a stage for the CPU and holds it against the eager module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from mingc.export.backends.aoti import compile_graph
from mingc.export.capture import capture, check_example
from mingc.export.stages.base import GraphPlan
from mingc.runtime.engines.aoti import load

CPU = torch.device("cpu")


def relative_error(got: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected value."""
    assert got.shape == expected.shape, f"{tuple(got.shape)} instead of {tuple(expected.shape)}"
    return ((got - expected).abs().max() / expected.abs().max()).item()


def check_compiled(
    module: nn.Module, plan: GraphPlan, sizes: Sequence[Mapping[str, int]], folder: Path, tolerance: float
) -> None:
    """One engine with dynamic dims must agree with `module` at all `sizes`, outputs and state."""
    program = capture(plan, module, stage="test", fixed=None, device=CPU)
    path = folder / f"{plan.spec.name}.pt2"
    compile_graph(program, path, device="cpu", cache=None, where=plan.spec.name)
    engine = load(path, CPU)
    engine.bind(module.state_dict())
    for size in sizes:
        full = {**plan.check_dims, **size}
        example = plan.example(full, torch.Generator().manual_seed(3))
        check_example(plan.spec, example, full, "test")
        names = [spec.name for spec in (*plan.spec.inputs, *plan.spec.state)]
        eager = {name: example[name].clone() for name in names}
        compiled = {name: example[name].clone() for name in names}
        with torch.no_grad():
            expected = getattr(module, plan.method)(*eager.values())
        got = engine.run(list(compiled.values()))
        for spec, value, reference in zip(plan.spec.outputs, got, expected, strict=True):
            shape = tuple(axis if isinstance(axis, int) else full[axis] for axis in spec.shape)
            assert tuple(value.shape) == shape, f"{spec.name} at {size}"
            assert relative_error(value, reference) < tolerance, f"{spec.name} at {size}"
        for spec in plan.spec.state:
            assert relative_error(compiled[spec.name], eager[spec.name]) < tolerance, f"{spec.name} at {size}"
