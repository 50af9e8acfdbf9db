"""Bytes of the tensors that are alive while code runs, on any device."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveMemory(TorchDispatchMode):
    """Counts the storages of all results of operations inside the block. `peak`: the most bytes at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._now = 0
        self._tensors: Counter[int] = Counter()  # of a storage

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                self._add(value, storage.data_ptr(), storage.nbytes())
        return result

    def _add(self, value: torch.Tensor, place: int, num_bytes: int) -> None:
        if not self._tensors[place]:
            self._now += num_bytes
            self.peak = max(self.peak, self._now)
        self._tensors[place] += 1
        weakref.finalize(value, self._remove, place, num_bytes)

    def _remove(self, place: int, num_bytes: int) -> None:
        self._tensors[place] -= 1
        if not self._tensors[place]:
            self._now -= num_bytes
