"""Loaders of compiled engines: one file per backend, or an entry point `mingc.engines` of another distribution.

Each defines `load(path, device)`, which returns an `Engine` without weights; importing this package imports none.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mingc.errors import ArtifactError
from mingc.plugins import ExtensionPoint

if TYPE_CHECKING:
    import torch

    from mingc.runtime.engines.base import Engine

ENGINES = ExtensionPoint(
    noun="engine loader", package="mingc.runtime.engines.backends", attribute="load", group="mingc.engines"
)


def load_engine(backend: str, path: Path, device: torch.device) -> Engine:
    """The engine file at `path`, loaded by `backend`. Raises ArtifactError when this mingc has no such backend."""
    try:
        load = ENGINES.load(backend)
    except KeyError:
        raise ArtifactError(
            f"backend {backend} is not one of {', '.join(ENGINES.names())}",
            where=str(path),
            fix="install the distribution that provides its loader, or export again with another --backend",
        ) from None
    engine: Engine = load(path, device)
    return engine
