"""A backend for tests whose library ends its process: while it compiles `cfm.aggregate`, or runs other graphs."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from eager_backend import EagerBackend


class FatalBackend(EagerBackend):
    """Engines are those of `eager`, with another loader."""

    name = "fatal"
    suffix = ".fatal"

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        if where == "cfm.aggregate":
            path.write_bytes(b"a part")
            os.abort()
        return super().compile(program, path, device=device, cache=cache, where=where)


BACKEND = FatalBackend()
