"""ONNX backend: models for ONNX Runtime on a CPU, with the weights outside."""

from __future__ import annotations

import importlib.util
import time
from pathlib import Path

import torch

from mingc.export.compile.backend import Backend

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class OnnxBackend(Backend):
    """`torch.onnx` to a `.onnx` file, which ONNX Runtime optimizes when it is loaded."""

    name = "onnx"
    suffix = ".onnx"

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        if target != "cpu":
            return f"engines of ONNX Runtime were not run on {target}; use --target cpu"
        if dtype != "float32":
            return f"ONNX Runtime's CPU kernels lack {dtype}; use --dtype float32"
        absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if absent:
            return f"needs {', '.join(absent)}, not installed: pip install 'mingc[onnx]'"
        return None

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        # Imported here: torch.onnx takes seconds, and other backends do not need it.
        from mingc.export.compile.onnx_program import to_onnx

        started = time.perf_counter()
        path.write_bytes(to_onnx(program, where).SerializeToString(deterministic=True))
        return time.perf_counter() - started


BACKEND = OnnxBackend()
