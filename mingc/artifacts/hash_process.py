"""Hashes large files of an artifact in another process, while this one loads them.

Threads of the loading process would wait: it holds Python's lock while it opens engines and captures graphs.
`python -m mingc.artifacts.hash_process` reads a line with the regions and writes a line for each hash. It ends when its
stdin closes, also when its parent is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from mingc.artifacts.artifact import Artifact, file_hashes, raise_changed
from mingc.artifacts.file_region import FileRegion
from mingc.errors import WorkerError

_POLL_S = 0.02


@contextmanager
def hashes_compared(artifact: Artifact, beside: Collection[str]) -> Iterator[Callable[[], None]]:
    """Compare the hashes of all files: of those `beside` while the block runs, of the others before it.

    The block calls the yielded function to wait for the end. When it fails, a changed file may be the cause: the
    comparison is awaited, and an IntegrityError comes instead. An interrupt ends the process at once.

    Raises: IntegrityError listing all files that differ, OSError when one cannot be read, WorkerError when the process
        dies.
    """
    regions = {name: artifact.region(name) for name in beside}
    found: dict[str, str] = {}
    with _child(regions.values()) as child:

        def wait() -> None:
            # A signal may come just before a call that blocks, and would wait for its end.
            while child.poll() is None:
                time.sleep(_POLL_S)
            assert child.stdout is not None, "it has a pipe, which holds all lines"
            for line in child.stdout:
                name, sha256, error = json.loads(line)
                if error is not None:
                    raise OSError(*error, str(regions[name]))
                found[name] = sha256
            if not regions.keys() <= found.keys():
                raise WorkerError("the process that hashes weights was killed", fix="start again")
            raise_changed(artifact, found)

        try:
            found |= file_hashes(artifact, [name for name in artifact.manifest.files if name not in regions])
            raise_changed(artifact, found)
            yield wait
        except Exception:
            wait()
            raise


@contextmanager
def _child(regions: Iterable[FileRegion]) -> Iterator[subprocess.Popen[str]]:
    """Start the process; it is killed at the end."""
    largest_first = sorted(regions, key=lambda each: -each.size_bytes)
    described = [(each.name, str(each.path), each.offset, each.size_bytes) for each in largest_first]
    with subprocess.Popen(
        [sys.executable, "-m", "mingc.artifacts.hash_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        encoding="utf-8",
    ) as child:
        assert child.stdin is not None, "it has a pipe"
        try:
            with suppress(BrokenPipeError):  # it has ended before: who waits for its hashes is told
                child.stdin.write(json.dumps(described) + "\n")
                child.stdin.flush()
            yield child
        finally:
            child.kill()
            with suppress(BrokenPipeError):  # what was not written
                child.stdin.close()


def _main() -> None:
    # A terminal sends these signals to the whole process group; the parent decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    described = json.loads(sys.stdin.readline())
    regions = [FileRegion(Path(path), name, offset, size) for name, path, offset, size in described]
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    num_threads = max(1, min(8, (os.cpu_count() or 1) - 1))  # a core is left for the parent
    with ThreadPoolExecutor(num_threads) as pool:
        for result in pool.map(_hash, regions):
            sys.stdout.write(json.dumps(result) + "\n")
            sys.stdout.flush()


def _hash(region: FileRegion) -> tuple[str, str, tuple[int | None, str | None] | None]:
    """Name and hash; or name and error, as the arguments of OSError."""
    try:
        return region.name, region.sha256(), None
    except OSError as error:
        return region.name, "", (error.errno, error.strerror)


def _exit_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # not by `sys.stdin`, whose lock the interpreter needs when it shuts down
    os._exit(1)


if __name__ == "__main__":
    _main()
