"""Timing of functions on a device, and the device's peak rates."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mingc.host.description import processor_name
from mingc.host.machine import gpu
from mingc.probe.report import CacheRate, PeakRates

_WARM_UPS = 2
_CACHED_BYTES = tuple(2**power for power in range(16, 28, 2))  # 64 KiB to 64 MiB
# Bytes to read for each size: small sizes get many calls, so that some of them run undisturbed.
_CACHED_READ_BYTES = 2**27
_FLUSH_CACHES = 16  # the flush takes long enough for the host to enqueue the timed call behind it


class Stopwatch:
    """Times calls on one device, by events on CUDA and by the wall clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._flush: Tensor | None = None
        if device.type == "cuda":
            cache = gpu(device).cache_bytes
            self._flush = torch.empty(_FLUSH_CACHES * cache, dtype=torch.uint8, device=device)

    def samples_ms(self, run: Callable[[], object], count: int, *, cold: bool = False) -> list[float]:
        """Milliseconds of `count` calls; `cold` overwrites the device cache before each (CUDA only)."""
        for _ in range(_WARM_UPS):
            run()
        if self._flush is None:
            return [_wall_ms(run) for _ in range(count)]
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]  # type: ignore[no-untyped-call]
        for start, end in events:
            if cold:
                self._flush.zero_()
            start.record()
            run()
            end.record()
        torch.cuda.synchronize(self._device)
        return [float(start.elapsed_time(end)) for start, end in events]

    def enqueue_ms(self, run: Callable[[], object], count: int) -> float | None:
        """Measure the least host milliseconds of a call on an idle CUDA device; None on the CPU."""
        if self._flush is None:
            return None
        samples = []
        for _ in range(_WARM_UPS):
            run()
        for _ in range(count):
            torch.cuda.synchronize(self._device)
            samples.append(_wall_ms(run))
        torch.cuda.synchronize(self._device)
        return min(samples)

    def peak_rates(self, dtype: torch.dtype) -> PeakRates:
        """Measure rates of copying, reading and matmul, the fastest of several calls; takes a fraction of a second.

        A median would not be a peak: other processes and clock changes slow down some calls.
        """
        is_cuda = self._flush is not None
        side, words, count = (8192, 2**29, 10) if is_cuda else (1024, 2**26, 5)
        # On a CPU, drawing every number would take two fifths of the whole time.
        source = torch.randn(2**20, device=self._device).repeat(words // 2**20)
        target = torch.empty_like(source)
        copy_ms = min(self.samples_ms(lambda: target.copy_(source), count))
        read_ms = min(self.samples_ms(source.sum, count))
        a, b = (torch.randn(side, side, device=self._device).to(dtype) for _ in range(2))
        matmul_ms = min(self.samples_ms(lambda: torch.mm(a, b), count))
        name = torch.cuda.get_device_name(self._device) if is_cuda else processor_name()
        return PeakRates(
            device=name,
            copy_tb_s=_four_digits(2 * source.nbytes / copy_ms / 1e9),
            read_tb_s=_four_digits(source.nbytes / read_ms / 1e9),
            matmul_tflop_s=_four_digits(2 * side**3 / matmul_ms / 1e9),
            matmul_dtype=str(dtype).removeprefix("torch."),
            cache_bytes=self._flush.numel() // _FLUSH_CACHES if self._flush is not None else None,
            cache_rates=() if is_cuda else tuple(self._cache_rate(size) for size in _CACHED_BYTES),
        )

    def _cache_rate(self, num_bytes: int) -> CacheRate:
        """Take the faster of a sum and a matrix-vector product, which reads its matrix as most engines do."""
        matrix = torch.randn(num_bytes // 1024, 256)
        vector, result = torch.randn(256), torch.empty(len(matrix))
        count = max(5, min(1000, _CACHED_READ_BYTES // num_bytes))
        fastest_ms = min(
            *self.samples_ms(matrix.sum, count),
            *self.samples_ms(lambda: torch.mv(matrix, vector, out=result), count),
        )
        return CacheRate(num_bytes=num_bytes, read_tb_s=_four_digits(num_bytes / fastest_ms / 1e9))


def percentile(samples: Sequence[float], share: float) -> float:
    """Find the sample that a fraction `share` of all samples does not exceed."""
    ordered = sorted(samples)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def _four_digits(rate: float) -> float:
    """Round a rate to four significant digits, so that it is above 0 on the slowest machine."""
    return float(f"{rate:.4g}")


def _wall_ms(run: Callable[[], object]) -> float:
    started = time.perf_counter()
    run()
    return 1e3 * (time.perf_counter() - started)
