"""TensorRT backend: plans for NVIDIA GPUs by torch-tensorrt, with the weights outside.

There is a plan for each bucket, as with AOTInductor; its states hold the rows of a batch. Plans for RTX cards, such as
`rtx:sm89`, are built on any machine, also without a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from mingc.artifacts.target import RTX_CAPABILITIES, is_rtx, rtx_capabilities, sm_name
from mingc.artifacts.tensorrt_engine import SUFFIX
from mingc.export.compile.backend import Backend
from mingc.export.stage import GraphDef
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import RTX, TITLES, compiler_problem, compiling_library, import_library


class TensorRtBackend(Backend):
    """torch-tensorrt, then TensorRT's builder.

    `slots` is the index of the input that `GraphDef.slots` names, if the engine's states hold the rows of a batch.
    """

    name = "tensorrt"
    suffix = SUFFIX
    takes_kernels = False
    may_crash = True
    copies_state = True

    def __init__(self, slots: int | None = None, pool_dims: Mapping[str, int] = MappingProxyType({})) -> None:
        self._slots, self.pool_dims = slots, pool_dims

    def for_graph(self, plan: GraphDef, sizes: Mapping[str, int] | None, device: str) -> Backend:
        # TensorRT for RTX 1.4, which runs on an H200, crashes at a state with a dynamic dim, here the pool's.
        if plan.slots is None:
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
        here = gpu().capability if target == "cuda" and torch.cuda.is_available() else None
        unlisted = None if here is None or here in RTX_CAPABILITIES else "{}.{}".format(*here)
        library = RTX if is_rtx(target) else compiling_library() or RTX
        problem = compiler_problem(library, torch.__version__.split("+")[0], unlisted)
        if problem is None and library == RTX and unlisted and dtype == "float32":
            return (
                f"{TITLES[RTX]} computes float32 with errors of 1e-3 on a GPU of compute capability {unlisted}, which "
                "it does not list; use --dtype bfloat16"
            )
        if problem is not None or not is_rtx(target):
            return problem
        try:
            names = [sm_name(each) for each in rtx_capabilities(target) or ()]
        except ValueError:
            return None  # the recipe reports it
        trt = import_library(RTX)
        absent = [name for name in names if not hasattr(trt.ComputeCapability, name.upper())]
        return f"{TITLES[RTX]} {trt.__version__} cannot build for {', '.join(absent)}" if absent else None

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
