"""Imports NVIDIA's TensorRT libraries: TensorRT for RTX, and classic TensorRT.

Both have the same API. They have 200 MB, so none is imported before an engine is built or loaded. Classic TensorRT was
never run with mingc.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

RTX = "tensorrt_rtx"
CLASSIC = "tensorrt"
TITLES = {RTX: "TensorRT for RTX", CLASSIC: "TensorRT"}
DISTRIBUTIONS = {RTX: "tensorrt-rtx", CLASSIC: "tensorrt"}
INSTALL = "pip install 'mingc[tensorrt]'"

# The distribution `tensorrt-rtx` only renames the module of the distribution with the bindings.
_MODULES = {RTX: ("tensorrt_rtx", "tensorrt_rtx_bindings"), CLASSIC: ("tensorrt",)}


def find_library() -> str | None:
    """The name of the installed library, TensorRT for RTX before the other; nothing is imported."""
    return next((name for name in _MODULES if _module_name(name) is not None), None)


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
