"""Weights that another process hashes: many of them, some that change or go, and a process that fails."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from server_thread import eventually

from mingc.artifacts.artifact import Artifact, check_hashes
from mingc.artifacts.hash_process import HashProcess, hashes_compared
from mingc.artifacts.manifest import FileRecord, Manifest
from mingc.errors import ConfigError, IntegrityError, WorkerError


def write(manifest: Manifest, root: Path, *names: str) -> Artifact:
    """An artifact with these files."""
    files = {}
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
        files[name] = FileRecord(size_bytes=len(name), sha256=hashlib.sha256(name.encode()).hexdigest())
    return Artifact(root, replace(manifest, files=files))


@contextmanager
def compared(artifact: Artifact, names: Collection[str]) -> Iterator[Callable[[], None]]:
    with hashes_compared(artifact, HashProcess(artifact, names)) as wait:
        yield wait


def hash_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "mingc.artifacts.hash_process" in each.cmdline()]


def test_more_hashes_than_a_pipe_holds_are_compared(manifest: Manifest, tmp_path: Path) -> None:
    """Also lines that are longer than what is written at once."""
    folder = "/".join(["ü" * 119 + " "] * 14)  # six characters of JSON for each, three pages in all
    names = [f"{folder}/{index}" for index in range(40)]
    artifact = write(manifest, tmp_path, *names)
    written = [-1]

    def is_full() -> bool:
        written.append(child.io_counters().write_chars)
        return written[-1] == written[-2] > 32768

    with compared(artifact, names) as wait:
        [child] = hash_processes()
        eventually(is_full)  # then a line is cut where the pipe ends
        wait()
    assert not hash_processes()
    (tmp_path / names[-1]).write_bytes(b"changed")
    with (
        pytest.raises(IntegrityError, match=r"1 file.*\n.*/39: sha256 differs"),
        compared(artifact, names),
    ):
        raise ConfigError("what came of it")


def test_all_files_that_changed_or_went_since_they_were_opened_are_listed(
    manifest: Manifest, tmp_path: Path
) -> None:
    names = [
        f"{kind}/{what}" for kind in ("engines", "weights") for what in ("kept", "gone", "short", "long")
    ]
    artifact = write(manifest, tmp_path, *names)
    for kind in ("engines", "weights"):
        (tmp_path / kind / "gone").unlink()
        (tmp_path / kind / "short").write_bytes(b"")
        (tmp_path / kind / "long").write_bytes(f"{kind}/long and more".encode())
    found = []
    with pytest.raises(IntegrityError) as refused, compared(artifact, names) as wait:
        wait()
    found.append(refused.value.message)
    with pytest.raises(IntegrityError) as refused, compared(artifact, names[4:]):
        pytest.fail("engines are loaded")
    found.append(refused.value.message)
    with pytest.raises(IntegrityError) as refused:
        check_hashes(artifact)
    found.append(refused.value.message)
    expected = "".join(
        f"\n  - {kind}/gone: cannot be read: No such file or directory"
        f"\n  - {kind}/short: sha256 differs from the manifest"
        f"\n  - {kind}/long: sha256 differs from the manifest"
        for kind in ("engines", "weights")
    )
    assert found == [f"6 file(s) of the artifact are not as exported:{expected}"] * 3


def test_a_process_that_dies_hides_no_other_error(manifest: Manifest, tmp_path: Path) -> None:
    artifact = write(manifest, tmp_path, "weights/one")

    with pytest.raises(ConfigError, match="too small"), compared(artifact, ["weights/one"]):
        [child] = hash_processes()
        child.suspend()  # at its start, so it has not answered
        child.kill()
        raise ConfigError("the device is too small")


def test_an_interrupt_ends_a_stopped_process(manifest: Manifest, tmp_path: Path) -> None:
    artifact = write(manifest, tmp_path, "weights/one")
    with pytest.raises(KeyboardInterrupt), compared(artifact, ["weights/one"]):
        [child] = hash_processes()
        child.suspend()
        raise KeyboardInterrupt
    assert not child.is_running()


def test_a_process_that_has_begun_before_is_used_and_ended(manifest: Manifest, tmp_path: Path) -> None:
    names = ["weights/one", "weights/two"]
    artifact = write(manifest, tmp_path, *names)
    hashing = HashProcess(artifact, names)
    [child] = hash_processes()
    child.suspend()  # at its start, so it has read nothing
    (tmp_path / "weights/two").write_bytes(b"changed")
    child.resume()
    with (
        pytest.raises(IntegrityError, match="two: sha256 differs"),
        hashes_compared(artifact, hashing) as wait,
    ):
        assert hash_processes() == [child]
        wait()
    assert not child.is_running()


def let_pass(gate: Path) -> None:
    """Wait until a process opens the named pipe `gate` for reading, and let it read nothing."""

    def is_open() -> bool:
        try:
            os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:
            return False
        return True

    eventually(is_open)


def test_signals_of_the_terminal_are_left_to_the_parent(manifest: Manifest, tmp_path: Path) -> None:
    names = ["weights/first", "weights/second"]
    artifact = write(manifest, tmp_path, *names)
    for name in names:
        (tmp_path / name).unlink()
        os.mkfifo(tmp_path / name)
    answered = (
        r"2 file.*\n.*first: cannot be read: .*not seekable.*\n.*second: cannot be read: .*not seekable"
    )
    with pytest.raises(IntegrityError, match=answered), compared(artifact, names) as wait:
        [child] = hash_processes()
        let_pass(tmp_path / names[0])
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            child.send_signal(number)
        let_pass(tmp_path / names[1])
        wait()


_KILLED = """
import hashlib, sys
from pathlib import Path
from types import SimpleNamespace
from mingc.artifacts.artifact import Artifact
from mingc.artifacts.hash_process import HashProcess, hashes_compared

artifact = Artifact(Path(sys.argv[1]), SimpleNamespace(files={}))
with hashes_compared(artifact, HashProcess(artifact, ["gate", "shut"])):
    print("hashing", flush=True)
    sys.stdin.read()
"""


def test_the_process_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    for name in ("gate", "shut"):
        os.mkfifo(tmp_path / name)
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"hashing\n"
        [child] = psutil.Process(parent.pid).children()
        let_pass(tmp_path / "gate")
        parent.kill()
    try:
        child.wait(20)
    finally:
        if child.is_running():
            child.kill()


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (None, "the process that hashes weights cannot be started: .*No such file"),
        ("echo no space >&2; echo ImportError: mingc >&2; exit 1", "has failed: ImportError: mingc"),
        ("kill -9 $$", "was killed"),
        ("printf '[\"weights/one'", "was killed"),
    ],
)
def test_a_process_that_does_not_start_or_end_well_is_reported(
    script: str | None, says: str, manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    if script is not None:
        python.write_text(f"#!/bin/sh\n{script}\n")
        python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    artifact = write(manifest, tmp_path, "weights/one")
    with pytest.raises(WorkerError, match=says), compared(artifact, ["weights/one"]) as wait:
        wait()
