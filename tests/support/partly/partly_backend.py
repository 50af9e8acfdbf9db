"""A backend for tests that compiles what is hard for a compiler; the other graphs are `eager`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eager_backend import BACKEND as EAGER
from torch.export import ExportedProgram

from mingc.export.compile.backend import Backend
from mingc.export.compile.backends.aoti import BACKEND as AOTI

# `cfm.sample` and `audio_vae.stream` take as long as all of these together; exhaustive tests of tests/export compile
# them.
COMPILED = (
    "audio_encoder.encode",
    "vision_encoder.encode",
    "thinker.prefill_attention",
    "thinker.decode_attention",
    "thinker.prefill_experts",
    "talker.step",
)


class PartlyBackend(Backend):
    """Chooses the compiler by the name of the graph."""

    name = "partly"
    suffix = ".partly"

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        return EAGER.unsupported_reason(target, dtype)

    def compile(self, program: ExportedProgram, path: Path, *, where: str, **options: Any) -> float:
        if where not in COMPILED:
            return EAGER.compile(program, path, where=where, **options)
        package = path.with_suffix(AOTI.suffix)  # the compiler insists on its ending
        seconds = AOTI.compile(program, package, where=where, **options)
        package.rename(path)
        return seconds


BACKEND = PartlyBackend()
