"""Eager reference of a compiled graph: the same graph run as a module, or as one module per rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from mingc.export.stage import GraphDef
from mingc.numerics.gather_shards import gather_shards


def run_eager(
    plan: GraphDef, module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs of the eager module by name, and the state after the call as `state.<name>`; `tensors` are copied."""
    arguments = [tensors[each.name].clone() for each in (*plan.spec.inputs, *plan.spec.state)]
    with torch.no_grad():
        outputs = getattr(module, plan.method)(*arguments)
    result = {each.name: value for each, value in zip(plan.spec.outputs, outputs, strict=True)}
    state = arguments[len(plan.spec.inputs) :]
    result.update({f"state.{each.name}": value for each, value in zip(plan.spec.state, state, strict=True)})
    return result


class EagerRanks:
    """A graph's eager modules, one per rank, with the `inputs` that all of them run on."""

    def __init__(
        self, plan: GraphDef, modules: Sequence[nn.Module], inputs: Mapping[str, torch.Tensor]
    ) -> None:
        self.modules = modules
        self.inputs = inputs
        self.plan = plan

    def with_inputs(self, inputs: Mapping[str, torch.Tensor]) -> EagerRanks:
        """The same modules with other inputs."""
        return EagerRanks(self.plan, self.modules, inputs)

    def on_device(self) -> EagerRanks:
        """The same modules, with inputs on the device of their weights, if they have any."""
        weight = next(self.modules[0].parameters(), None)
        if weight is None:
            return self
        return self.with_inputs({name: value.to(weight.device) for name, value in self.inputs.items()})

    def run(self) -> dict[str, torch.Tensor]:
        """Combined outputs of all ranks by name, and the first rank's state after the call as `state.<name>`."""
        ranks = [run_eager(self.plan, module, self.inputs) for module in self.modules]
        outputs = {
            spec.name: gather_shards(spec, [rank[spec.name] for rank in ranks])
            for spec in self.plan.spec.outputs
        }
        return {**ranks[0], **outputs}


def float32_inputs(
    plan: GraphDef, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Inputs and state of a float32 `plan`, converted from the engine's `tensors`.

    State whose shape differs from the engine's (a shard's) starts as zeros, like the engine's state in that case.
    """
    converted = {each.name: tensors[each.name] for each in plan.spec.inputs}
    for spec in plan.spec.state:
        shape = spec.shape_at(sizes)
        is_same = tensors[spec.name].shape == shape
        converted[spec.name] = tensors[spec.name] if is_same else torch.zeros(shape)
    return {name: value.float() if value.is_floating_point() else value for name, value in converted.items()}


def pad_like(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`reference` with its last axis zero-padded to that of `value`, which is longer where shards are padded."""
    return torch.nn.functional.pad(reference, (0, value.shape[-1] - reference.shape[-1]))
