"""The contract of a backend: compiling one captured graph into an engine file.

A file `mingc/export/compile/backends/<name>.py` defines `BACKEND`, an instance of `Backend`; another distribution
offers such an object as an entry point of the group `mingc.backends`. The runtime loads its engines with
`mingc/runtime/engines/backends/<name>.py`, or with the entry point of the same name in the group `mingc.engines`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path

import torch


class Backend(ABC):
    """One compiler.

    Attributes:
        name: also the name of its file or entry point, and of the loader in the runtime.
        suffix: of engine files, with the dot.
    """

    name: str
    suffix: str

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        """The reason why engines cannot be built for `target` in `dtype`; None when they can."""
        return None

    @abstractmethod
    def compile(
        self,
        program: torch.export.ExportedProgram,
        path: Path,
        *,
        device: str,
        cache: Path | None,
        where: str,
    ) -> float:
        """Write the engine of `program` to `path`.

        The program is called with the inputs, the state and the shared weights of its graph, positionally, and
        updates state in place. Its parameters and buffers are named `model.<name in the weights file>`; their values
        are bound by the runtime and must not be part of the engine.

        Args:
            cache: folder where earlier results may be kept; None: no cache.
            where: the graph, for errors.

        Returns: seconds of compilation, 0.0 when the engine came from the cache.

        Raises: CompileError, torch.OutOfMemoryError.
        """
