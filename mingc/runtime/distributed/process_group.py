"""The tensor-parallel group of this process: rendezvous, the gathering of shares, shutdown.

Sums are `mingc.runtime.distributed.all_reduce`. Without a group, one rank is all there is. Nothing here brings in
Dynamo or
Inductor.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mingc.errors import WorkerError

_HOST = "127.0.0.1"
# NVLink multicast is left alone unless the user asks for it: nothing here needs it, and a fault in it can take the
# GPUs of a whole host out of service.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


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
    *,
    port: int,
    device: str = "cpu",
    timeout_s: float = 300.0,
) -> None:
    """Join the group of `world_size` ranks, who meet at the `port` of `host_store`.

    Must come before the first step of a sharded stage. On CUDA the caller has chosen its device already.

    Raises: WorkerError when the others do not come within `timeout_s`.
    """
    backend = "nccl" if device.startswith("cuda") else "gloo"
    timeout = timedelta(seconds=timeout_s)
    for name, value in _NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    try:
        store = c10d.TCPStore(_HOST, port, is_master=False, timeout=timeout)
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        raise WorkerError(
            f"rank {rank} of {world_size} cannot join the group: {error}", where=f"port {port}"
        ) from error


def num_ranks() -> int:
    """Of the group; 1 without one."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_last(x: torch.Tensor) -> torch.Tensor:
    """The ranks' contiguous `x` (N, W) side by side in rank order, (N, world size * W); `x` itself with one rank."""
    if not dist.is_initialized():
        return x
    shares = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, x)
    return torch.cat(shares, dim=-1)


def broadcast_from_rank0_(x: torch.Tensor) -> None:
    """Replace `x` by that of rank 0, so that all ranks go on alike."""
    if dist.is_initialized():
        dist.broadcast(x, src=0)


def shutdown(*, is_whole: bool = True) -> None:
    """Leave the group; does nothing when there is none.

    NCCL waits here for all graphs that it was captured in, and for its kernels: close the workers before. When a rank
    is gone (not `is_whole`) its kernels may never end, and the group is left to the end of the process.
    """
    if dist.is_initialized() and (is_whole or dist.get_backend() != "nccl"):
        dist.destroy_process_group()
