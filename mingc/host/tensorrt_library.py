"""NVIDIA's TensorRT libraries, TensorRT for RTX and classic TensorRT, and torch-tensorrt, which compiles for each.

Both libraries have the same API. They have 200 MB, so none is imported before an engine is built or loaded. Classic
TensorRT was never run with mingc.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from mingc.host.description import installed_version

RTX = "tensorrt_rtx"
CLASSIC = "tensorrt"
TITLES = {RTX: "TensorRT for RTX", CLASSIC: "TensorRT"}
DISTRIBUTIONS = {RTX: "tensorrt-rtx", CLASSIC: "tensorrt"}
INSTALL = "pip install 'mingc[tensorrt-runtime]'"
COMPILERS = {RTX: "torch-tensorrt-rtx", CLASSIC: "torch-tensorrt"}
"""The distribution of torch-tensorrt for each library; both have the package `torch_tensorrt`."""

_EXTRAS = {RTX: "tensorrt", CLASSIC: "tensorrt-classic"}
# The distribution `tensorrt-rtx` only renames the module of the distribution with the bindings. Its folder `plugin`
# imports a module that version 1.4 lacks, so torch-tensorrt can be imported over the bindings alone.
_MODULES = {RTX: ("tensorrt_rtx_bindings", "tensorrt_rtx"), CLASSIC: ("tensorrt",)}
_BINDINGS = {RTX: ("tensorrt-rtx-cu13-bindings", "tensorrt-rtx-cu12-bindings"), CLASSIC: ()}
# TensorRT for RTX of each torch. torch-tensorrt 2.11 allows later ones, but cannot be imported with them.
_RTX_OF_TORCH = {"2.11": "1.4", "2.12": "1.4", "2.13": "1.5"}
_UNLISTED = "1.4"  # the only one seen to run on GPUs that it does not list; 1.7 refuses to load plans there


def find_library() -> str | None:
    """The name of the installed library, TensorRT for RTX before the other; nothing is imported."""
    return next((name for name in _MODULES if _module_name(name) is not None), None)


def compiling_library() -> str | None:
    """The library that the installed torch-tensorrt compiles for; None without torch-tensorrt."""
    return next((name for name, each in COMPILERS.items() if installed_version(each) is not None), None)


def compiler_problem(library: str, torch_release: str, unlisted: str | None) -> str | None:
    """Why nothing can be compiled for `library` here, with the `pip install`; None: the versions fit.

    Args:
        torch_release: as `2.11.0`.
        unlisted: compute capability of the GPU, as `9.0`, if TensorRT for RTX does not list it.
    """
    release = ".".join(torch_release.split(".")[:2])
    install = f"'mingc[{_EXTRAS[library]}]' '{COMPILERS[library]}=={release}.*'"
    wanted = _RTX_OF_TORCH.get(release, "") if library == RTX else ""
    if wanted:
        install += f" 'tensorrt-rtx=={wanted}.*'"
    if library == RTX and unlisted and wanted != _UNLISTED:
        others = [torch for torch, each in _RTX_OF_TORCH.items() if each == _UNLISTED]
        return (
            f"on a GPU of compute capability {unlisted} only {TITLES[RTX]} {_UNLISTED} runs, which needs torch "
            f"{' or '.join(others)}, here is {torch_release}: pip install 'torch=={others[0]}.*' "
            f"'mingc[{_EXTRAS[RTX]}]' 'tensorrt-rtx=={_UNLISTED}.*'"
        )
    compiler, own = COMPILERS[library], DISTRIBUTIONS[library]
    bindings = next(filter(None, map(installed_version, (*_BINDINGS[library], own))), None)
    for name, found, number in ((compiler, installed_version(compiler), release), (own, bindings, wanted)):
        if found is None:
            return f"needs {name}, not installed: pip install {install}"
        if number and not found.startswith(f"{number}."):
            return f"{name} {found} does not fit torch {torch_release}: pip install {install}"
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
