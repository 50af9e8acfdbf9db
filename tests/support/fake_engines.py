"""Engines made of small Python functions that check the shapes of their graph's spec."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.runtime.engines.base import Engine, Graph

CPU = torch.device("cpu")
HIDDEN = 4


class FunctionEngine(Engine):
    """An engine that calls a function of named tensors."""

    def __init__(self, names: Sequence[str], function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._names = names
        self._function = function

    def constants(self) -> Sequence[str]:
        return ()

    def bind(self, weights: Mapping[str, Tensor]) -> None:
        assert not weights

    def run(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return list(self._function(**dict(zip(self._names, tensors, strict=True))))


def make_graph(
    name: str,
    function: Callable[..., tuple[Tensor, ...]],
    *,
    inputs: dict[str, tuple[DType, tuple[int | str, ...]]],
    outputs: Sequence[str],
    state: dict[str, tuple[int | str, ...]],
    dims: dict[str, tuple[int, ...]],
    layer_instances: tuple[str, ...] = ("",),
) -> Graph:
    spec = GraphSpec(
        name=name,
        inputs=tuple(
            TensorSpec(name=key, dtype=dtype, shape=shape) for key, (dtype, shape) in inputs.items()
        ),
        outputs=tuple(TensorSpec(name=key, dtype="float32", shape=()) for key in outputs),
        state=tuple(TensorSpec(name=key, dtype="float32", shape=shape) for key, shape in state.items()),
        dims=tuple(
            Dim(name=key, minimum=1, maximum=max(buckets, default=1 << 20), buckets=buckets)
            for key, buckets in dims.items()
        ),
        layer_instances=layer_instances,
    )
    names = [*inputs, *(key.replace(".", "_") for key in state)]

    def checked(**tensors: Tensor) -> tuple[Tensor, ...]:
        sizes: dict[str, int] = {}
        for tensor in spec.inputs:
            given = tensors[tensor.name]
            assert str(given.dtype) == f"torch.{tensor.dtype}", f"{name}.{tensor.name} is {given.dtype}"
            assert given.dim() == len(tensor.shape), f"{name}.{tensor.name} has shape {tuple(given.shape)}"
            for size, wanted in zip(given.shape, tensor.shape, strict=True):
                assert size == (sizes.setdefault(wanted, size) if isinstance(wanted, str) else wanted)
        for key, size in sizes.items():
            assert size in dims[key], f"{name}: {key} is {size}, no bucket of {dims[key]}"
        return function(**tensors)

    return Graph(spec, {None: FunctionEngine(names, checked)})
