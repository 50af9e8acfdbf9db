"""What the builders of chat and speech share while a service is built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest
from mingc.errors import ServeError
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage
from mingc.runtime.service.memory import MemoryAccount
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.startup_clock import StartupClock


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BuildContext:
    """The artifact and the options, and records of what was built.

    Attributes:
        on_failure: called on any thread when a rank of the thinker is lost.
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

    def load(self, stage: str, device: torch.device) -> LoadedStage:
        """Load `stage` on `device` and count its weights."""
        loaded = load_stage(self.artifact, stage, device, phase=self.clock.phase)
        self.memory.add(device, f"{stage}_weights", loaded.weight_bytes)
        return loaded
