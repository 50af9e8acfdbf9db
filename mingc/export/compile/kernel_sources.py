"""Source code of the GPU kernels, for cache keys of engines and of timings."""

from __future__ import annotations

from pathlib import Path

import mingc.artifacts.target
import mingc.kernels


def kernel_sources() -> bytes:
    """Source of everything that affects the kernels of a GPU engine: part of cache keys."""
    kernels = Path(mingc.kernels.__path__[0])
    paths = [Path(mingc.artifacts.target.__file__), *kernels.rglob("*.py"), *kernels.rglob("*.cu")]
    return b"".join(path.read_bytes() for path in sorted(paths))
