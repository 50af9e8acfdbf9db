"""Memory transfer rates: host memory, between host and GPU, between GPUs, and of an NCCL all-reduce.

A transfer without the required devices becomes a row that is marked as not run, with the reason.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mingc.probe.report import Transfer

NUM_BYTES = 2**28
_SAMPLES, _CALLS = 5, 4  # the fastest of several samples, each of calls without a pause between them
_NO_GPU = "no CUDA device"

Timer = Callable[[Callable[[], object], Sequence[torch.device]], float]


def measure_transfers(
    progress: Callable[[str], None], gpus: Sequence[torch.device] | None = None, timer: Timer | None = None
) -> tuple[Transfer, ...]:
    """Rates of the host, of every visible GPU, and between all of them. `gpus` and `timer` are for tests."""
    timer = timer or best_seconds
    gpus = visible_gpus() if gpus is None else gpus
    progress("transfer rates")
    rows = host_transfers(timer)
    chosen: list[torch.device | None] = [*gpus] or [None]
    for gpu in chosen:
        rows += _host_to_gpu(gpu, timer)
    if len(gpus) < 2:
        why = f"{len(gpus)} of 2 CUDA devices" if gpus else _NO_GPU
        rows += [_not_run(name, why) for name in ("GPU to GPU, peer copy", "NCCL all-reduce, bus bandwidth")]
    else:
        rows += [_peer_copy(source, target, timer) for source, target in itertools.permutations(gpus, 2)]
        rows.append(_all_reduce(gpus, timer))
    return tuple(rows)


def visible_gpus() -> list[torch.device]:
    """List the CUDA devices that this process sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return [torch.device("cuda", index) for index in range(count)]


def best_seconds(run: Callable[[], object], devices: Sequence[torch.device]) -> float:
    """Seconds of a call until `devices` have finished it: the fastest sample."""

    def wait() -> None:
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

    def sample() -> float:
        wait()
        started = time.perf_counter()
        for _ in range(_CALLS):
            run()
        wait()
        return (time.perf_counter() - started) / _CALLS

    sample()  # the first calls set up copies, peers and communicators
    return min(sample() for _ in range(_SAMPLES))


def host_transfers(timer: Timer) -> list[Transfer]:
    """Copying within host memory, each byte read once and written once, and reading it; with torch's threads."""
    source = torch.ones(NUM_BYTES // 4)
    target = torch.ones_like(source)
    copy_s, read_s = timer(lambda: target.copy_(source), []), timer(source.sum, [])
    return [
        _rate("host memory, copy (read + write)", 2 * NUM_BYTES, copy_s),
        _rate("host memory, read", NUM_BYTES, read_s),
    ]


def _host_to_gpu(gpu: torch.device | None, timer: Timer) -> list[Transfer]:
    """Both directions, with pinned host memory, which the driver accesses directly, and with pageable memory."""
    rows = []
    for kind in ("pinned", "pageable"):
        names = (f"host to {gpu or 'GPU'}, {kind}", f"{gpu or 'GPU'} to host, {kind}")
        if gpu is None:
            rows += [_not_run(name, _NO_GPU) for name in names]
            continue
        try:
            host, device = host_block(is_pinned=kind == "pinned"), _block(gpu)
        except RuntimeError as error:  # memory of either kind does not suffice
            rows += [_not_run(name, str(error).splitlines()[0]) for name in names]
            continue
        for name, target, source in ((names[0], device, host), (names[1], host, device)):
            rows.append(_rate(name, NUM_BYTES, timer(_copy(target, source), [gpu])))
    return rows


def _peer_copy(source: torch.device, target: torch.device, timer: Timer) -> Transfer:
    """Time one direction. Its name says whether the copy goes through host memory, without peer access."""
    has_access = source.type != "cuda" or torch.cuda.can_device_access_peer(target, source)
    name = f"{source} to {target}, {'peer copy' if has_access else 'copy through the host'}"
    try:
        seconds = timer(_copy(_block(target), _block(source)), [source, target])
    except RuntimeError as error:
        return _not_run(name, str(error).splitlines()[0])
    return _rate(name, NUM_BYTES, seconds)


def _all_reduce(gpus: Sequence[torch.device], timer: Timer) -> Transfer:
    """Bus bandwidth: the bytes that each of n GPUs sends in a ring, 2 (n - 1) / n of its tensor, per second."""
    name = f"NCCL all-reduce of {len(gpus)} GPUs, bus bandwidth"
    try:
        tensors = [_block(gpu).view(torch.bfloat16) for gpu in gpus]
        seconds = timer(lambda: nccl_all_reduce(tensors), gpus)
    except RuntimeError as error:
        return _not_run(name, str(error).splitlines()[0])
    return _rate(name, 2 * (len(gpus) - 1) * NUM_BYTES // len(gpus), seconds)


def nccl_all_reduce(tensors: list[Tensor]) -> None:
    """Sum the tensors, one on each GPU, in place."""
    torch.cuda.nccl.all_reduce(tensors)  # type: ignore[no-untyped-call]


def host_block(*, is_pinned: bool) -> Tensor:
    """Host memory whose pages exist: unwritten ones would all be one page of zeros."""
    return torch.empty(NUM_BYTES, dtype=torch.uint8, pin_memory=is_pinned).fill_(1)


def _block(device: torch.device) -> Tensor:
    return torch.zeros(NUM_BYTES, dtype=torch.uint8, device=device)


def _copy(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _rate(name: str, num_bytes: int, seconds: float) -> Transfer:
    return Transfer(
        transfer=name, num_bytes=num_bytes, ms=1e3 * seconds, gb_s=round(num_bytes / seconds / 1e9, 3)
    )


def _not_run(name: str, why: str) -> Transfer:
    return Transfer(transfer=name, num_bytes=0, ms=None, gb_s=None, not_run=why)
