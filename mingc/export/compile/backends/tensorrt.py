"""TensorRT backend: plans for NVIDIA GPUs through ONNX, with the weights outside.

For RTX cards, as `rtx:sm89`, on any machine, also without a GPU. `cuda`, the GPU of this machine, is refused: on an
H200 its engines were slower than those of AOTInductor, and none was served.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from mingc.artifacts.tensorrt_engine import SUFFIX
from mingc.export.compile.backend import Backend
from mingc.export.stage import GraphDef
from mingc.tensorrt_library import INSTALL, RTX, find_library

_PACKAGES = ("onnx", "onnxscript", "onnxruntime")


class TensorRtBackend(Backend):
    """`torch.onnx`, then TensorRT's ONNX parser and builder."""

    name = "tensorrt"
    suffix = SUFFIX
    takes_kernels = False

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        if target == "cpu":
            return "TensorRT engines are for NVIDIA's RTX cards; use --target rtx:sm89"
        if target == "cuda":
            return "on an H200 its engines were slower than those of aoti, and none was served; use --backend aoti"
        absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if find_library() != RTX:
            absent.append("tensorrt-rtx")
        if absent:
            return f"needs {', '.join(absent)}, not installed: {INSTALL}"
        if dtype != "float32":
            return f"ONNX Runtime's CPU kernels, which check engines for RTX cards, lack {dtype}; use --dtype float32"
        from mingc.export.compile.tensorrt_program import rtx_problem

        return rtx_problem(target)

    def check_graph(
        self,
        plan: GraphDef,
        module: nn.Module,
        program: Callable[[], torch.export.ExportedProgram],
        *,
        where: str,
    ) -> None:
        # A build takes from seconds to minutes, and others of the export would come before it: every graph is traced.
        from mingc.export.compile.onnx_program import refuse_quantized
        from mingc.export.compile.tensorrt_program import refuse_graph

        names = [each.name for each in (*plan.spec.inputs, *plan.spec.state)]
        refuse_graph(program(), names, where)
        # The ONNX model in the same file could not be compared.
        refuse_quantized(module, where, "leave out --quantize: no other backend builds for RTX cards")

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
        from mingc.export.compile.tensorrt_program import build_engine_file

        library = find_library()
        assert library is not None, "the recipe was refused"
        started = time.perf_counter()
        is_cached = build_engine_file(program, path, target=device, library=library, cache=cache, where=where)
        return 0.0 if is_cached else time.perf_counter() - started


BACKEND = TensorRtBackend()
