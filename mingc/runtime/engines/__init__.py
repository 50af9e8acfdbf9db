"""Engine backends, one file each, found by name; importing this loads none of them."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from mingc.errors import ArtifactError

if TYPE_CHECKING:
    import torch

    from mingc.runtime.engines.base import Engine


def load_engine(backend: str, path: Path, device: torch.device) -> Engine:
    """The engine file at `path`, loaded by `backend`. Raises ArtifactError when this mingc has no such backend."""
    known = sorted(
        file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in ("__init__", "base")
    )
    if backend not in known:
        raise ArtifactError(f"backend {backend} is not one of {', '.join(known)}", where=str(path))
    engine: Engine = importlib.import_module(f"mingc.runtime.engines.{backend}").load(path, device)
    return engine
