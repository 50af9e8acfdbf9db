"""mingc: ahead-of-time export of Ming-flash-omni-2.0 and a thin runtime that serves the result.

The public names below are loaded on first use, so that `import mingc` costs nothing and needs no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mingc.artifacts.artifact import Artifact, open_artifact
    from mingc.errors import MingcError

__version__ = "0.1.0"

__all__ = ["Artifact", "MingcError", "__version__", "open_artifact"]

_HOMES = {
    "Artifact": "mingc.artifacts.artifact",
    "MingcError": "mingc.errors",
    "open_artifact": "mingc.artifacts.artifact",
}


def __getattr__(name: str) -> object:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'mingc' has no attribute {name!r}")
