"""What the builders of chat and speech share while a service is built, and the memory that they have allocated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest
from mingc.errors import ServeError
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage
from mingc.runtime.request import MemoryUse
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.startup_clock import StartupClock

log = logging.getLogger("mingc.startup")

HOST = "host"


class MemoryAccount:
    """Adds up bytes by device and owner while a service is built."""

    def __init__(self) -> None:
        self._bytes: dict[tuple[str, str], int] = {}

    def add(self, device: torch.device | str, owner: str, num_bytes: int) -> None:
        """Count `num_bytes` that `owner` has allocated on `device`."""
        key = (str(device), owner)
        self._bytes[key] = self._bytes.get(key, 0) + num_bytes

    @property
    def uses(self) -> tuple[MemoryUse, ...]:
        """All entries, grouped by device."""
        return tuple(
            MemoryUse(device=device, owner=owner, num_bytes=num_bytes)
            for (device, owner), num_bytes in sorted(self._bytes.items(), key=lambda item: item[0][0])
        )

    def log(self, free: Mapping[str, int]) -> None:
        """Log a line per device. `free`: bytes that are free now, for the devices where that is known."""
        by_device: dict[str, list[str]] = {}
        for use in self.uses:
            by_device.setdefault(use.device, []).append(f"{use.owner} {_mib(use.num_bytes)}")
        for device, owners in by_device.items():
            left = f"; free {_mib(free[device])}" if device in free else ""
            log.info("memory of %s: %s%s", device, ", ".join(owners), left)


def free_bytes(devices: list[torch.device]) -> dict[str, int]:
    """Free memory of the CUDA devices of `devices`. Creates a context on each of them, which takes memory, too."""
    return {str(each): torch.cuda.mem_get_info(each)[0] for each in devices if each.type == "cuda"}


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuildContext:
    """The artifact and the options, and records of what was built.

    Attributes:
        on_failure: any thread calls it when a rank of the thinker is lost.
        processes: ends the started processes when a later part cannot be built.
    """

    artifact: Artifact
    options: EngineOptions
    clock: StartupClock
    on_failure: Callable[[ServeError], None]
    processes: ExitStack
    memory: MemoryAccount = field(default_factory=MemoryAccount)

    @property
    def manifest(self) -> Manifest:
        return self.artifact.manifest

    def load(
        self, stage: str, device: torch.device, *, copied: Mapping[str, torch.Tensor] | None = None
    ) -> LoadedStage:
        """Load `stage` on `device` and count its weights. `copied`: as of `load_stage`."""
        phase = partial(self.clock.phase, stage=stage)
        loaded = load_stage(self.artifact, stage, device, copied=copied, phase=phase)
        self.memory.add(device, f"{stage}_weights", loaded.weight_bytes)
        return loaded
