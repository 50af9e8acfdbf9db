"""Folders under construction. Each is locked by its process, so leftovers of dead processes are recognised.

The lock is the kernel's (flock on the folder itself): it ends with its process, however that ends, and it also works
between containers, where process ids are not comparable.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
_SUFFIX = ".partial"


@contextmanager
def work_folder(parent: Path, prefix: str, *, mode: int = 0o777) -> Iterator[Path]:
    """Create and lock `<prefix><8 hex digits>.partial` in `parent`; the block renames the folder, or it is removed.

    Removes folders with this prefix that no process locks. Locked folders stay, and so do all on a file system
    without locks. Raises: OSError when no folder can be made.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(parent, prefix)
    path, lock = _make(parent, prefix, mode)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # compilers of a failed build may still write
        os.close(lock)


def _make(parent: Path, prefix: str, mode: int) -> tuple[Path, int]:
    while True:
        path = parent / f"{prefix}{secrets.token_hex(4)}{_SUFFIX}"
        path.mkdir(mode=mode)
        try:
            lock = os.open(path, _OPEN)
        except FileNotFoundError:  # another process removed it before it was locked
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another process is removing it
            os.close(lock)
            continue
        except OSError:
            return path, lock  # this file system has no locks, so no process removes it
        if path.exists():
            return path, lock
        os.close(lock)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    name = re.compile(rf"{re.escape(prefix)}[0-9a-f]{{8}}{re.escape(_SUFFIX)}")
    for path in parent.iterdir():
        if not name.fullmatch(path.name):
            continue
        try:
            lock = os.open(path, _OPEN)
        except OSError:  # it belongs to another user, or was just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(path, ignore_errors=True)
        except OSError:  # its process lives, or this file system has no locks
            continue
        finally:
            os.close(lock)
