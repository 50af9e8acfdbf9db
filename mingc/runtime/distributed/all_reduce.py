"""All-reduce over the thinker's ranks, called between its engines and captured in CUDA graphs.

There are three algorithms (`mingc.runtime.distributed.algorithms`). The process group's collective (NCCL, or gloo on
the CPU) always works. On GPUs that can access each other's memory there are also a one-shot kernel for small messages
(a decode step has two per layer) and a two-shot kernel for large ones (a prefill chunk has two per layer). At startup
all algorithms are timed in a CUDA graph at the message sizes of all decode batches and chunks, and the fastest one is
selected. NVLink multicast is not used.
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

from mingc.runtime.distributed.algorithms import (
    TWO_SHOT_WORLD_SIZES,
    AllReduceAlgorithm,
    CollectiveAllReduce,
    OneShotAllReduce,
    TwoShotAllReduce,
)
from mingc.runtime.distributed.process_group import num_ranks
from mingc.runtime.engines.cuda_graphs import GraphPool

log = logging.getLogger("mingc.ranks")

_CALLS = 20  # one graph has so many, so that its launch counts little
_REPLAYS = 15
_KERNEL_DTYPES = (torch.bfloat16, torch.float32)  # the one-shot and two-shot kernels support these
_TOLERANCE = 2e-2  # a sum in half precision may differ by so much, relative to the largest value
_ROW_ALIGNMENT = 16  # the kernels read so many bytes at a time; the size of a row must be a multiple
_MAX_ONE_SHOT_BYTES = (
    2**22
)  # every rank reads the whole message of every other; larger ones were never the fastest
_MIN_TWO_SHOT_BYTES = 2**17  # two barriers and two copies: for smaller messages it cannot be the fastest

AlgorithmName = Literal["collective", "one-shot", "two-shot"]
Algorithms = Mapping[AlgorithmName, AllReduceAlgorithm]


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReduceTiming:
    """Microseconds of one all-reduce of `num_bytes` in a CUDA graph on the slowest rank, by measured algorithm.

    The collective is the first of `us` and so wins ties.
    """

    num_bytes: int
    us: Mapping[AlgorithmName, float]

    @property
    def fastest(self) -> AlgorithmName:
        return min(self.us, key=lambda name: self.us[name])


@dataclass(frozen=True, kw_only=True, slots=True)
class AllReducePlan:
    """The algorithm selected for each message size.

    Attributes:
        backend: backend of the process group; "none" for one rank.
        reason: what was selected and why, for logs and /health.
        timings: measurements in order of size; empty if there was nothing to choose.
    """

    world_size: int
    backend: str
    reason: str
    timings: tuple[AllReduceTiming, ...] = ()

    def algorithm(self, num_bytes: int) -> AlgorithmName:
        """The fastest algorithm at the next larger measured size; the collective above all measured sizes."""
        for timing in self.timings:
            if num_bytes <= timing.num_bytes:
                return timing.fastest
        return "collective"


class AllReduce:
    """Sums tensors over the ranks. Every rank must call it with the same shapes in the same order.

    Args:
        algorithms: the algorithms that `plan` names; empty for one rank: then nothing is done.
        dtype: messages of other dtypes use the collective.
    """

    def __init__(
        self, plan: AllReducePlan, algorithms: Algorithms, dtype: torch.dtype = torch.bfloat16
    ) -> None:
        self.plan = plan
        self._algorithms = algorithms
        self._dtype = dtype

    def all_reduce_(self, x: Tensor) -> None:
        """Replace `x`, contiguous, by its sum over the ranks. Does not wait for the device."""
        if self._algorithms:
            name = self.plan.algorithm(x.nbytes) if x.dtype == self._dtype else "collective"
            self._algorithms[name].all_reduce_(x)


def create_all_reduce(
    device: torch.device, dtype: torch.dtype, *, width: int, tokens: Sequence[int]
) -> AllReduce:
    """Create the all-reduce of this process's group, after `process_group.init`. Every rank calls it: a collective.

    Args:
        width: values per token; messages are (tokens, width).
        tokens: message sizes for which algorithms are selected: decode batches and chunks.
    """
    world_size = num_ranks()
    if world_size == 1:
        return AllReduce(AllReducePlan(world_size=1, backend="none", reason="one rank, no all-reduce"), {})
    backend = str(dist.get_backend())
    algorithms: dict[AlgorithmName, AllReduceAlgorithm] = {"collective": CollectiveAllReduce()}
    sizes = sorted(set(tokens))
    unavailable = _unavailable_reason(device, dtype, width)
    if unavailable is None:
        reasons = []
        for name, create in _factories(device, dtype, world_size).items():
            candidates = [size for size in sizes if _is_candidate(name, size * width * dtype.itemsize)]
            if candidates:
                found = _try_create(create, device, dtype, width=width, sizes=candidates)
                if isinstance(found, str):
                    reasons.append(f"no {name} all-reduce: {found}")
                else:
                    algorithms[name] = found
        unavailable = "; ".join(reasons)
    else:
        unavailable = f"no one-shot and two-shot all-reduce: {unavailable}"
    timings = _measure(algorithms, device, dtype, width, sizes) if len(algorithms) > 1 else []
    plan = select_algorithms(timings, world_size=world_size, backend=backend, unavailable_reason=unavailable)
    log.info("all-reduce over %d ranks: %s", plan.world_size, plan.reason)
    return AllReduce(plan, algorithms, dtype)


def select_algorithms(
    timings: Sequence[AllReduceTiming], *, world_size: int, backend: str, unavailable_reason: str = ""
) -> AllReducePlan:
    """Select the fastest algorithm for each size. `unavailable_reason`: why some could not be measured."""
    ordered = tuple(sorted(timings, key=lambda each: each.num_bytes))
    ranges = []
    for name, group in groupby(ordered, lambda each: each.fastest):
        last = list(group)[-1]
        times = ", ".join(
            f"{backend if each == 'collective' else each} {us:.1f}" for each, us in last.us.items()
        )
        label = backend if name == "collective" else name
        ranges.append(f"{label} up to {last.num_bytes} bytes (µs: {times})")
    return AllReducePlan(
        world_size=world_size,
        backend=backend,
        reason="; ".join(filter(None, [", ".join(ranges), unavailable_reason])),
        timings=ordered,
    )


def time_captured_us(run: Callable[[], None], device: torch.device) -> float:
    """Median microseconds of one `run` in a CUDA graph of several. A collective if `run` is one."""

    def run_all() -> tuple[Tensor, ...]:
        for _ in range(_CALLS):
            run()
        return ()

    graph, _ = GraphPool(device).capture(run_all, "the all-reduce measurement")
    samples: list[float] = []
    for _ in range(_REPLAYS):
        start, end = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / _CALLS)
    return statistics.median(samples)


def is_correct(
    algorithm: AllReduceAlgorithm, device: torch.device, dtype: torch.dtype, width: int, rows: int
) -> bool:
    """Whether sums of random values are right, and bit-identical on all ranks: routers must choose the same experts."""
    generator = torch.Generator(device).manual_seed(dist.get_rank())
    x = torch.randn(rows, width, generator=generator, device=device).to(dtype)
    expected = x.float()
    dist.all_reduce(expected)
    algorithm.all_reduce_(x)
    lowest, highest = x.clone(), x.clone()
    dist.all_reduce(lowest, op=dist.ReduceOp.MIN)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX)
    error = (x.float() - expected).abs().max() / expected.abs().max()
    return _is_true_on_all_ranks(torch.equal(lowest, highest) and float(error) < _TOLERANCE, device)


def _factories(
    device: torch.device, dtype: torch.dtype, world_size: int
) -> dict[AlgorithmName, Callable[[int], AllReduceAlgorithm]]:
    """Constructors of the algorithms over symmetric memory; they take the size of the largest message in bytes."""
    factories: dict[AlgorithmName, Callable[[int], AllReduceAlgorithm]] = {
        "one-shot": lambda max_bytes: OneShotAllReduce(device, dtype, max_bytes)
    }
    if world_size in TWO_SHOT_WORLD_SIZES:
        factories["two-shot"] = lambda max_bytes: TwoShotAllReduce(device, dtype, max_bytes)
    return factories


def _is_candidate(name: AlgorithmName, num_bytes: int) -> bool:
    """Whether an algorithm can be the fastest for messages of `num_bytes`."""
    match name:
        case "collective":
            return True
        case "one-shot":
            return num_bytes <= _MAX_ONE_SHOT_BYTES
        case "two-shot":
            return num_bytes >= _MIN_TWO_SHOT_BYTES


def _try_create(
    create: Callable[[int], AllReduceAlgorithm],
    device: torch.device,
    dtype: torch.dtype,
    *,
    width: int,
    sizes: Sequence[int],
) -> AllReduceAlgorithm | str:
    """The algorithm, or why it is unavailable. All ranks agree, because they must call the same kernels."""
    algorithm, reason = None, "another rank could not open its memory"
    try:
        algorithm = create(max(sizes) * width * dtype.itemsize)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    if not _is_true_on_all_ranks(algorithm is not None, device) or algorithm is None:
        return reason
    if not all(is_correct(algorithm, device, dtype, width, size) for size in (min(sizes), max(sizes))):
        return "its sums differ from the collective's"
    return algorithm


def _measure(
    algorithms: Algorithms, device: torch.device, dtype: torch.dtype, width: int, sizes: Sequence[int]
) -> list[AllReduceTiming]:
    timings = []
    for size in sizes:
        x = torch.zeros(size, width, dtype=dtype, device=device)
        tried = {name: each for name, each in algorithms.items() if _is_candidate(name, x.nbytes)}
        measured = [time_captured_us(lambda: each.all_reduce_(x), device) for each in tried.values()]  # noqa: B023
        # All ranks must select the same algorithm, so all use the times of the slowest rank.
        slowest = torch.tensor(measured, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        us = dict(zip(tried, (round(each, 2) for each in slowest.tolist()), strict=True))
        timings.append(AllReduceTiming(num_bytes=x.nbytes, us=us))
    return timings


def _unavailable_reason(device: torch.device, dtype: torch.dtype, width: int) -> str | None:
    """Why no algorithm over symmetric memory can be used; None if they can. All ranks return the same."""
    if device.type != "cuda":
        return "they need CUDA devices"
    if dtype not in _KERNEL_DTYPES:
        return f"they do not support {dtype}"
    if width * dtype.itemsize % _ROW_ALIGNMENT:
        return f"rows of {width} values are not a multiple of {_ROW_ALIGNMENT} bytes"
    own = torch.tensor([device.index or 0], device=device)
    indices = torch.empty(dist.get_world_size(), dtype=own.dtype, device=device)
    dist.all_gather_into_tensor(indices, own)
    others = [index for index in indices.tolist() if index != own.item()]
    has_access = all(torch.cuda.can_device_access_peer(device, index) for index in others)
    return None if _is_true_on_all_ranks(has_access, device) else "the GPUs cannot access each other's memory"


def _is_true_on_all_ranks(flag: bool, device: torch.device) -> bool:
    all_ranks = torch.tensor([int(flag)], device=device)
    dist.all_reduce(all_ranks, op=dist.ReduceOp.MIN)
    return bool(all_ranks.item())
