"""The tensor-parallel group of this process: rendezvous, registration by name, shutdown.

Engines know their group by the name `mingc_tp` only. Nothing here brings in Dynamo or Inductor.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mingc.errors import WorkerError
from mingc.kernels.all_reduce import GROUP

_HOST = "127.0.0.1"
# NVLink multicast is left alone unless the user asks for it: nothing here needs it, and a fault in it can take the
# GPUs of a whole host out of service.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# The registry that compiled collectives look their group up in by name; the public API names groups by itself.
# Its type stubs want a type for names that older torch does not have.
_registry: Any = c10d


def host_store(*, timeout_s: float = 300.0) -> c10d.TCPStore:
    """A key-value store that ranks meet at, on a port that the system chose (`.port`).

    Lives as long as the returned object; the process that starts the ranks keeps it.
    """
    return c10d.TCPStore(
        _HOST, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )


def init(
    rank: int,
    world_size: int,
    init_method: str | None = None,
    *,
    port: int | None = None,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> None:
    """Join the group of `world_size` ranks and register it for the engines.

    The ranks meet at the `port` of `host_store`, or where `init_method` says (`file:///path/of/a/new/file`). Must
    come before the first run of a sharded engine. On CUDA the caller has chosen its device already.

    Raises: WorkerError when the others do not come within `timeout_s`.
    """
    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=timeout_s)
    for name, value in _NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    try:
        if port is not None:
            store = c10d.TCPStore(_HOST, port, is_master=False, timeout=timeout)
            dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
        else:
            dist.init_process_group(
                backend, init_method=init_method, rank=rank, world_size=world_size, timeout=timeout
            )
    except (RuntimeError, ValueError) as error:
        place = f"port {port}" if port is not None else init_method
        raise WorkerError(
            f"rank {rank} of {world_size} cannot join the group: {error}", where=place
        ) from error
    group = dist.group.WORLD
    assert group is not None, "init_process_group sets the default group"
    _registry._register_process_group(GROUP, group)


def shutdown() -> None:
    """Leave the group; does nothing when there is none."""
    if dist.is_initialized():
        _registry._unregister_process_group(GROUP)
        dist.destroy_process_group()
