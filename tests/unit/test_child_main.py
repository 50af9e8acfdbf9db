"""Child processes end when their parent dies, and commands shut down cleanly."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mingc
from mingc import demo

_END_S = 30
# A command in the middle of its work, which cleans up when it is signalled.
_COMMAND = """
import sys, time
from pathlib import Path
from mingc.console.signals import clean_shutdown
from mingc.console.child_main import exit_with_parent

folder = Path(sys.argv[1])
with clean_shutdown():
    exit_with_parent()
    try:
        (folder / "begun").touch()
        print("begun", flush=True)
        time.sleep(600)
    finally:
        (folder / "begun").unlink()
"""
_PARENT = """
import sys
from mingc import demo

demo._command = lambda *words: [sys.executable, "-c", sys.argv[1], *words]
with demo._child(sys.argv[2]) as (child, said):
    print(child.pid, said.readline().decode(), flush=True)
    child.wait()
"""
_MEASUREMENT = """
import os, time
from clients import Clients

def process(url, indexes):
    return [os.getpid()]

clients = Clients(1)  # without a name they would end at once
print(clients.load(process, "", 1)[0], flush=True)
time.sleep(600)
"""


def test_a_command_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, _COMMAND, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        try:
            number, word = parent.stdout.readline().split()
            assert word == "begun" and (tmp_path / "begun").exists()
            command = os.pidfd_open(int(number))
        finally:
            parent.kill()
    try:
        assert _ends(command), "the command outlives its parent"
    finally:
        os.close(command)
    assert not (tmp_path / "begun").exists()


def test_clients_end_with_a_measurement_that_was_killed() -> None:
    folder = Path(mingc.__file__).parents[1] / "benchmarks"
    with subprocess.Popen(
        [sys.executable, "-c", _MEASUREMENT],
        env={**os.environ, "PYTHONPATH": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        try:
            client = os.pidfd_open(int(parent.stdout.readline()))
        finally:
            parent.kill()
    try:
        assert _ends(client), "the client outlives its measurement"
    finally:
        os.close(client)


def _ends(process: int) -> bool:
    """Whether the process behind this descriptor ends in time."""
    poll = select.poll()
    poll.register(process, select.POLLIN)
    return bool(poll.poll(1000 * _END_S))


def test_a_command_ends_tidily_when_what_it_was_started_for_is_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(mingc.__file__).parents[1]))
    monkeypatch.setattr(demo, "_command", lambda *words: [sys.executable, "-c", _COMMAND, *words])
    with pytest.raises(KeyboardInterrupt), demo._child(str(tmp_path)) as (child, said):
        assert said.readline() == b"begun\n"
        raise KeyboardInterrupt
    assert child.returncode not in (None, -signal.SIGKILL)
    assert not (tmp_path / "begun").exists()


def test_a_command_that_ends_by_itself_is_not_signalled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(mingc.__file__).parents[1]))
    with demo._child("--version") as (child, said):
        assert said.read().decode().startswith("mingc")
        assert child.wait(_END_S) == 0
