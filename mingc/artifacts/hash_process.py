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

from mingc.artifacts.artifact import Artifact, file_hashes, hash_or_problem, raise_changed, unreadable
from mingc.artifacts.file_region import FileRegion
from mingc.errors import WorkerError
from mingc.python_module import module_command, module_environment

_POLL_S = 0.02
_READ_BYTES = 1 << 16


@contextmanager
def hashes_compared(artifact: Artifact, beside: Collection[str]) -> Iterator[Callable[[], None]]:
    """Compare the hashes of all files: of those `beside` while the block runs, of the others before it.

    The block calls the yielded function to wait for the end. When it fails, a changed file may be the cause: the
    comparison is awaited, and an IntegrityError comes instead. An interrupt ends the process at once.

    Raises: IntegrityError listing all files that differ or cannot be read, WorkerError when the process does not start
        or dies.
    """
    files, regions, found = artifact.manifest.files, list[FileRegion](), dict[str, str]()
    for name in beside:
        try:
            regions.append(artifact.region(name))
        except OSError as error:  # the file has gone since the artifact was opened
            found[name] = unreadable(error)
    with _child(regions) as child:
        unread, said = b"", ""

        def wait() -> None:
            nonlocal unread, said
            assert child.stdout is not None, "it has a pipe"
            while not found.keys() >= {*beside}:
                # A signal may come just before a call that blocks, and would wait for its end: none does.
                try:
                    read = os.read(child.stdout.fileno(), _READ_BYTES)
                except BlockingIOError:
                    time.sleep(_POLL_S)
                    continue
                if not read:
                    how = f"has failed: {said}" if said else "was killed"
                    raise WorkerError(f"the process that hashes weights {how}", fix="start again")
                *lines, unread = (unread + read).split(b"\n")
                for line in lines:
                    if line.startswith(b"["):
                        found.update([json.loads(line)])
                    else:
                        said = line.decode(errors="replace")
            raise_changed(artifact, found)

        try:
            found |= file_hashes(artifact, [name for name in files if name not in beside])
            raise_changed(artifact, found)
            yield wait
        except Exception:
            with suppress(WorkerError):  # then what failed first is told
                wait()
            raise


@contextmanager
def _child(regions: Iterable[FileRegion]) -> Iterator[subprocess.Popen[bytes]]:
    """Start the process; it is killed at the end. Reading its output does not block."""
    largest_first = sorted(regions, key=lambda each: -each.size_bytes)
    described = [(each.name, str(each.path), each.offset, each.size_bytes) for each in largest_first]
    try:
        process = subprocess.Popen(
            module_command("mingc.artifacts.hash_process"),
            env=module_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise WorkerError(
            f"the process that hashes weights cannot be started: {error}",
            where=sys.executable,
            fix="raise the limits of processes, memory and open files, or install Python again",
        ) from error
    with process as child:
        assert child.stdin is not None and child.stdout is not None, "it has pipes"
        os.set_blocking(child.stdout.fileno(), False)
        try:
            with suppress(BrokenPipeError):  # it has ended before: who waits for its hashes is told
                child.stdin.write(json.dumps(described).encode() + b"\n")
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
        hashes = pool.map(lambda region: hash_or_problem(lambda: region), regions)
        for region, result in zip(regions, hashes, strict=True):
            sys.stdout.write(json.dumps((region.name, result)) + "\n")
            sys.stdout.flush()


def _exit_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)  # not by `sys.stdin`, whose lock the interpreter needs when it shuts down
    os._exit(1)


if __name__ == "__main__":
    _main()
