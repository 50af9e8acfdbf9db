"""TensorRT backend: plans for NVIDIA GPUs, with the weights outside.

For `cuda`, the GPU of this machine, torch-tensorrt converts the graph, and there is a plan for each bucket, as with
AOTInductor; its states hold the rows of a batch. For RTX cards, such as `rtx:sm89`, one plan for every size is built
from an ONNX model, on any machine, also without a GPU.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from mingc.artifacts.target import RTX_CAPABILITIES, is_rtx
from mingc.artifacts.tensorrt_engine import SUFFIX
from mingc.export.compile.backend import Backend
from mingc.export.stage import GraphDef
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import (
    INSTALL_FOR_CARDS,
    RTX,
    compiler_problem,
    compiling_library,
    find_library,
)

_PACKAGES = (
    "onnx",
    "onnxscript",
    "onnxruntime",
)  # for RTX cards; ONNX Runtime checks what no card here can run


class TensorRtBackend(Backend):
    """torch-tensorrt, or for RTX cards `torch.onnx` and TensorRT's ONNX parser; then TensorRT's builder.

    `slots` is the index of the input that `GraphDef.slots` names, if the engine's states hold the rows of a batch.
    """

    name = "tensorrt"
    suffix = SUFFIX
    takes_kernels = False

    def __init__(self, slots: int | None = None, pool_dims: Mapping[str, int] = MappingProxyType({})) -> None:
        self._slots, self.pool_dims = slots, pool_dims

    def for_graph(self, plan: GraphDef, sizes: Mapping[str, int] | None, device: str) -> Backend:
        # TensorRT for RTX 1.4, which runs on an H200, crashes at a state with a dynamic dim, here the pool's.
        if device != "cuda" or plan.slots is None:
            return self
        inputs = [each.name for each in plan.spec.inputs]
        (count,) = plan.spec.inputs[inputs.index(plan.slots)].shape
        rows = 1 + (count if isinstance(count, int) else (sizes or {})[count])
        pools = {str(each.shape[0]) for each in plan.spec.state}
        return TensorRtBackend(inputs.index(plan.slots), dict.fromkeys(pools, rows))

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        if target == "cpu":
            return (
                "TensorRT engines are for NVIDIA GPUs; use --target cuda or, for RTX cards, --target rtx:sm89"
            )
        if target == "cuda":
            here = gpu().capability if torch.cuda.is_available() else None
            unlisted = None if here is None or here in RTX_CAPABILITIES else "{}.{}".format(*here)
            return compiler_problem(torch.__version__.split("+")[0], unlisted)
        absent = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if find_library() != RTX:
            absent.append("tensorrt-rtx")
        if absent:
            return f"needs {', '.join(absent)}, not installed: {INSTALL_FOR_CARDS}"
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
        # A build takes seconds to minutes and may come late in an export, so every graph is traced here first.
        from mingc.export.compile.onnx_program import refuse_quantized
        from mingc.export.compile.tensorrt_program import FIX, refuse_graph

        names = [each.name for each in (*plan.spec.inputs, *plan.spec.state)]
        refuse_graph(program(), names, where)
        refuse_quantized(module, where, f"leave out --quantize, or {FIX}")

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        # Imported here: other backends do not need it.
        from mingc.export.compile.tensorrt_program import build_engine_file

        library = RTX if is_rtx(device) else compiling_library()
        assert library is not None, "the recipe was refused"
        started = time.perf_counter()
        is_cached = build_engine_file(
            program, path, target=device, library=library, cache=cache, where=where, slots=self._slots
        )
        return 0.0 if is_cached else time.perf_counter() - started


BACKEND = TensorRtBackend()
