"""A backend for tests that compiles nothing: an engine is the Python code of the captured graph."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.fx.graph import CodeGen

from mingc.export.compile.backend import Backend


class EagerBackend(Backend):
    """Writes the code of the graph, the names of its weights, and tensors that it holds as constants."""

    name = "eager"
    suffix = ".eager"

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
        module = program.module(check_guards=False)
        module.graph.set_codegen(CodeGen())  # tensors in, tensors out: no pytrees
        code = module.graph.python_code("self").src
        constants = {name: value.contiguous() for name, value in program.constants.items()}
        weights = "\n".join(program.state_dict)
        save_file(constants, path, metadata={"code": code, "weights": weights})
        return time.perf_counter() - started


BACKEND = EagerBackend()
