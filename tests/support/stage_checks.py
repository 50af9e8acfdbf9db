"""What the tests of several stages share: weight sources, comparison with goldens, random weights, changed configs."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions, WeightSource
from mingc.export.weights.loading import check_weights

Module = TypeVar("Module", bound=nn.Module)


def graph_of(
    stage: Stage, config: Any, name: str, options: StageOptions | None = None, shard: Shard | None = None
) -> GraphDef:
    """The graph `name` of a stage."""
    graphs = stage.graphs(config, shard or Shard(), options or StageOptions())
    (found,) = [each for each in graphs if each.spec.name == name]
    return found


def check_sources(stage: Stage, checkpoint: Checkpoint, config: Any) -> Sequence[WeightSource]:
    """Every weight of the module has one source, and the checkpoint has its tensors. Returns the sources."""
    sources = stage.weights(config, Shard())
    with torch.device("meta"):
        expected = stage.build(config, Shard()).state_dict()
    assert sorted(source.name for source in sources) == sorted(expected)
    assert check_weights(checkpoint, sources) == []
    return sources


def assert_close(value: Tensor, reference: Tensor, limit: float = 3e-6, largest: float | None = None) -> None:
    """Relative L2 error below `limit`; largest error relative to the largest value below `largest`, or `limit`."""
    assert value.shape == reference.shape
    difference = (value - reference).double()
    assert difference.norm() / reference.double().norm() < limit
    assert difference.abs().max() / reference.abs().max() < (largest or limit)


def with_random_weights(module: Module) -> Module:
    """`module`, in place, with weights that keep activations near one."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in module.state_dict().items():
        fan_in = tensor[0].numel() if tensor.dim() > 1 else 16
        tensor.copy_(torch.randn(tensor.shape, generator=generator) / fan_in**0.5)
        if "norm" in name and name.endswith("weight"):
            tensor.add_(1)
    return module.eval().requires_grad_(False)


def set_key(config: dict[str, Any], *path: str, value: object = None) -> None:
    """Set a key of `config` in place, or remove it when `value` is None."""
    *steps, last = path
    for step in steps:
        config = config[step]
    if value is None:
        del config[last]
    else:
        config[last] = value


def altered(checkpoint: Checkpoint, *path: str, value: object = None) -> Checkpoint:
    """`checkpoint` with one config key set, or removed when `value` is None."""
    values = copy.deepcopy(checkpoint.main.config)
    set_key(values, *path, value=value)
    return checkpoint.with_part(replace(checkpoint.main, config=values))
