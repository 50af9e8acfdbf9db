"""Describes this machine for engines: torch release, device, instruction set or compute capability, GPU."""

from __future__ import annotations

import functools
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mingc.artifacts.target import Host, Target, lookup

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as its driver describes it. `cache_bytes` is the L2 cache."""

    name: str
    capability: tuple[int, int]
    num_multiprocessors: int
    memory_bytes: int
    cache_bytes: int

    @property
    def target(self) -> Target:
        """The row of the GPU table for it."""
        return lookup(self.capability, self.name, self.num_multiprocessors)


def current_host(device: str, index: int | None = None) -> Host:
    """The machine that runs this process, described for `device` (cpu or cuda); as a CPU if there is no GPU.

    `index`: number of the GPU; None: the current GPU.
    """
    import torch

    release = torch.__version__.split("+")[0]
    if device == "cuda" and torch.cuda.is_available():
        capability = "{}.{}".format(*gpu(index).capability)
    else:
        device = "cpu"
        capability = torch.backends.cpu.get_cpu_capability()
    return Host(torch=release, device=device, capability=capability)


def gpu(device: torch.device | int | None = None) -> Gpu:
    """The GPU `device`, or the current one."""
    import torch

    index = device if isinstance(device, int) or device is None else device.index
    return _gpu(torch.cuda.current_device() if index is None else index)


def gpu_target(device: torch.device | int | None = None) -> Target:
    """Row of the GPU table for the GPU `device`, or for the current one."""
    return gpu(device).target


def equal_gpus() -> tuple[str, ...]:
    """Visible GPUs of the same model as the current GPU, as CUDA_VISIBLE_DEVICES would list them."""
    import torch

    if not torch.cuda.is_available():
        return ()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = torch.cuda.device_count()
    names = [str(index) for index in range(count)] if visible is None else visible.split(",")[:count]
    own = gpu()
    return tuple(
        name.strip()
        for index, name in enumerate(names)
        if (gpu(index).name, gpu(index).capability) == (own.name, own.capability)
    )


@functools.cache
def _gpu(index: int) -> Gpu:
    """The only place that reads device properties."""
    import torch

    properties = torch.cuda.get_device_properties(index)
    return Gpu(
        name=properties.name,
        capability=(properties.major, properties.minor),
        num_multiprocessors=properties.multi_processor_count,
        memory_bytes=properties.total_memory,
        cache_bytes=properties.L2_cache_size,
    )


def free_memory_bytes() -> int:
    """Memory that processes of this machine, or of this container, can still take; unused caches count as free."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text(encoding="ascii"))  # "max" without a limit
        used = int((group / "memory.current").read_text(encoding="ascii"))
        cached = dict(
            line.split() for line in (group / "memory.stat").read_text(encoding="ascii").splitlines()
        )
    except (OSError, ValueError):
        return free
    return min(free, max(0, limit - used + int(cached.get("inactive_file", 0))))


def driver_version() -> str | None:
    """The release of the NVIDIA kernel driver, as `570.86.15`; None without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else None
