"""A backend for tests whose library ends its process: while it compiles, or runs other graphs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from eager_backend import EagerBackend
from torch.export import ExportedProgram

_FATAL = ("audio_encoder.encode", "cfm.aggregate")


class FatalBackend(EagerBackend):
    """Engines are those of `eager`, with another loader."""

    name = "fatal"
    suffix = ".fatal"

    def compile(self, program: ExportedProgram, path: Path, *, where: str, **options: Any) -> float:
        if where in _FATAL:
            path.write_bytes(b"a part")
            os.abort()
        return super().compile(program, path, where=where, **options)


BACKEND = FatalBackend()
