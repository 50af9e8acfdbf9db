"""A job that is told to end does so without waiting for its workers, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import mingc

_JOB = """
import multiprocessing, signal, sys, time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from mingc.artifacts.work_folder import work_folder
from mingc.interruption import ending_tidily

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs are born deaf to it
try:
    with (
        ending_tidily(),
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_job_alone_ends_its_workers_and_removes_its_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _JOB, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == "begun\n"
            job.send_signal(number)
            assert job.wait(timeout=60) == 130
        finally:
            job.kill()
    assert not list(tmp_path.iterdir())
