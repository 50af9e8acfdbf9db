"""Weights that another process hashes: many of them, some that change or go, and a process that fails."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from mingc.artifacts.artifact import Artifact, check_hashes
from mingc.artifacts.hash_process import hashes_compared
from mingc.artifacts.manifest import FileRecord, Manifest
from mingc.errors import ConfigError, IntegrityError, WorkerError


def write(manifest: Manifest, root: Path, *names: str) -> Artifact:
    """An artifact with these files."""
    files = {}
    for name in names:
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(name.encode())
        files[name] = FileRecord(size_bytes=len(name), sha256=hashlib.sha256(name.encode()).hexdigest())
    return Artifact(root, replace(manifest, files=files))


def hash_processes() -> list[psutil.Process]:
    children = psutil.Process().children()
    return [each for each in children if "mingc.artifacts.hash_process" in each.cmdline()]


def test_more_hashes_than_a_pipe_holds_are_compared(manifest: Manifest, tmp_path: Path) -> None:
    names = [f"weights/{'a long name ' * 15}{index}" for index in range(300)]
    artifact = write(manifest, tmp_path, *names)
    with hashes_compared(artifact, names) as wait:
        assert len(hash_processes()) == 1
        wait()
    assert not hash_processes()
    (tmp_path / names[-1]).write_bytes(b"changed")
    with (
        pytest.raises(IntegrityError, match=rf"1 file.*\n.*{names[-1]}: sha256"),
        hashes_compared(artifact, names),
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
    with pytest.raises(IntegrityError) as refused, hashes_compared(artifact, names) as wait:
        wait()
    found.append(refused.value.message)
    with pytest.raises(IntegrityError) as refused, hashes_compared(artifact, names[4:]):
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

    def die() -> None:
        [child] = hash_processes()
        child.suspend()  # it has not answered, or the end of its answer is read in vain
        child.kill()
        child.wait()

    with pytest.raises(ConfigError, match="too small"), hashes_compared(artifact, ["weights/one"]):
        die()
        raise ConfigError("the device is too small")


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
    with pytest.raises(WorkerError, match=says), hashes_compared(artifact, ["weights/one"]) as wait:
        wait()
