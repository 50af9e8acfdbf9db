"""Folders under construction: leftovers of killed processes are removed, folders of living processes are not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import mingc
from mingc.artifacts.artifact import new_artifact
from mingc.artifacts.work_folder import work_folder

_BUILD = """
import sys, time
from pathlib import Path
from mingc.artifacts.artifact import new_artifact

with new_artifact(Path(sys.argv[1]), replace_existing=False) as work:
    (work / "weights").mkdir()
    (work / "weights" / "part").write_bytes(bytes(1000))
    print(work.name, flush=True)
    time.sleep(600)
"""


@contextmanager
def building(root: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that is in the middle of an artifact, and its folder."""
    with subprocess.Popen(
        [sys.executable, "-c", _BUILD, str(root)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield process, root.parent / process.stdout.readline().strip()
        finally:
            process.kill()


def test_the_next_build_removes_what_a_killed_one_left_and_nothing_else(tmp_path: Path) -> None:
    root = tmp_path / "tiny"
    kept = [
        tmp_path / name
        for name in (".tiny.notes.partial", ".tinyx.12345678.partial", ".other.12345678.partial")
    ]
    for folder in kept:
        folder.mkdir()
    with building(root) as (living, living_folder), building(root) as (killed, killed_folder):
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert (killed_folder / "weights" / "part").exists()
        with new_artifact(root, replace_existing=False) as work:
            assert not killed_folder.exists()
            assert (living_folder / "weights" / "part").exists()
            (work / "whole").touch()
        assert living.poll() is None
        assert set(tmp_path.iterdir()) == {root, living_folder, *kept}
    assert (root / "whole").exists()


def test_two_folders_of_one_process_do_not_take_each_other_for_abandoned(tmp_path: Path) -> None:
    with work_folder(tmp_path, "build-") as first, work_folder(tmp_path, "build-") as second:
        assert first.is_dir() and second.is_dir() and first != second
    assert not list(tmp_path.iterdir())


def test_a_link_of_such_a_name_is_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.mkdir()
    (target / "mine").touch()
    (tmp_path / "build-0123abcd.partial").symlink_to(target)
    with work_folder(tmp_path, "build-"):
        assert (target / "mine").exists()


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_the_folder_has_the_wished_mode(tmp_path: Path, mode: int) -> None:
    with work_folder(tmp_path, "build-", mode=mode) as folder:
        assert folder.stat().st_mode & 0o777 == mode & ~0o022
