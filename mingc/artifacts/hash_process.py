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
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from mingc.artifacts.artifact import (
    Artifact,
    file_hashes,
    hash_or_problem,
    open_artifact,
    raise_changed,
    unreadable,
)
from mingc.artifacts.file_region import FileRegion
from mingc.errors import WorkerError
from mingc.python_module import module_command, module_environment

_POLL_S = 0.02
_READ_BYTES = 1 << 16


class HashProcess:
    """A process that hashes files of an artifact, `names`, from now on. A `with` statement ends it.

    Raises: WorkerError when it does not start.
    """

    def __init__(self, artifact: Artifact, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self._found = dict[str, str]()  # hashes, or problems
        self._unread, self._said = b"", ""
        regions = list[FileRegion]()
        for name in names:
            try:
                regions.append(artifact.region(name))
            except OSError as error:  # the file has gone since the artifact was opened
                self._found[name] = unreadable(error)
        self._process = _start(regions)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._process as process:
            process.kill()
            assert process.stdin is not None, "it has a pipe"
            with suppress(BrokenPipeError):  # what was not written
                process.stdin.close()

    def wait(self) -> Mapping[str, str]:
        """The hashes of all files by name; of a file that cannot be read, why. An interrupt ends the wait at once.

        Raises: WorkerError when the process dies.
        """
        assert self._process.stdout is not None, "it has a pipe"
        while not self._found.keys() >= self.names:
            # A signal may come just before a call that blocks, and would wait for its end: none does.
            try:
                read = os.read(self._process.stdout.fileno(), _READ_BYTES)
            except BlockingIOError:
                time.sleep(_POLL_S)
                continue
            if not read:
                how = f"has failed: {self._said}" if self._said else "was killed"
                raise WorkerError(f"the process that hashes weights {how}", fix="start again")
            *lines, self._unread = (self._unread + read).split(b"\n")
            for line in lines:
                if line.startswith(b"["):
                    self._found.update([json.loads(line)])
                else:
                    self._said = line.decode(errors="replace")
        return self._found


def hash_weights(root: Path) -> HashProcess:
    """A process that hashes the weights of the artifact at `root`.

    Raises: ArtifactError and its subclasses; WorkerError when it does not start.
    """
    artifact = open_artifact(root)
    return HashProcess(artifact, artifact.manifest.weights_files)


@contextmanager
def hashes_compared(artifact: Artifact, hashing: HashProcess) -> Iterator[Callable[[], None]]:
    """Compare the hashes of all files: of those of `hashing` while the block runs, of the others before it.

    The block calls the yielded function to wait for the end. When it fails, a changed file may be the cause: the
    comparison is awaited, and an IntegrityError comes instead.

    `hashing` has ended after the block.

    Raises: IntegrityError listing all files that differ or cannot be read, WorkerError when the process dies.
    """
    others = dict[str, str]()
    with hashing:

        def wait() -> None:
            raise_changed(artifact, {**others, **hashing.wait()})

        try:
            names = [name for name in artifact.manifest.files if name not in hashing.names]
            others |= file_hashes(artifact, names)
            raise_changed(artifact, others)
            yield wait
        except Exception:
            with suppress(WorkerError):  # then the first error is raised
                wait()
            raise


def _start(regions: Iterable[FileRegion]) -> subprocess.Popen[bytes]:
    """Start the process. Reading its output does not block."""
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
    assert process.stdin is not None and process.stdout is not None, "it has pipes"
    os.set_blocking(process.stdout.fileno(), False)
    with suppress(BrokenPipeError):  # it has ended: `HashProcess.wait` raises the error
        process.stdin.write(json.dumps(described).encode() + b"\n")
        process.stdin.flush()
    return process


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
