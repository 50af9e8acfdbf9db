"""ONNX backend: models for ONNX Runtime on a CPU or the GPU of this machine, with the weights outside."""

from __future__ import annotations

import importlib.util
import os
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from mingc.artifacts.target import is_rtx
from mingc.export.compile.backend import Backend
from mingc.export.compile.engine_cache import keep, program_digest
from mingc.export.stage import GraphDef
from mingc.host.onnx_library import INSTALL, INSTALL_CUDA, MODULE, has_cuda_provider

_MODEL = "model.onnx"  # in a cached engine
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
        kept = cache / f"{_key(program)}{self.suffix}" if cache else None
        if kept is not None and _take(kept, path):
            return 0.0
        # Imported here: torch.onnx takes seconds, and other backends do not need it.
        from mingc.export.compile.onnx_program import to_onnx

        started = time.perf_counter()
        path.write_bytes(to_onnx(program, where).SerializeToString(deterministic=True))
        seconds = time.perf_counter() - started
        if kept is not None:
            _keep(path, kept)
        return seconds


def _key(program: torch.export.ExportedProgram) -> str:
    """sha256 of everything that affects a model: graph with shapes, its constants, versions, and the translation."""
    digest = program_digest(program)
    for package in ("onnx", "onnxscript"):
        digest.update(f"\0{package} {version(package)}".encode())
    digest.update((Path(__file__).parents[1] / "onnx_program.py").read_bytes())
    return str(digest.hexdigest())


def _take(kept: Path, path: Path) -> bool:
    """Copy the model of the cached engine to `path`; False if it is absent or damaged."""
    try:
        with zipfile.ZipFile(kept) as package:
            content = package.read(_MODEL)  # compares a checksum
    except (FileNotFoundError, KeyError, zipfile.BadZipFile):
        return False
    path.write_bytes(content)
    with suppress(OSError):  # a cache that others own, or that is read-only
        os.utime(kept)
    return True


def _keep(path: Path, kept: Path) -> None:
    """Keep the model in a zip file, whose checksum tells whether it is whole."""
    with tempfile.TemporaryDirectory() as folder:
        package = Path(folder) / kept.name
        with zipfile.ZipFile(package, "w") as archive:
            archive.write(path, _MODEL)
        keep(package, kept)


BACKEND = OnnxBackend()
