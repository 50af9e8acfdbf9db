"""The runtime side of `toy_backend`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from mingc.runtime.engines.base import Engine

_PREFIX = "model."


class ToyEngine(Engine):
    """An exported program, run by PyTorch."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            program = torch.export.load(file)
        self._names = [name.removeprefix(_PREFIX) for name in program.state_dict]
        self._module = program.module()

    def constants(self) -> Sequence[str]:
        return self._names

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._module.load_state_dict({_PREFIX + name: weights[name] for name in self._names}, assign=True)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(self._module(*tensors))


def load(path: Path, device: torch.device) -> Engine:
    return ToyEngine(path)
