"""Interface of a backend: compiles one captured graph into an engine file.

A file `mingc/export/compile/backends/<name>.py` defines `BACKEND`, an instance of `Backend`; other distributions
provide such an object as an entry point in the group `mingc.backends`. The runtime loads its engines with
`mingc/runtime/engines/backends/<name>.py`, or with the entry point of the same name in the group `mingc.engines`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from torch import nn

from mingc.artifacts.target import is_rtx
from mingc.export.stage import GraphDef


class Backend(ABC):
    """One compiler.

    Attributes:
        name: also the name of its file or entry point, and of the loader in the runtime.
        suffix: suffix of engine files, with the dot.
        takes_kernels: whether it compiles mingc's own GPU kernels; others get graphs of plain torch operators.
        may_crash: whether its engines are compiled and checked in processes of their own.
        copies_state: whether its engines compute new state beside the old one, which their loader copies.
        pool_dims: sizes of dims without buckets that a graph is traced at; the others stay dynamic.
    """

    name: str
    suffix: str
    takes_kernels: bool = True
    may_crash: bool = False
    copies_state: bool = False
    pool_dims: Mapping[str, int] = MappingProxyType({})

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        """The reason why engines cannot be built for `target` in `dtype`; None when they can."""
        if is_rtx(target):
            return f"{self.name} cannot build engines for RTX cards on any machine; use --backend tensorrt"
        return None

    def for_graph(self, plan: GraphDef, sizes: Mapping[str, int] | None, device: str) -> Backend:
        """The backend that traces, checks and compiles `plan` for `sizes`: this one unless graphs need choices.

        Args:
            sizes: sizes of the dims with buckets; None: one engine for every size.
            device: as in `compile`.
        """
        return self

    def check_graph(  # noqa: B027 - nothing to refuse unless a backend says so
        self,
        plan: GraphDef,
        module: nn.Module,
        program: Callable[[], torch.export.ExportedProgram],
        *,
        where: str,
    ) -> None:
        """Refuse a graph because of its sizes, before anything is built; `compile` refuses what is found later.

        Args:
            module: with shapes and dtypes of the weights, without values.
            program: traces the graph, which takes seconds; its tensors have no values either.
            where: the graph, for errors.

        Raises: CompileError.
        """

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
        updates state in place. Its parameters and buffers are named `model.<name in the weights files>`; their values
        are bound by the runtime and must not be part of the engine.

        Args:
            device: the target of the export: `cpu`, `cuda`, or RTX cards as `rtx:sm86,sm89`.
            cache: folder where earlier results may be kept; None: no cache.
            where: the graph, for errors.

        Returns: seconds of compilation, 0.0 when the engine came from the cache.

        Raises: CompileError, torch.OutOfMemoryError.
        """
