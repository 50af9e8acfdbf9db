"""Sums over the ranks of the thinker, between its engines and inside CUDA graphs.

Three ways (`reduce_methods`): the group's own collective (NCCL, gloo on the CPU), which is always there, and on GPUs
that reach each other's memory a one-shot kernel, which suits small messages, of which a decode step has two a layer,
and a two-shot kernel, which suits large ones, of which a chunk of a prompt has two a layer. Which is taken is measured
when the ranks start, in a CUDA graph, at the sizes of the decode batches and the chunks. NVLink multicast is not used.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from mingc.runtime.distributed.algorithms import TWO_SHOT_RANKS, Collective, Method, OneShot, TwoShot
from mingc.runtime.distributed.process_group import num_ranks
from mingc.runtime.engines.cuda_graphs import GraphPool

log = logging.getLogger("mingc.ranks")

_CALLS = 20  # of one graph: its launch counts little then
_REPLAYS = 15
_SHARED_DTYPES = (torch.bfloat16, torch.float32)  # that the kernels over shared memory add
_ROUNDING = 2e-2  # of a sum in half precision, relative to the largest
_ROW_ALIGNMENT = 16  # bytes: the kernels read so many at a time, the width of a row must be a multiple
_MOST_ONE_SHOT_BYTES = 2**22  # every rank reads all of it from each other one: beyond, it never won
_LEAST_TWO_SHOT_BYTES = 2**17  # it meets twice and copies twice: below, it has nothing to win

Way = Literal["collective", "one-shot", "two-shot"]
Methods = Mapping[Way, Method]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceTiming:
    """Microseconds of one all-reduce of `num_bytes` in a CUDA graph, of the slowest rank; None for a way not tried."""

    num_bytes: int
    collective_us: float
    one_shot_us: float | None = None
    two_shot_us: float | None = None

    @property
    def us(self) -> dict[Way, float]:
        """What was measured; the collective first, which is taken when others are just as fast."""
        all_us: tuple[tuple[Way, float | None], ...] = (
            ("collective", self.collective_us),
            ("one-shot", self.one_shot_us),
            ("two-shot", self.two_shot_us),
        )
        return {way: us for way, us in all_us if us is not None}

    @property
    def fastest(self) -> Way:
        return min(self.us, key=lambda way: self.us[way])


@dataclass(frozen=True, kw_only=True, slots=True)
class ReduceChoice:
    """Who sums up what.

    Attributes:
        backend: of the group; "none" for one rank.
        reason: why, in a sentence.
        timings: what was measured, in order of size; empty where there was nothing to choose.
    """

    world_size: int
    backend: str
    reason: str
    timings: tuple[ReduceTiming, ...] = ()

    def way(self, num_bytes: int) -> Way:
        """What is fastest at the smallest measured size that is no smaller; beyond all of them the collective."""
        for timing in self.timings:
            if num_bytes <= timing.num_bytes:
                return timing.fastest
        return "collective"


class Reducer:
    """Sums tensors over the ranks. Every rank must call it with the same shapes in the same order.

    Args:
        methods: by the ways that `choice` names; none for one rank, which has nothing to do.
        dtype: of the messages that others than the collective add.
    """

    def __init__(self, choice: ReduceChoice, methods: Methods, dtype: torch.dtype = torch.bfloat16) -> None:
        self.choice = choice
        self._methods = methods
        self._dtype = dtype

    def reduce_(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over the ranks. Does not wait for the device."""
        if self._methods:
            way = self.choice.way(x.nbytes) if x.dtype == self._dtype else "collective"
            self._methods[way].reduce_(x)


def make_reducer(device: torch.device, dtype: torch.dtype, *, width: int, tokens: Sequence[int]) -> Reducer:
    """The reducer of this process's group, after `distributed.init`. A collective: every rank calls it.

    Args:
        width: values of a token; messages are (tokens, width).
        tokens: of each size of message to choose for: decode batches and chunks.
    """
    world_size = num_ranks()
    if world_size == 1:
        return Reducer(ReduceChoice(world_size=1, backend="none", reason="one rank has no sums"), {})
    backend = str(dist.get_backend())
    methods: dict[Way, Method] = {"collective": Collective()}
    sizes = sorted(set(tokens))
    obstacle = _obstacle(device, dtype, width)
    if obstacle is None:
        obstacles = []
        for way, make in _makers(device, dtype, world_size).items():
            fitting = [size for size in sizes if _suits(way, size * width * dtype.itemsize)]
            if fitting:
                found = _try(make, device, dtype, width=width, sizes=fitting)
                if isinstance(found, str):
                    obstacles.append(f"no {way} all-reduce: {found}")
                else:
                    methods[way] = found
        obstacle = "; ".join(obstacles)
    else:
        obstacle = f"no one-shot and two-shot all-reduce: {obstacle}"
    timings = _compare(methods, device, dtype, width, sizes) if len(methods) > 1 else []
    choice = choose(timings, world_size=world_size, backend=backend, obstacle=obstacle)
    log.info("all-reduce over %d ranks: %s", choice.world_size, choice.reason)
    return Reducer(choice, methods, dtype)


def choose(
    timings: Sequence[ReduceTiming], *, world_size: int, backend: str, obstacle: str = ""
) -> ReduceChoice:
    """The fastest way at each size, told in ranges of sizes. `obstacle` says what could not be tried."""
    ordered = tuple(sorted(timings, key=lambda each: each.num_bytes))
    told = []
    for way, group in groupby(ordered, lambda each: each.fastest):
        last = list(group)[-1]
        times = ", ".join(
            f"{backend if each == 'collective' else each} {us:.1f}" for each, us in last.us.items()
        )
        told.append(f"{backend if way == 'collective' else way} up to {last.num_bytes} bytes (µs: {times})")
    return ReduceChoice(
        world_size=world_size,
        backend=backend,
        reason="; ".join(filter(None, [", ".join(told), obstacle])),
        timings=ordered,
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


def _makers(device: torch.device, dtype: torch.dtype, world_size: int) -> dict[Way, Callable[[int], Method]]:
    """Of the ways over shared memory how each is made, for messages of at most so many bytes."""
    makers: dict[Way, Callable[[int], Method]] = {
        "one-shot": lambda max_bytes: OneShot(device, dtype, max_bytes)
    }
    if world_size in TWO_SHOT_RANKS:
        makers["two-shot"] = lambda max_bytes: TwoShot(device, dtype, max_bytes)
    return makers


def _suits(way: Way, num_bytes: int) -> bool:
    """Whether a way is worth being tried for messages of `num_bytes`."""
    match way:
        case "collective":
            return True
        case "one-shot":
            return num_bytes <= _MOST_ONE_SHOT_BYTES
        case "two-shot":
            return num_bytes >= _LEAST_TWO_SHOT_BYTES


def _try(
    make: Callable[[int], Method],
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    sizes: Sequence[int],
) -> Method | str:
    """The method, or why there is none: the same on every rank, as they must call the same kernels."""
    method, obstacle = None, "another rank could not open its memory"
    try:
        method = make(max(sizes) * width * dtype.itemsize)
    except RuntimeError as error:
        obstacle = str(error).splitlines()[0]
    if not _agrees(method is not None, device) or method is None:
        return obstacle
    if not all(adds_up(method, device, dtype, width, size) for size in (min(sizes), max(sizes))):
        return "its sums are not those of the group"
    return method


def _compare(
    methods: Methods, device: torch.device, dtype: torch.dtype, width: int, sizes: Sequence[int]
) -> list[ReduceTiming]:
    timings = []
    for size in sizes:
        x = torch.zeros(size, width, dtype=dtype, device=device)
        tried = {way: method for way, method in methods.items() if _suits(way, x.nbytes)}
        measured = [graph_us(lambda: method.reduce_(x), device) for method in tried.values()]  # noqa: B023
        # All ranks must choose alike, so they choose by the same numbers: those of the slowest.
        slowest = torch.tensor(measured, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        us = dict(zip(tried, (round(each, 2) for each in slowest.tolist()), strict=True))
        timings.append(
            ReduceTiming(
                num_bytes=x.nbytes,
                collective_us=us["collective"],
                one_shot_us=us.get("one-shot"),
                two_shot_us=us.get("two-shot"),
            )
        )
    return timings


def _obstacle(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why no kernel over shared memory can be: the same answer on every rank. None when it can."""
    if device.type != "cuda":
        return "it is for CUDA devices"
    if dtype not in _SHARED_DTYPES:
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
