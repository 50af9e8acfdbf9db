"""What a compiled graph is held against: the same graph run eagerly, by one module or by one a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from mingc.export.stage import GraphDef
from mingc.gather_shards import gather_shards


def run_eager(
    plan: GraphDef, module: nn.Module, tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Outputs by name and `state.<name>` afterwards, of the eager module. `tensors` are not changed."""
    arguments = [tensors[each.name].clone() for each in (*plan.spec.inputs, *plan.spec.state)]
    with torch.no_grad():
        outputs = getattr(module, plan.method)(*arguments)
    result = {each.name: value for each, value in zip(plan.spec.outputs, outputs, strict=True)}
    state = arguments[len(plan.spec.inputs) :]
    result.update({f"state.{each.name}": value for each, value in zip(plan.spec.state, state, strict=True)})
    return result


class Ranks:
    """A graph's eager modules, one a rank, on the same `inputs`."""

    def __init__(
        self, plan: GraphDef, modules: Sequence[nn.Module], inputs: Mapping[str, torch.Tensor]
    ) -> None:
        self.modules = modules
        self.inputs = inputs
        self.plan = plan

    def of(self, inputs: Mapping[str, torch.Tensor]) -> Ranks:
        """The same modules on other inputs."""
        return Ranks(self.plan, self.modules, inputs)

    def run(self) -> dict[str, torch.Tensor]:
        """Outputs by name, of all ranks together, and `state.<name>` afterwards, of the first."""
        ranks = [run_eager(self.plan, module, self.inputs) for module in self.modules]
        outputs = {
            spec.name: gather_shards(spec, [rank[spec.name] for rank in ranks])
            for spec in self.plan.spec.outputs
        }
        return {**ranks[0], **outputs}


def float32_inputs(
    plan: GraphDef, tensors: Mapping[str, torch.Tensor], sizes: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Inputs and state of a float32 `plan` from the engine's. A state of another layout begins as zeros, as theirs."""
    made = {each.name: tensors[each.name] for each in plan.spec.inputs}
    for spec in plan.spec.state:
        shape = [size if isinstance(size, int) else sizes[size] for size in spec.shape]
        is_same = list(tensors[spec.name].shape) == shape
        made[spec.name] = tensors[spec.name] if is_same else torch.zeros(shape)
    return {name: value.float() if value.is_floating_point() else value for name, value in made.items()}


def widened(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`reference` with zeros on its last axis where shares that do not divide it make `value` longer."""
    return torch.nn.functional.pad(reference, (0, value.shape[-1] - reference.shape[-1]))
