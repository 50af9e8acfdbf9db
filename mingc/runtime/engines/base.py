"""The interface of loaded engines, and graphs that select an engine by input sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from mingc.artifacts.spec import GraphSpec
from mingc.errors import EngineSizeError, WorkerError


class Engine(ABC):
    """One compiled file; each backend has an implementation in `mingc.runtime.engines.backends`.

    Attributes:
        is_capturable: whether a call may be captured in a CUDA graph, whose replays read nothing of the host.
    """

    is_capturable = True

    @abstractmethod
    def constants(self) -> Sequence[str]:
        """Names of the weights that the engine needs, as in the weights files of the stage."""

    @abstractmethod
    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Use these tensors as weights, without copying; the caller keeps them alive."""

    @abstractmethod
    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Inputs, state and weights in spec order → outputs in spec order. State is updated in place.

        Inputs are contiguous: compiled code reads them by their shapes alone.
        """


class Graph:
    """One graph of a stage, ready to run: selects the engine for the given sizes.

    Args:
        engines: by the sizes of the varying dims (in spec order); the engine with the key None takes every size.
        weights: weights of this layer instance, by name; every run gets the weights that the spec names.

    Attributes:
        spec, engines: as given.
    """

    def __init__(
        self,
        spec: GraphSpec,
        engines: Mapping[tuple[int, ...] | None, Engine],
        weights: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ) -> None:
        self.spec = spec
        self.engines = dict(engines)
        self._weights = [weights[name] for name in spec.weights]
        self._names = tuple(tensor.name for tensor in (*spec.inputs, *spec.state))
        self._outputs = tuple(tensor.name for tensor in spec.outputs)
        self._bucketed = tuple(dim for dim in spec.dims if dim.buckets)
        self._places = {dim.name: _find_dim(spec, dim.name) for dim in self._bucketed}

    @property
    def is_capturable(self) -> bool:
        """Whether all its engines are (`Engine.is_capturable`)."""
        return all(engine.is_capturable for engine in self.engines.values())

    @property
    def sizes(self) -> list[dict[str, int]]:
        """The sizes of the dims with buckets that its engines run; all sizes if one engine takes every size."""
        if None in self.engines:
            return self.spec.bucket_sizes()
        names = [dim.name for dim in self._bucketed]
        return [dict(zip(names, key, strict=True)) for key in self.engines if key is not None]

    def bucket(self, dim: str, size: int) -> int:
        """The padded size for `size`: the smallest bucket that holds it.

        Raises: EngineSizeError when no bucket does.
        """
        buckets = self.spec.dim(dim).buckets
        for bucket in buckets:
            if bucket >= size:
                return bucket
        raise EngineSizeError(
            f"{self.spec.name}: {size} exceeds the largest {dim} bucket, {buckets[-1] if buckets else 0}",
            fix="send less at once, or export with larger buckets",
        )

    def run(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        """Run on named tensors (inputs and state of the spec), already padded to buckets."""
        ordered = [tensors[name] for name in self._names]
        engine = self.engines.get(None)
        if engine is None:
            key = tuple(
                tensors[self._places[dim.name][0]].shape[self._places[dim.name][1]] for dim in self._bucketed
            )
            engine = self.engines.get(key)
            if engine is None:
                raise WorkerError(
                    f"no engine of {self.spec.name} for sizes {key}; built: {sorted(self.engines, key=str)}"
                )
        return dict(zip(self._outputs, engine.run([*ordered, *self._weights]), strict=True))


def _find_dim(spec: GraphSpec, name: str) -> tuple[str, int]:
    for tensor in spec.inputs:
        for axis, size in enumerate(tensor.shape):
            if size == name:
                return tensor.name, axis
    raise WorkerError(f"dim {name} of {spec.name} is in no input")
