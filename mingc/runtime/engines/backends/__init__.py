"""Loaders of compiled engines: one file per backend, or an entry point `mingc.engines` of another distribution.

A loader defines `load(path, device)`, which returns an `Engine` without weights; importing this package imports no
loader. It may also define `unavailable(device: str) -> tuple[str, str] | None`: why its engines for `device` cannot be
loaded here, and the fix.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from mingc.artifacts.artifact import Artifact
from mingc.errors import ArtifactError
from mingc.plugins import ExtensionPoint

if TYPE_CHECKING:
    import torch

    from mingc.runtime.engines.base import Engine

ENGINES = ExtensionPoint(
    noun="engine loader", package="mingc.runtime.engines.backends", attribute="load", group="mingc.engines"
)


def load_engine(backend: str, path: Path, device: torch.device) -> Engine:
    """Load the engine file at `path` with `backend`. Raises: ArtifactError when this mingc lacks the backend."""
    try:
        load = ENGINES.load(backend)
    except KeyError:
        problem, fix = _unknown(backend)
        raise ArtifactError(problem, where=str(path), fix=fix) from None
    engine: Engine = load(path, device)
    return engine


def unavailable(backend: str, device: str) -> tuple[str, str] | None:
    """Why engines of `backend` for `device` (`cpu`, `cuda`) cannot be loaded here, and the fix; None: unknown."""
    try:
        load = ENGINES.load(backend)
    except KeyError:
        return _unknown(backend)
    check = getattr(sys.modules.get(load.__module__), "unavailable", None)
    found: tuple[str, str] | None = None if check is None else check(device)
    return found


def check_loadable(artifact: Artifact, stages: Collection[str] | None = None) -> None:
    """Raises: ArtifactError when a backend with engines of `stages` (None: all) cannot be loaded here."""
    device = artifact.manifest.fingerprint.device
    for backend, held in artifact.manifest.stages_by_backend().items():
        needed = [stage for stage in held if stages is None or stage in stages]
        problem = unavailable(backend, device) if needed else None
        if problem is not None:
            reason, fix = problem
            raise ArtifactError(
                f"the engines of {', '.join(needed)} need backend {backend}: {reason}",
                where=str(artifact.root),
                fix=fix,
            )


def _unknown(backend: str) -> tuple[str, str]:
    return (
        f"backend {backend} is not one of {', '.join(ENGINES.names())}",
        "install the distribution that provides its loader, or export again with another --backend",
    )
