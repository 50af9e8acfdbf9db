"""The engine cache: compiled engines by content key in one folder. Above a limit the least recently used are removed.

An engine is copied out of the cache before it is used, so removing it never breaks an export, not even a concurrent
one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingc.artifacts.artifact import write_failure
from mingc.artifacts.work_folder import work_folder
from mingc.errors import ConfigError

if TYPE_CHECKING:
    import torch

# Engines only: timings of kernels are small, and measuring them again takes a GPU minutes.
_ENGINE = re.compile(r"[0-9a-f]{64}\.\w+")


def program_digest(program: torch.export.ExportedProgram) -> Any:
    """sha256, to be updated, of a graph with its shapes and the constants in it."""
    import torch

    # Stack traces name files and lines of this checkout: they change without changing the engine.
    digest = hashlib.sha256(re.sub(r"#.*", "", str(program)).encode())
    digest.update(torch.__version__.encode())
    for name, value in sorted(program.constants.items()):
        is_tensor = isinstance(value, torch.Tensor)
        digest.update(f"\0{name}\0{value.dtype}".encode() if is_tensor else repr(value).encode())
        if is_tensor:
            digest.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest


def take(kept: Path, path: Path) -> bool:
    """Copy the cached engine to `path` and mark it as used; False when another export has removed it."""
    try:
        with kept.open("rb") as source, path.open("wb") as target:
            shutil.copyfileobj(source, target)
    except FileNotFoundError:
        if kept.exists():
            raise
        return False
    with suppress(OSError):  # a cache that others own, or that is read-only
        os.utime(kept)
    return True


def keep(path: Path, kept: Path) -> None:
    """Copy the engine at `path` to its place in the cache. Raises: ConfigError when the cache cannot be written."""
    # The next export removes what a killed one left of an engine.
    with writing_cache(kept.parent), work_folder(kept.parent, "engine-") as folder:
        os.replace(shutil.copyfile(path, folder / kept.name), kept)


def trim(cache: Path, limit_bytes: float) -> None:
    """Remove engines, the least recently used ones first, until the others fit into `limit_bytes`."""
    found = []
    for path in cache.iterdir():
        if _ENGINE.fullmatch(path.name):
            with suppress(FileNotFoundError):  # another export removes as well
                status = path.stat()
                found.append((status.st_mtime_ns, path.name, status.st_size))
    total = sum(size for _, _, size in found)
    for _, name, size in sorted(found):
        if total <= limit_bytes:
            break
        with suppress(OSError):  # a file that others own stays
            (cache / name).unlink(missing_ok=True)
            total -= size


@contextmanager
def writing_cache(cache: Path) -> Iterator[None]:
    """Reports a full or read-only disk of the cache as an error of the cache. Raises: ConfigError."""
    try:
        yield
    except OSError as error:
        reason = write_failure(error)
        if reason is None:
            raise
        raise ConfigError(
            f"the engine cache {cache} cannot be written: {reason}",
            where="--cache",
            fix="free some space there, pass a smaller --cache-limit, another folder, or --no-cache; then run the "
            "export again, it takes the engines that are kept",
        ) from error
