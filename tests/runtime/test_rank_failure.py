"""Failure of thinker ranks: the step watchdog, and the hard exit of a process that cannot shut down."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest
import torch
from fake_service import FakeService

from mingc.errors import RankError, ServeError
from mingc.runtime.thinker.ranks.watchdog import StepWatchdog
from mingc.server.app import create_app
from mingc.server.lifecycle import serve_async
from mingc.server.options import ServeOptions

_CPU = torch.device("cpu")
_EXIT = """
import ctypes, sys, time
from mingc.errors import RankError
from mingc.runtime.thinker.ranks import hard_exit

class Engine:
    def __del__(self):
        time.sleep(600)

hard_exit.GIL_MARGIN_S = 0.5
hard_exit.hard_exit(RankError("a rank is gone"), Engine(), float(sys.argv[1]))
print("called", flush=True)
exec(sys.argv[2])
"""


def test_a_step_that_does_not_return_is_reported_once() -> None:
    problems: list[str] = []
    is_reported = threading.Event()

    def report(problem: str) -> None:
        problems.append(problem)
        is_reported.set()

    watchdog = StepWatchdog(_CPU, 0.2, report)
    with watchdog.step():
        pass
    assert not problems
    with watchdog.step():
        assert is_reported.wait(60)
    assert problems == ["a step of the thinker did not return within 0.2 s"]


def test_steps_within_the_timeout_and_idle_time_are_not_reported() -> None:
    problems: list[str] = []
    watchdog = StepWatchdog(_CPU, 60.0, problems.append)
    with pytest.raises(ValueError), watchdog.step():
        raise ValueError
    assert watchdog._find_problem() is None
    watchdog.close()


@pytest.mark.parametrize(
    ("timeout_s", "work", "code"),
    [
        (0.2, "time.sleep(600)", RankError.exit_code),
        (600, "pass", RankError.exit_code),
        (0.2, "ctypes.PyDLL(None).sleep(600)", 1),
    ],
    ids=["forced exit", "normal exit", "forced exit while a call holds the GIL"],
)
def test_a_hard_exit_keeps_the_exit_code_of_the_error(timeout_s: float, work: str, code: int) -> None:
    words = [sys.executable, "-c", _EXIT, str(timeout_s), work]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (code, "called\n")


def test_a_service_that_fails_ends_the_server_with_its_error() -> None:
    service = FakeService()

    async def work() -> None:
        def announce(url: str) -> None:
            threading.Thread(target=service.report_failure, args=(RankError("rank 1 ended"),)).start()

        with pytest.raises(ServeError, match="rank 1 ended"):
            await serve_async(create_app(service, ServeOptions(port=0)), announce=announce)

    asyncio.run(work())
    assert service.shutdown_timeouts == [5.0, 0.0]
