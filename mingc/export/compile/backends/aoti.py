"""AOTInductor backend: packages with external weights, through a content-keyed cache."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from mingc.errors import CompileError, described
from mingc.export.compile.backend import Backend
from mingc.export.compile.engine_cache import keep, take
from mingc.export.compile.kernel_sources import kernel_sources
from mingc.host.machine import gpu_target
from mingc.kernels.triton.moe_config import tuned_configs

# Weights stay outside: one engine serves every rank, and several graphs share the weights of a stage.
# Inductor would bake vectors of up to 8 elements into the code, where another checkpoint's or rank's values belong.
_OPTIONS: dict[str, Any] = {
    "aot_inductor.package_constants_in_so": False,
    "always_keep_tensor_constants": True,
}
# The code that launches kernels is half the time of its C++ compiler at the default level. On a CPU it is small beside
# the kernels; on CUDA the engines of fixed sizes run once, when their launches are captured in a CUDA graph.
_PLAIN_LAUNCHES: dict[str, Any] = {"aot_inductor.compile_wrapper_opt_level": "O0"}
# The host code of a CUDA engine computes nothing and needs no vector instructions. To find out which there are,
# Inductor would compile probes and load each in a new Python that imports torch: 37 s of a worker's first compile.
_CUDA_OPTIONS: dict[str, Any] = {"cpp.vec_isa_ok": False}
# The fingerprint's capability promises these instructions. The default, -march=native, would use instructions of this
# processor that other processors of the same capability lack.
_CPU_ARCHITECTURES = {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3"}


def compile_graph(
    program: torch.export.ExportedProgram, path: Path, *, device: str, cache: Path | None, where: str
) -> float:
    """Write the package of `program` to `path`. Returns the seconds of compilation, 0.0 on a cache hit.

    Raises: CompileError, torch.OutOfMemoryError.
    """
    options = {**_OPTIONS, **(_cpu_options() if device == "cpu" else _CUDA_OPTIONS)}
    if device == "cpu" or not program.range_constraints:
        options |= _PLAIN_LAUNCHES
    if hasattr(torch._inductor.config.aot_inductor, "enable_line_tables"):
        # They would name lines of code that is not kept, for a sixth of the C++ compiler's time.
        options["aot_inductor.enable_line_tables"] = False
    kept = cache / f"{_key(program, options, device)}.pt2" if cache else None
    if kept is not None and _is_whole(kept) and take(kept, path):
        return 0.0
    started = time.perf_counter()
    if torch.__version__ < "2.13":
        _declare_every_int_array()
    try:
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                program, package_path=str(path), inductor_configs=options
            )
    except Exception as error:  # Inductor and the C++ compiler raise many kinds; all mean no engine
        if "CUDA out of memory" in str(error):  # Inductor hides its kind when a trial of a kernel raised it
            raise torch.OutOfMemoryError(str(error)) from error
        raise CompileError(
            f"AOTInductor failed: {described(error)}", where=where, fix="run mingc doctor"
        ) from error
    seconds = time.perf_counter() - started
    if kept is not None:
        keep(path, kept)
    return seconds


def _declare_every_int_array() -> None:
    """Make the C++ code that Inductor generates declare each array of sizes or strides again.

    Before torch 2.13, Inductor looks up a declared array by the id of a bound method that no longer exists. A method of
    another writer may have the same id: once in a few thousand engines an undeclared array is then used.
    """
    # Imported here: it takes seconds, and is needed only when something is compiled.
    from torch._inductor.codegen.cpp_wrapper_cpu import CppWrapperCpu

    def declare(
        wrapper: CppWrapperCpu,
        int_array: str,
        writeline: Callable[[str], None],
        known_statically: bool = False,
        graph: object = None,
    ) -> str:
        return wrapper._codegen_int_array_var_impl(int_array, writeline, known_statically)

    CppWrapperCpu.codegen_int_array_var = declare  # type: ignore[assignment]


def _is_whole(package: Path) -> bool:
    """Whether the cached package exists with all its bytes; a truncated or changed one is compiled again."""
    try:
        with zipfile.ZipFile(package) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile, zlib.error):
        return False


def _cpu_options() -> dict[str, Any]:
    architecture = _CPU_ARCHITECTURES.get(torch.backends.cpu.get_cpu_capability())
    if architecture is None or not hasattr(torch._inductor.config.cpp, "march"):
        return {}
    # torch has found the instructions and uses them itself; Inductor would find them again by compiling its vector
    # classes once for each of their extensions.
    return {"cpp.march": architecture, "cpp.vec_isa_ok": True}


def _key(program: torch.export.ExportedProgram, options: dict[str, Any], device: str) -> str:
    """sha256 of everything that affects the machine code: graph with shapes, options, versions, compiler, processor."""
    digest = hashlib.sha256()
    # The GPU's row of the table chooses kernels and their configurations.
    capability = repr(gpu_target()) if device == "cuda" else torch.backends.cpu.get_cpu_capability()
    try:
        compiler = subprocess.run(
            [os.environ.get("CXX", "g++"), "--version"], capture_output=True, text=True
        ).stdout
    except OSError as error:
        compiler = str(error)  # there is no compiler; compiling reports it
    # Stack traces name files and lines of this checkout: they change without changing the code.
    graph = re.sub(r"#.*", "", str(program))
    for part in (
        graph,
        sorted(options.items()),
        torch.__version__,
        device,
        capability,
        compiler,
        platform.machine(),
    ):
        digest.update(str(part).encode())
        digest.update(b"\0")
    if device == "cuda":
        # A graph only names the kernels it calls: their configurations and their code also decide the machine code.
        digest.update(repr(sorted(tuned_configs().items(), key=repr)).encode())
        digest.update(kernel_sources())
    return digest.hexdigest()


class AotiBackend(Backend):
    """AOTInductor: C++ on the CPU, Triton and library kernels on CUDA."""

    name = "aoti"
    suffix = ".pt2"

    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        return compile_graph(program, path, device=device, cache=cache, where=where)


BACKEND = AotiBackend()
