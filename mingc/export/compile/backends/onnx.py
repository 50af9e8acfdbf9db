"""ONNX backend: models for ONNX Runtime on a CPU or the GPU of this machine, with the weights outside."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mingc.artifacts.target import is_rtx
from mingc.export.compile.backend import Backend
from mingc.export.stage import GraphDef
from mingc.host.onnx_library import INSTALL, INSTALL_CUDA, MODULE, has_cuda_provider

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class OnnxBackend(Backend):
    """`torch.onnx` to a `.onnx` file, which ONNX Runtime optimizes when it is loaded."""

    name = "onnx"
    suffix = ".onnx"
    takes_kernels = False

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        if is_rtx(target):
            return f"engines of ONNX Runtime were not run on {target}; use --backend tensorrt"
        if dtype != "float32":
            reason = (
                f"ONNX Runtime's CPU kernels lack {dtype}"
                if target == "cpu"
                else f"its engines were not run in {dtype}"
            )
            return f"{reason}; use --dtype float32"
        absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if target == "cuda" and not has_cuda_provider():
            absent = [*(each for each in absent if each != MODULE), "onnxruntime-gpu"]
        if absent:
            fix = INSTALL_CUDA if target == "cuda" else INSTALL
            return f"needs {', '.join(absent)}, not installed: {fix}"
        return None

    def check_graph(
        self,
        plan: GraphDef,
        module: nn.Module,
        program: Callable[[], torch.export.ExportedProgram],
        *,
        where: str,
    ) -> None:
        from mingc.export.compile.onnx_program import (
            MAX_GATHERED_BYTES,
            refuse_large_gathers,
            refuse_quantized,
        )

        aoti = "leave out --quantize, or compile this stage with AOTInductor: --backend aoti:STAGE"
        refuse_quantized(module, where, aoti)
        largest = max((each.nbytes for each in (*module.parameters(), *module.buffers())), default=0)
        # One row gathers each part of a weight at most once; this bound shows without a trace that most graphs fit.
        if largest * max((dim.maximum for dim in plan.spec.dims), default=1) > MAX_GATHERED_BYTES:
            refuse_large_gathers(program(), where)

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
