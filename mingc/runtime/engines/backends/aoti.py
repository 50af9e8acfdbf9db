"""AOTInductor packages through the C++ loader, which imports neither Inductor nor Dynamo.

`torch._C._aoti.AOTIModelPackageLoader` is private; this file is its only user and the smoke test in
tests/rules/test_imports.py fails when it changes. The documented Python loader imports the compiler (41 s in a new
process), so it is not an alternative.
"""

from __future__ import annotations

import atexit
import functools
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch

import mingc.kernels.cuda.flow_sampler
import mingc.kernels.cuda.int4_experts
import mingc.kernels.cuda.rotary_varlen_attention  # noqa: F401  (all register ops that engines call by name)
from mingc.artifacts.work_folder import work_folder
from mingc.errors import ArtifactError
from mingc.runtime.engines.base import Engine

_PREFIX = "model."  # the traced wrapper holds the stage's module under this name


class AotiEngine(Engine):
    """One `.pt2` package, which holds no weights."""

    def __init__(self, path: Path, device: torch.device) -> None:
        index = -1 if device.type == "cpu" else (device.index or 0)
        if device.type == "cuda":
            # An engine's convolutions follow this process-wide flag: float32 engines must not round to 10 bits.
            torch.backends.cudnn.allow_tf32 = False
        folder = _unpack_folder()
        try:
            # Single-threaded: required for CUDA graph capture; callers never run one engine from two threads.
            with _unpacking_to(folder):
                self._loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", True, 1, index)
        except RuntimeError as error:
            raise ArtifactError(
                f"engine cannot be loaded: {error}",
                where=str(path),
                fix=f"run mingc verify --no-replay, and see whether {folder.parent} (TMPDIR) has space to unpack it",
            ) from error
        self._kept: dict[str, torch.Tensor] = {}

    def constants(self) -> Sequence[str]:
        return [name.removeprefix(_PREFIX) for name in self._loader.get_constant_fqns()]

    def bind(self, weights: Mapping[str, torch.Tensor]) -> None:
        self._kept = {name: weights[name.removeprefix(_PREFIX)] for name in self._loader.get_constant_fqns()}
        if self._kept:
            # use_inactive=False, check_full_update=True, user_managed=True: the engine reads our memory.
            self._loader.load_constants(self._kept, False, True, True)

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        outputs: list[torch.Tensor] = self._loader.run(list(tensors))
        return outputs


@functools.cache
def _unpack_folder() -> Path:
    """The folder to which the loader of this process unpacks packages; removed when the process ends.

    The next process removes the folder of a killed one.
    """
    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(work_folder(Path(tempfile.gettempdir()), "mingc-engines-", mode=0o700))


@contextmanager
def _unpacking_to(folder: Path) -> Iterator[None]:
    before = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before


def load(path: Path, device: torch.device) -> Engine:
    """Load the package at `path`, without weights yet."""
    return AotiEngine(path, device)
