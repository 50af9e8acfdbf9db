"""NVIDIA's TensorRT libraries, TensorRT for RTX and classic TensorRT, and torch-tensorrt, which compiles for each.

Both libraries have the same API. They have 200 MB, so none is imported before an engine is built or loaded. Classic
TensorRT was never run with mingc.
"""

from __future__ import annotations

import importlib
import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

RTX = "tensorrt_rtx"
CLASSIC = "tensorrt"
TITLES = {RTX: "TensorRT for RTX", CLASSIC: "TensorRT"}
DISTRIBUTIONS = {RTX: "tensorrt-rtx", CLASSIC: "tensorrt"}
INSTALL = "pip install 'mingc[tensorrt-runtime]'"
INSTALL_FOR_CARDS = "pip install 'mingc[onnx,tensorrt-runtime]'"
INSTALL_COMPILER = {RTX: "pip install 'mingc[tensorrt]'", CLASSIC: "pip install 'mingc[tensorrt-classic]'"}
COMPILERS = {RTX: "torch-tensorrt-rtx", CLASSIC: "torch-tensorrt"}
"""The distribution of torch-tensorrt for each library; both have the package `torch_tensorrt`."""

# The distribution `tensorrt-rtx` only renames the module of the distribution with the bindings. Its folder `plugin`
# imports a module that version 1.4 lacks, so torch-tensorrt can be imported over the bindings alone.
_MODULES = {RTX: ("tensorrt_rtx_bindings", "tensorrt_rtx"), CLASSIC: ("tensorrt",)}
_RTX_BINDINGS = ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings", "tensorrt-rtx")
# The only release seen to run on GPUs that it does not list; 1.7 refuses to load plans there.
_UNLISTED = "1.4"
_PIN = " 'tensorrt-rtx==1.4.0.76'"
_TORCH_OF_UNLISTED = ("2.11", "2.12")  # later torch-tensorrt requires 1.5 or later


def find_library() -> str | None:
    """The name of the installed library, TensorRT for RTX before the other; nothing is imported."""
    return next((name for name in _MODULES if _module_name(name) is not None), None)


def compiling_library() -> str | None:
    """The library that the installed torch-tensorrt compiles for; None without torch-tensorrt."""
    return next((name for name, each in COMPILERS.items() if _version(each) is not None), None)


def compiler_problem(torch_release: str, unlisted: str | None) -> str | None:
    """Why nothing can be compiled with torch-tensorrt here, with the `pip install`; None: the versions fit.

    Args:
        torch_release: as `2.11.0`.
        unlisted: compute capability of the GPU, as `9.0`, if TensorRT for RTX does not list it.
    """
    release = ".".join(torch_release.split(".")[:2])
    library = compiling_library()
    if library != CLASSIC and unlisted and release not in _TORCH_OF_UNLISTED:
        return (
            f"on a GPU of compute capability {unlisted} {TITLES[RTX]} runs in version {_UNLISTED} only, and "
            f"torch-tensorrt takes that with torch {' or '.join(_TORCH_OF_UNLISTED)}, here is {torch_release}: "
            f"pip install 'torch==2.11.*' {INSTALL_COMPILER[RTX].removeprefix('pip install ')}{_PIN}"
        )
    install = f"{INSTALL_COMPILER[library or RTX]} '{COMPILERS[library or RTX]}=={release}.*'"
    if library != CLASSIC and unlisted:
        install += _PIN
    if library is None:
        return f"needs {COMPILERS[RTX]}, not installed: {install}"
    compiler = str(_version(COMPILERS[library]))
    if not compiler.startswith(f"{release}."):
        return f"{COMPILERS[library]} {compiler} is for another torch than {torch_release}: {install}"
    if _module_name(library) is None:
        return f"needs {DISTRIBUTIONS[library]}, not installed: {install}"
    found = next(filter(None, map(_version, _RTX_BINDINGS)), "")
    if library == RTX and unlisted and not found.startswith(f"{_UNLISTED}."):
        return f"{TITLES[RTX]} {found} does not run on a GPU of compute capability {unlisted}: {install}"
    return None


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def import_library(name: str) -> Any:
    """The module of library `name`. Raises: ImportError, OSError."""
    return importlib.import_module(_module_name(name) or name)


def _module_name(name: str) -> str | None:
    return next((module for module in _MODULES[name] if importlib.util.find_spec(module) is not None), None)


def make_logger(library: Any) -> tuple[Any, list[str]]:
    """Create a logger for the library. Returns it and the list of errors that it collects; it prints nothing."""
    messages: list[str] = []
    errors = (library.ILogger.Severity.ERROR, library.ILogger.Severity.INTERNAL_ERROR)

    class Collector(library.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            library.ILogger.__init__(self)  # the bindings refuse super()

        def log(self, severity: Any, message: str) -> None:
            if severity in errors:
                messages.append(message.strip())

    return Collector(), messages
