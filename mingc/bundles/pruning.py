"""`mingc bundle prune`: remove what interrupted commands and replaced bundles left in a folder of bundles."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.file_cache import cache_folder
from mingc.bundles.unpacking import STORE, store_lock
from mingc.errors import ConfigError

_LEFT = re.compile(r"\..+\.(unpack|partial|partial\.journal)")
_REPLACED = re.compile(r"\.(.+)\.[0-9a-f]{8}\.old")


@dataclass(frozen=True, kw_only=True, slots=True)
class PruneReport:
    """What was removed, or would be with `is_dry`."""

    folder: Path
    is_dry: bool
    removed_bytes: int
    removed: tuple[str, ...]


def prune(folder: Path, *, is_dry: bool = False, has_cache: bool = False) -> PruneReport:
    """Remove what no bundle in `folder` uses: stored files without a link, packs and unpacks that no process continues.

    With `has_cache` also the user's copies of files of packed bundles, which a server recreates at start; do not use it
    while a server starts. A dry run does not lock the store: it never waits, and during an unpack its result is a
    guess.

    Raises: ConfigError when `folder` is not a folder, or an unpack adds files to its store.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a folder", where="FOLDER", fix="pass the folder that holds bundles"
        )
    store = folder / STORE
    has_store = store.is_dir() and not store.is_symlink()
    with store_lock(store, exclusive=True) if has_store and not is_dry else nullcontext():
        removed, freed = _prune(folder, store if has_store else None, is_dry=is_dry)
    copies = cache_folder() / "files"
    if has_cache and copies.is_dir():
        for path in sorted(copies.iterdir()):
            if _is_locked(path):  # a server copies into it
                continue
            with suppress(FileNotFoundError):  # the server that copied it has renamed it
                size = path.stat().st_size
                if not is_dry:
                    path.unlink()
                freed += size
                removed.append(str(path))
    return PruneReport(folder=folder, is_dry=is_dry, removed_bytes=freed, removed=tuple(removed))


def _prune(folder: Path, store: Path | None, *, is_dry: bool) -> tuple[list[str], int]:
    """Remove what no bundle uses. Returns the names and their bytes; a dry run only lists them."""
    removed: list[str] = []
    freed = 0
    for path in sorted(folder.iterdir()):
        if _is_left(path) and not path.is_symlink() and not _is_locked(path):
            freed += _size(path)
            removed.append(path.name)
            if not is_dry:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    for path in sorted(store.iterdir()) if store is not None else ():
        with suppress(FileNotFoundError):  # a dry run takes no lock, so an unpack may rename it
            status = path.stat()
            if status.st_nlink == 1:
                freed += status.st_size
                removed.append(f"{STORE}/{path.name}")
                if not is_dry:
                    path.unlink()
    return removed, freed


def _is_left(path: Path) -> bool:
    """Whether an interrupted command left the file. A replaced bundle stays until its replacement exists."""
    replaced = _REPLACED.fullmatch(path.name)
    return _LEFT.fullmatch(path.name) is not None or (
        replaced is not None and path.with_name(replaced[1]).exists()
    )


def _is_locked(path: Path) -> bool:
    """Whether a process is writing it. A journal counts as locked when the partial file beside it is."""
    owner = path.with_name(path.name.removesuffix(".journal"))
    try:
        descriptor = os.open(owner, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def _size(path: Path) -> int:
    """Bytes that only `path` holds: a linked file stays in the store."""
    files = [path] if path.is_file() else [each for each in path.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files if each.stat().st_nlink == 1)
