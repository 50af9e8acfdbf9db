"""Finds out whether ONNX Runtime is installed, and whether it runs models on CUDA devices, without importing it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

MODULE = "onnxruntime"
INSTALL = "pip install 'mingc[onnx]'"
INSTALL_CUDA = "pip uninstall onnxruntime; pip install 'mingc[onnx-gpu]'"
"""Both distributions contain the same package, so only one of them may be installed."""

CUDA_PROVIDER = "CUDAExecutionProvider"


def is_installed() -> bool:
    """Whether ONNX Runtime is installed, for any device."""
    return importlib.util.find_spec(MODULE) is not None


def has_cuda_provider() -> bool:
    """Whether ONNX Runtime comes from the distribution `onnxruntime-gpu`."""
    spec = importlib.util.find_spec(MODULE)
    if spec is None or spec.origin is None:
        return False
    libraries = ("libonnxruntime_providers_cuda.so", "onnxruntime_providers_cuda.dll")
    return any((Path(spec.origin).parent / "capi" / name).is_file() for name in libraries)
