"""I/O signature of a compiled graph: names, dtypes and shapes of inputs, outputs and state. No torch.

A dim is an int or the name of a variable dim, whose range and buckets are in `GraphSpec.dims`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

DType = Literal["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "int32", "int8", "uint8", "bool"]

Ranks = Literal["same", "sum", "concat"]

Quantization = Literal["fp8", "int4"]
"""Formats that a weight may be stored in besides the compute dtype."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorSpec:
    """One tensor of a graph's I/O signature. `shape` mixes ints and names of dims: `("T", 4096)`.

    `ranks` says how the caller combines an output of a sharded stage: every rank returns the whole output, the outputs
    are summed, or they are concatenated along the last axis.
    """

    name: str
    dtype: DType
    shape: tuple[int | str, ...]
    ranks: Ranks = "same"

    def shape_at(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape when its dims have these sizes."""
        return tuple(size if isinstance(size, int) else sizes[size] for size in self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dim:
    """A dim that varies between calls.

    The runtime pads it up to the smallest of `buckets` that is large enough. Every size is a multiple of
    `multiple`. With no buckets the size is fixed when the process starts (sizes of pools), or every size is computed as
    it is.
    """

    name: str
    minimum: int
    maximum: int
    multiple: int = 1
    buckets: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphSpec:
    """One entry point of a stage.

    Called with `inputs` then `state` (then `weights`), in this order; returns `outputs`. `state` tensors belong to
    the runtime and are updated in place; they start as zeros and are shared between graphs of the stage by name.

    A graph that runs for several layers is compiled once and has one instance per layer, named by the path prefix of
    the layer's weights (`layers.3.attention`). Each instance has its own state, with the same prefix in the stage's
    state names. A single instance with an empty path is the whole stage.

    A graph with several instances takes its `weights` as arguments after the state; other graphs have their weights
    bound once.
    """

    name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...] = ()
    dims: tuple[Dim, ...] = ()
    layer_instances: tuple[str, ...] = ("",)
    weights: tuple[str, ...] = ()

    def input(self, name: str) -> TensorSpec:
        """The input called `name`; KeyError when the graph has none."""
        for tensor in self.inputs:
            if tensor.name == name:
                return tensor
        raise KeyError(f"graph {self.name} has no input {name}")

    def dim(self, name: str) -> Dim:
        """The dim called `name`; KeyError when the graph has none."""
        for dim in self.dims:
            if dim.name == name:
                return dim
        raise KeyError(f"graph {self.name} has no dim {name}")

    def bucket_sizes(self) -> list[dict[str, int]]:
        """Every combination of bucket sizes; a single empty one when no dim has buckets."""
        bucketed = [dim for dim in self.dims if dim.buckets]
        return [
            dict(zip((dim.name for dim in bucketed), sizes, strict=True))
            for sizes in itertools.product(*(dim.buckets for dim in bucketed))
        ]


def join_path(instance: str, name: str) -> str:
    """The name of an instance's weight or state within its stage."""
    return f"{instance}.{name}" if instance else name
