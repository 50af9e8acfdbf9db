"""The runtime side of `eager_backend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors import safe_open

import mingc.kernels.cuda.flow_sampler
import mingc.kernels.cuda.int4_experts
import mingc.kernels.cuda.rotary_varlen_attention  # noqa: F401  (all register ops that engines call by name)
from mingc.runtime.engines.base import Engine

_PREFIX = "model."
_NAMES = {
    "torch": torch,
    "device": torch.device,
    "inf": float("inf"),
    "nan": float("nan"),
    "NoneType": type(None),
}


class EagerEngine(Engine):
    """The function `forward` of a captured graph, run operation by operation."""

    def __init__(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            constants = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        self._weights = [name.removeprefix(_PREFIX) for name in metadata["weights"].split()]
        self._self = SimpleNamespace()
        for name, value in constants.items():
            _assign(self._self, name, value)
        names: dict[str, Any] = dict(_NAMES)
        exec(compile(metadata["code"], str(path), "exec"), names)
        self._forward = names["forward"]

    def constants(self) -> Sequence[str]:
        return self._weights

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        for name in self._weights:
            _assign(self._self, _PREFIX + name, weights[name])

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        # Compiled code would read others wrong, without an error.
        assert all(each.is_contiguous() for each in tensors), "an engine got a tensor that is not contiguous"
        with torch.no_grad():
            return list(self._forward(self._self, *tensors))


def _assign(module: SimpleNamespace, name: str, value: torch.Tensor) -> None:
    """Let `module` have `value` as its attribute `name`, a dotted path."""
    *path, last = name.split(".")
    for step in path:
        if not hasattr(module, step):
            setattr(module, step, SimpleNamespace())
        module = getattr(module, step)
    setattr(module, last, value)


def load(path: Path, device: torch.device) -> Engine:
    return EagerEngine(path)
