"""A backend outside mingc: an engine is the exported program itself, with weights of zero bytes."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import nn

from mingc.export.compile.backend import Backend


class ToyBackend(Backend):
    """Stores the program that `torch.export` made."""

    name = "toy_program"
    suffix = ".toy"

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        return None if target == "cpu" else "runs on the CPU only"

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        started = time.perf_counter()
        weights = dict(program.state_dict)
        for name, value in weights.items():  # the runtime binds those of the stage's weights file
            empty = torch.zeros_like(value)
            program.state_dict[name] = (
                nn.Parameter(empty, False) if isinstance(value, nn.Parameter) else empty
            )
        with path.open("wb") as file:
            torch.export.save(program, file)
        program.state_dict.update(weights)
        return time.perf_counter() - started


BACKEND = ToyBackend()
