"""The backends: one file each, or an entry point `mingc.backends` of another distribution."""

from __future__ import annotations

from mingc.errors import ConfigError
from mingc.export.compile.backend import Backend
from mingc.plugins import ExtensionPoint

BACKENDS = ExtensionPoint(
    noun="backend", package="mingc.export.compile.backends", attribute="BACKEND", group="mingc.backends"
)


def find_backend(name: str) -> Backend:
    """The backend called `name`. Raises ConfigError listing the known ones."""
    try:
        backend = BACKENDS.load(name)
    except KeyError:
        known = ", ".join(BACKENDS.names())
        raise ConfigError(f"unknown backend {name}", where="--backend", fix=f"choose from {known}") from None
    if not isinstance(backend, Backend) or getattr(backend, "name", None) != name:
        raise ConfigError(
            f"{name} is not a backend of this name: {backend!r}",
            where=BACKENDS.group,
            fix="provide an instance of mingc.export.compile.backend.Backend whose `name` is that of its file or entry "
            "point",
        )
    return backend
