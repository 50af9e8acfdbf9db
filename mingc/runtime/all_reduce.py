"""Sums over the ranks of the thinker, between its engines and inside CUDA graphs.

Two ways: the group's own collective (NCCL, gloo on the CPU), which is always there, and on GPUs that reach each
other's memory a one-shot kernel: every rank puts its part where the others can read it, waits for them, and adds all
parts up itself. That suits small messages, of which a decode step has two a layer. Which is taken is measured when
the ranks start, in a CUDA graph, at the sizes of the decode batches; larger messages go to NCCL. NVLink multicast is
not used.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.runtime.cuda_graphs import GraphPool

log = logging.getLogger("mingc.ranks")

_CALLS = 20  # of one graph: its launch counts little then
_REPLAYS = 15
_ONE_SHOT_DTYPES = (torch.bfloat16, torch.float32)
_ROUNDING = 2e-2  # of a sum in half precision, relative to the largest
_ROW_ALIGNMENT = 16  # bytes: the kernel reads so many at a time, the width of a row must be a multiple


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceTiming:
    """Microseconds of one all-reduce of `num_bytes` in a CUDA graph, of the slowest rank."""

    num_bytes: int
    nccl_us: float
    one_shot_us: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceChoice:
    """Who sums up what.

    Attributes:
        backend: of the group; "none" for one rank.
        one_shot_bytes: messages of at most so many bytes go to the one-shot kernel; 0 for none.
        reason: why, in a sentence.
        timings: what was measured; empty where there was nothing to choose.
    """

    world_size: int
    backend: str
    one_shot_bytes: int
    reason: str
    timings: tuple[ReduceTiming, ...] = ()


class Method(Protocol):
    """One way to sum up."""

    def reduce_(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over the ranks. Does not wait for the device."""
        ...


class Collective:
    """The group's own all-reduce."""

    def reduce_(self, x: Tensor) -> None:
        dist.all_reduce(x)


class OneShot:
    """Each rank reads the parts of all; every rank adds them in the same order, so all get the same bits.

    Args:
        max_bytes: of a message. So much of the device's memory is kept, open to the other ranks.

    Making one is a collective.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, max_bytes: int) -> None:
        from torch.distributed import _symmetric_memory as symmetric_memory

        group = dist.group.WORLD
        assert group is not None, "the ranks have met"
        self._group_name = group.group_name
        self._buffer = symmetric_memory.empty(max_bytes // dtype.itemsize, dtype=dtype, device=device)
        self._peers = symmetric_memory.rendezvous(self._buffer, self._group_name)

    def reduce_(self, x: Tensor) -> None:
        shared = self._buffer[: x.numel()].view(x.shape)
        torch.ops.symm_mem.one_shot_all_reduce_copy_out(shared, x, "sum", self._group_name, x)


class Reducer:
    """Sums tensors over the ranks. Every rank must call it with the same shapes in the same order.

    Args:
        collective: None for one rank, which has nothing to do.
        one_shot: for contiguous messages of `dtype` up to the bytes that `choice` says.
    """

    def __init__(
        self,
        choice: ReduceChoice,
        collective: Method | None,
        one_shot: Method | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.choice = choice
        self._collective = collective
        self._one_shot = one_shot
        self._dtype = dtype

    def reduce_(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over the ranks. Does not wait for the device."""
        if self._collective is None:
            return
        is_small = x.numel() * x.element_size() <= self.choice.one_shot_bytes
        if self._one_shot is not None and is_small and x.dtype == self._dtype:
            self._one_shot.reduce_(x)
        else:
            self._collective.reduce_(x)


def make_reducer(
    device: torch.device, dtype: torch.dtype, *, width: int, batch_sizes: Sequence[int]
) -> Reducer:
    """The reducer of this process's group, after `distributed.init`. A collective: every rank calls it.

    Args:
        width: values of a token; messages are (tokens, width).
        batch_sizes: tokens of the messages to choose for.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        choice = ReduceChoice(world_size=1, backend="none", one_shot_bytes=0, reason="one rank has no sums")
        return Reducer(choice, None)
    collective, world_size, backend = Collective(), dist.get_world_size(), str(dist.get_backend())
    obstacle = _obstacle(device, dtype, width)
    one_shot: OneShot | None = None
    if obstacle is None:
        max_bytes = max(batch_sizes) * width * dtype.itemsize
        try:
            one_shot = OneShot(device, dtype, max_bytes)
        except RuntimeError as error:
            obstacle = str(error).splitlines()[0]
        # A rank without it takes it from all: they must call the same kernels.
        if not _agrees(one_shot is not None, device):
            one_shot, obstacle = None, obstacle or "another rank could not open its memory"
        elif one_shot is not None and not adds_up(one_shot, device, dtype, width, max(batch_sizes)):
            one_shot, obstacle = None, "its sums are not those of the group"
    if one_shot is None:
        choice = ReduceChoice(
            world_size=world_size,
            backend=backend,
            one_shot_bytes=0,
            reason=f"no one-shot all-reduce: {obstacle}",
        )
    else:
        timings = _compare(collective, one_shot, device, dtype, width, batch_sizes)
        choice = choose(timings, world_size=world_size, backend=backend)
    log.info("all-reduce over %d ranks: %s", choice.world_size, choice.reason)
    return Reducer(choice, collective, one_shot, dtype)


def choose(timings: Sequence[ReduceTiming], *, world_size: int, backend: str) -> ReduceChoice:
    """One-shot up to the largest size that it wins at, if it wins at all below. `timings` are in order of size."""
    one_shot_bytes = 0
    for timing in timings:
        if timing.one_shot_us >= timing.nccl_us:
            break
        one_shot_bytes = timing.num_bytes
    smallest = timings[0]
    reason = (
        f"{smallest.num_bytes} bytes take {smallest.one_shot_us:.1f} µs one-shot, "
        f"{smallest.nccl_us:.1f} µs by {backend}; one-shot up to {one_shot_bytes} bytes"
    )
    return ReduceChoice(
        world_size=world_size,
        backend=backend,
        one_shot_bytes=one_shot_bytes,
        reason=reason,
        timings=tuple(timings),
    )


def graph_us(run: Callable[[], None], device: torch.device, calls: int = _CALLS) -> float:
    """Microseconds of `run` in a CUDA graph that holds it `calls` times; every rank must be at the same place."""

    def run_all() -> tuple[Tensor, ...]:
        for _ in range(calls):
            run()
        return ()

    graph, _ = GraphPool(device).capture(run_all, "sums over the ranks")
    samples: list[float] = []
    for _ in range(_REPLAYS):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples)


def _compare(
    collective: Method,
    one_shot: Method,
    device: torch.device,
    dtype: torch.dtype,
    width: int,
    batch_sizes: Sequence[int],
) -> list[ReduceTiming]:
    timings = []
    for size in sorted(set(batch_sizes)):
        x = torch.zeros(size, width, dtype=dtype, device=device)
        measured = [graph_us(lambda: method.reduce_(x), device) for method in (collective, one_shot)]  # noqa: B023
        # All ranks must choose alike, so they choose by the same numbers: those of the slowest.
        slowest = torch.tensor(measured, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        nccl_us, one_shot_us = slowest.tolist()
        timings.append(
            ReduceTiming(num_bytes=x.nbytes, nccl_us=round(nccl_us, 2), one_shot_us=round(one_shot_us, 2))
        )
    return timings


def adds_up(method: Method, device: torch.device, dtype: torch.dtype, width: int, rows: int) -> bool:
    """Whether the sums of `method` are right, and the same bits on all ranks: they steer the same router choices."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(rows, width, generator=generator, device=device).to(dtype)
    expected = x.float()
    dist.all_reduce(expected)
    method.reduce_(x)
    least, most = x.clone(), x.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    error = (x.float() - expected).abs().max() / expected.abs().max()
    return _agrees(torch.equal(least, most) and float(error) < _ROUNDING, device)


def _obstacle(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why the one-shot kernel cannot be: the same answer on every rank. None when it can."""
    if device.type != "cuda":
        return "it is for CUDA devices"
    if dtype not in _ONE_SHOT_DTYPES:
        return f"it does not add {dtype}"
    if width * dtype.itemsize % _ROW_ALIGNMENT:
        return f"rows of {width} values are not a multiple of {_ROW_ALIGNMENT} bytes"
    own = torch.tensor([device.index or 0], device=device)
    indices = torch.empty(dist.get_world_size(), dtype=own.dtype, device=device)
    dist.all_gather_into_tensor(indices, own)
    others = [index for index in indices.tolist() if index != own.item()]
    is_open = all(torch.cuda.can_device_access_peer(device, index) for index in others)
    return None if _agrees(is_open, device) else "the GPUs do not reach each other's memory"


def _agrees(flag: bool, device: torch.device) -> bool:
    """Whether `flag` holds on every rank."""
    all_ranks = torch.tensor([int(flag)], device=device)
    dist.all_reduce(all_ranks, op=dist.ReduceOp.MIN)
    return bool(all_ranks.item())
