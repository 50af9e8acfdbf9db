"""A stand-in for the tensor-parallel group while sharded graphs are captured and compiled.

The compiler asks a collective's group for its size; nothing is ever sent. The real group exists only where
engines run (`mingc.runtime.distributed`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mingc.kernels.all_reduce import GROUP


@contextmanager
def stand_in_group(world_size: int) -> Iterator[None]:
    """Register a group of `world_size` ranks without a backend under the engines' name; nothing for one rank."""
    if world_size == 1:
        yield
        return
    # Gives the collectives the shape rules that tracing needs.
    import torch.distributed._functional_collectives  # noqa: F401

    registry: Any = c10d  # its stubs want a type for names that older torch does not have
    group = dist.ProcessGroup(c10d.HashStore(), 0, world_size)
    registry._register_process_group(GROUP, group)
    try:
        yield
    finally:
        registry._unregister_process_group(GROUP)
