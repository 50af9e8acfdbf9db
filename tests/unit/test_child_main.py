"""Child processes end when their parent dies, and commands shut down cleanly."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import mingc

_END_S = 30
_ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])}
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
import subprocess, sys

words = [sys.executable, "-c", sys.argv[1], sys.argv[2]]
with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
    print(child.pid, child.stdout.readline(), flush=True)
    child.wait()
"""
_MEASUREMENT = """
import multiprocessing, time
from mingc.bench.load import Clients

clients = Clients(1)  # without a name they would end at once
print(multiprocessing.active_children()[0].pid, flush=True)
time.sleep(600)
"""


def test_a_command_ends_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _PARENT, _COMMAND, str(tmp_path)],
        env=_ENVIRONMENT,
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
    with subprocess.Popen(
        [sys.executable, "-c", _MEASUREMENT],
        env=_ENVIRONMENT,
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


def test_a_command_ends_tidily_when_its_stdin_closes(tmp_path: Path) -> None:
    words = [sys.executable, "-c", _COMMAND, str(tmp_path)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_ENVIRONMENT) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == b"begun\n"
        child.stdin.close()
        assert child.wait(_END_S) not in (0, -signal.SIGKILL)
    assert not (tmp_path / "begun").exists()


def test_a_command_that_ends_by_itself_is_not_signalled() -> None:
    words = [sys.executable, "-m", "mingc.console.child_main", "--version"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_ENVIRONMENT) as child:
        assert child.stdout is not None and child.stdout.read().startswith(b"mingc")
        assert child.wait(_END_S) == 0
