"""A signalled command ends without waiting for its workers and leaves nothing behind."""

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

_JOB = """
import multiprocessing, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from mingc.artifacts.work_folder import work_folder
from mingc.console.signals import clean_shutdown

try:
    with (
        clean_shutdown(),
        work_folder(Path(sys.argv[1]), "job-"),
        ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool,
    ):
        pool.submit(int).result()  # the worker is there: a future counts as running before it is
        sleeping = pool.submit(time.sleep, 600)
        while not sleeping.running():
            time.sleep(0.01)
        print("begun", flush=True)
        sleeping.result()
except KeyboardInterrupt:
    sys.exit(130)
"""


_CLEANING = """
import sys, time
from contextlib import contextmanager
from pathlib import Path
from mingc.console import signals
from mingc.artifacts.work_folder import work_folder

@contextmanager
def slow_to_clean():
    try:
        yield
    finally:
        print("cleaning", flush=True)
        sys.stdin.readline()

signals.SIGNAL_DEBOUNCE_S, signals.CLEANING_LIMIT_S = map(float, sys.argv[2:])
try:
    with signals.clean_shutdown(), work_folder(Path(sys.argv[1]), "job-"), slow_to_clean():
        print("begun", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
_SLOW_END = """
import os, sys, time
from pathlib import Path
from mingc.console import signals

class Slow:
    def __del__(self):
        os.write(1, b"ending\\n")
        os.read(0, 1)

signals.SIGNAL_DEBOUNCE_S = float(sys.argv[2])
slow = Slow()
try:
    with signals.clean_shutdown():
        print("begun", flush=True)
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
_FROM_A_STRING = """
import sys, time
from mingc.console.signals import clean_shutdown

try:
    with clean_shutdown():
        print("begun", flush=True)
        exec("time.sleep(600)")
except KeyboardInterrupt:
    sys.exit(130)
"""
_IN_A_FINALIZER = """
import sys, time
from mingc.console.signals import clean_shutdown

class Slow:
    def __del__(self):
        print("begun", flush=True)
        sys.stdin.readline()

try:
    with clean_shutdown():
        Slow()
        time.sleep(600)
except KeyboardInterrupt:
    sys.exit(130)
"""
_IMPORTED = """
import sys
print("begun", flush=True)
try:
    sys.stdin.readline()
except BaseException:
    print("interrupted", flush=True)
"""
_SERVE = """
import sys, time
from mingc.cli import main
from mingc.runtime.service import builder
from mingc.runtime.engines.backends import aoti

def load(*_, **__):
    aoti._unpack_folder()
    print("begun", flush=True)
    time.sleep(600)

builder.open_service = load
main(["serve", sys.argv[1], "--port", "0", "--no-check-hashes"])
"""


@contextmanager
def running(code: str, folder: Path, *words: object, option: str = "-c") -> Iterator[subprocess.Popen[str]]:
    """A process of `code` that has said that it has begun; with `-m` this names a module of `folder`.

    Temporary files are in `folder`.
    """
    path = f"{Path(mingc.__file__).parents[1]}{os.pathsep}{folder}"
    with subprocess.Popen(
        [sys.executable, option, code, str(folder), *map(str, words)],
        env={**os.environ, "PYTHONPATH": path, "TMPDIR": str(folder)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            said(job, "begun")
            yield job
        finally:
            job.kill()


def said(job: subprocess.Popen[str], word: str) -> None:
    """Wait for the next line, which is `word`."""
    assert job.stdout is not None and job.stdout.readline() == f"{word}\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_job_alone_ends_its_workers_and_removes_its_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(_JOB, tmp_path) as job:
        job.send_signal(number)
        assert job.wait(timeout=60) == 130
    assert not list(tmp_path.iterdir())


def test_a_request_that_comes_twice_does_not_cut_the_cleaning_short(tmp_path: Path) -> None:
    with running(_CLEANING, tmp_path, 600, 600) as job:
        job.terminate()
        said(job, "cleaning")
        job.terminate()
        job.send_signal(signal.SIGINT)
        job.communicate("\n", timeout=60)
        assert job.returncode == 130
    assert not list(tmp_path.iterdir())


def test_a_later_signal_ends_a_job_as_it_stands(tmp_path: Path) -> None:
    with running(_CLEANING, tmp_path, 0, 600) as job:
        job.terminate()
        said(job, "cleaning")
        job.terminate()
        assert job.wait(timeout=60) == -signal.SIGTERM
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]


def test_a_job_that_cannot_clean_up_ends_as_it_stands(tmp_path: Path) -> None:
    with running(_CLEANING, tmp_path, 600, 0.1) as job:
        job.terminate()
        said(job, "cleaning")
        assert job.wait(timeout=60) == 130
    assert [path.suffix for path in tmp_path.iterdir()] == [".partial"]


def test_an_interrupt_of_code_from_a_string_keeps_its_exit_code(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(_FROM_A_STRING, encoding="utf-8")
    with running("job", tmp_path, option="-m") as job:
        job.terminate()
        assert job.wait(timeout=60) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_that_a_finalizer_swallows_still_ends_the_job(
    tmp_path: Path, number: signal.Signals
) -> None:
    with running(_IN_A_FINALIZER, tmp_path) as job:
        job.send_signal(number)
        assert job.wait(timeout=60) == 130


def test_a_signal_that_a_finalizer_swallows_ends_a_job_that_is_deaf_to_ctrl_c(tmp_path: Path) -> None:
    """As a shell's background jobs are born."""
    deaf = _IN_A_FINALIZER.replace("signal.default_int_handler", "signal.SIG_IGN")
    with running(deaf, tmp_path) as job:
        job.terminate()
        assert job.wait(timeout=60) == 130


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_amid_an_import_waits_for_its_end(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "imported.py").write_text(_IMPORTED, encoding="utf-8")
    (tmp_path / "job.py").write_text(
        _FROM_A_STRING.replace('print("begun", flush=True)', "import imported"), encoding="utf-8"
    )
    with running("job", tmp_path, option="-m") as job:
        job.send_signal(number)
        said_more, _ = job.communicate("\n", timeout=60)
        assert (job.returncode, said_more) == (130, "")


@pytest.mark.parametrize("one_request_s", [600, 0])
def test_an_interpreter_that_takes_itself_down_keeps_its_exit_code(
    tmp_path: Path, one_request_s: float
) -> None:
    with running(_SLOW_END, tmp_path, one_request_s) as job:
        job.terminate()
        said(job, "ending")
        job.terminate()
        job.send_signal(signal.SIGINT)
        job.communicate("\n", timeout=60)
        assert job.returncode == 130


def test_a_server_that_is_not_ready_yet_leaves_no_unpacked_engines(tmp_path: Path) -> None:
    with running(_SERVE, tmp_path) as server:
        assert list(tmp_path.iterdir())
        server.send_signal(signal.SIGTERM)
        assert server.wait(timeout=60) == 130
    assert not list(tmp_path.iterdir())
