"""Tensor-parallel process group: rendezvous, all-gather, broadcast, shutdown.

`mingc.runtime.distributed.all_reduce` has the all-reduce. A process without a group acts as the only rank of a group.
Nothing here imports Dynamo or Inductor.
"""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

from mingc.errors import WorkerError

_HOST = "127.0.0.1"
# NVLink multicast stays off unless the user enables it: it is not needed here, and a fault in it can take all GPUs of a
# host out of service.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}


def host_store(*, timeout_s: float = 300.0) -> c10d.TCPStore:
    """Serve the key-value store for the rendezvous of the ranks, on a port that the system chooses (`.port`).

    The store lives as long as the returned object; the process that starts the ranks keeps it.
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
    """Join the group of `world_size` ranks through the store at `port` (see `host_store`).

    Call it before the first step of a sharded stage, and on CUDA after `torch.cuda.set_device`.

    Raises: WorkerError when the other ranks do not join within `timeout_s`.
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
    """Number of ranks in the group; 1 without a group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather_last(x: torch.Tensor) -> torch.Tensor:
    """Concatenate the ranks' contiguous `x` (N, W) in rank order to (N, world size * W); `x` itself with one rank."""
    if not dist.is_initialized():
        return x
    shares = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(shares, x)
    return torch.cat(shares, dim=-1)


def broadcast_from_rank0_(x: torch.Tensor) -> None:
    """Replace `x` by the `x` of rank 0."""
    if dist.is_initialized():
        dist.broadcast(x, src=0)


def shutdown(*, is_whole: bool = True) -> None:
    """Leave the group; does nothing without one.

    NCCL waits here for its kernels and for all graphs that captured it, so close the workers first. With
    `is_whole=False` (a rank has died) the kernels may never end, so an NCCL group is kept until the process ends.
    """
    if dist.is_initialized() and (is_whole or dist.get_backend() != "nccl"):
        dist.destroy_process_group()
