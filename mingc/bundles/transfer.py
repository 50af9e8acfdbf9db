"""What pack and unpack share: locks on unfinished files, threads, and checks of the disk."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from mingc.artifacts.artifact import write_failure
from mingc.errors import ArtifactError, ConfigError

THREADS = max(2, min(8, os.cpu_count() or 1))

_Item = TypeVar("_Item")
Stop = Callable[[], None]  # raises StoppedError when the work is to end; called for every chunk


def boot_id() -> str:
    """Identifies this boot of the machine.

    Files of an earlier boot may not have reached the disk, so they are not resumed.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return "unknown"


@contextmanager
def locked(descriptor: int, what: Path) -> Iterator[None]:
    """Hold the kernel's lock of an open file or folder, and close it at the end.

    Raises: ConfigError when another process has the lock.
    """
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing {what}",
                where=str(what),
                fix="wait until it has ended, or pass another path",
            ) from None
        except OSError:
            pass  # a file system without locks: users must not start two writers
        yield
    finally:
        os.close(descriptor)


def open_own(path: Path, flags: int) -> int:
    """Open what an interrupted run may have left at `path`, or create it. Returns a descriptor.

    Any user can create this name in a shared folder. Raises: ConfigError unless this user owns the file or folder and
    nobody else may write to it.
    """
    try:
        descriptor = os.open(path, flags | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR):
            raise
        problem = "is a link, or no work of an interrupted run"
    else:
        status = os.fstat(descriptor)
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:
            return descriptor
        os.close(descriptor)
        problem = "may be the work of another user"
    raise ConfigError(f"{path} {problem}", where=str(path), fix="remove it, or pass another path")


class StoppedError(Exception):
    """Another thread failed, or the command was interrupted."""


def run_all(items: Sequence[_Item], work: Callable[[_Item, Stop], None]) -> None:
    """Run `work` on every item in threads, started in order. The first failure or signal stops all and is raised."""
    stopped = threading.Event()

    def stop() -> None:
        if stopped.is_set():
            raise StoppedError

    with ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(work, item, stop) for item in items]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
            failures = [future.exception() for future in futures if future.done() and not future.cancelled()]
            for failure in failures:
                if failure is not None and not isinstance(failure, StoppedError):
                    raise failure
        finally:
            stopped.set()
            pool.shutdown(wait=True, cancel_futures=True)


def check_free(folder: Path, needed: int) -> None:
    """Raises: ArtifactError when `folder` has less than `needed` bytes free."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ArtifactError(
            f"{needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB are free",
            where=str(folder),
            fix="free some space there, or pass a path on another disk",
        )


def make_parent(path: Path) -> None:
    """Create the folder of `path`.

    Raises: ConfigError when a file has its name or it cannot be created; other OSErrors.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError, FileNotFoundError) as error:
        raise ConfigError(
            f"{path.parent} is no folder and cannot be made: {error.strerror}",
            where="OUTPUT",
            fix="pass another path",
        ) from error


@contextmanager
def writing(what: Path) -> Iterator[None]:
    """Report a full or read-only disk as ArtifactError."""
    try:
        yield
    except OSError as error:
        reason = write_failure(error) or (error.strerror if isinstance(error, PermissionError) else None)
        if reason is None:
            raise
        raise ArtifactError(
            f"{what.name} cannot be written: {reason}",
            where=str(what.parent),
            fix="free some space there, or pass another path; then run the command again, it continues",
        ) from error
