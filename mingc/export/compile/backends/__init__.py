"""The backends: one file each, or an entry point `mingc.backends` of another distribution."""

from __future__ import annotations

from mingc.export.compile.backend import Backend
from mingc.plugins import ExtensionPoint

BACKENDS = ExtensionPoint(
    noun="backend", package="mingc.export.compile.backends", attribute="BACKEND", group="mingc.backends"
)


def find_backend(name: str) -> Backend:
    """The backend called `name`. Raises ConfigError listing the known ones."""
    backend: Backend = BACKENDS.find(name, Backend, option="--backend")
    return backend
