"""Step watchdog: reports a step that takes too long, and nothing else."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from mingc.runtime.thinker.ranks import watchdog
from mingc.runtime.thinker.ranks.watchdog import StepWatchdog

CPU = torch.device("cpu")
TIMEOUT_S = 60.0
_WAIT_S = 20.0


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(watchdog, "time", clock)
    return clock


@pytest.fixture
def watched(clock: Clock) -> Iterator[StepWatchdog]:
    """A watchdog whose own thread does not look during a test."""
    dog = StepWatchdog(CPU, TIMEOUT_S, lambda problem: None)
    yield dog
    dog.close()


def test_a_call_that_does_not_return_is_a_problem_after_the_timeout(
    clock: Clock, watched: StepWatchdog
) -> None:
    with watched.step():
        clock.now += TIMEOUT_S - 1
        assert watched._find_problem() is None
        clock.now += 2
        assert watched._find_problem() == "a step of the thinker did not return within 60 s"


def test_an_idle_server_is_no_problem(clock: Clock, watched: StepWatchdog) -> None:
    assert watched._find_problem() is None
    with watched.step():
        pass
    with pytest.raises(ZeroDivisionError), watched.step():
        raise ZeroDivisionError
    clock.now += 10 * TIMEOUT_S
    assert watched._find_problem() is None


def test_each_step_has_the_whole_timeout(clock: Clock, watched: StepWatchdog) -> None:
    for _ in range(3):
        with watched.step():
            clock.now += TIMEOUT_S - 1
            assert watched._find_problem() is None


@pytest.mark.parametrize("has_passed", [False, True])
def test_a_device_that_is_stuck_behind_a_returned_call_is_a_problem(
    has_passed: bool, clock: Clock, watched: StepWatchdog
) -> None:
    event = SimpleNamespace(query=lambda: has_passed)
    watched._event = event, clock.now  # type: ignore[assignment]
    clock.now += TIMEOUT_S - 1
    assert watched._find_problem() is None
    clock.now += 2
    expected = None if has_passed else "a step of the thinker did not end within 60 s"
    assert watched._find_problem() == expected


def test_a_stuck_device_stays_a_problem_while_further_steps_are_launched(
    clock: Clock, watched: StepWatchdog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An event is replaced once it has passed: one that has not keeps its age."""
    passed = {"first": False, "second": False}
    names = iter(passed)

    class Event:
        def __init__(self) -> None:
            self.name = next(names)

        def record(self, stream: object) -> None:
            pass

        def query(self) -> bool:
            return passed[self.name]

    monkeypatch.setattr(watchdog.torch, "cuda", SimpleNamespace(Event=Event, current_stream=lambda _: None))
    watched._device = torch.device("cuda")
    for _ in range(3):
        with watched.step():
            pass
        clock.now += 0.4 * TIMEOUT_S
    assert watched._find_problem() == "a step of the thinker did not end within 60 s"
    passed["first"] = True
    with watched.step():
        pass
    assert watched._find_problem() is None
    clock.now += TIMEOUT_S + 1
    assert watched._find_problem() is not None


def test_a_device_error_is_a_problem(clock: Clock, watched: StepWatchdog) -> None:
    def query() -> bool:
        raise RuntimeError("an illegal memory access was encountered")

    watched._event = SimpleNamespace(query=query), clock.now  # type: ignore[assignment]
    clock.now += 2 * TIMEOUT_S
    assert watched._find_problem() == "the device failed: an illegal memory access was encountered"


def test_the_watchdog_looks_several_times_within_a_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    looked = threading.Event()

    class Closed(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            looked.set()
            return True

    fakes = SimpleNamespace(Event=Closed, Thread=threading.Thread)
    monkeypatch.setattr(watchdog, "threading", fakes)
    StepWatchdog(CPU, TIMEOUT_S, lambda problem: None)
    assert looked.wait(_WAIT_S)
    assert waits[0] <= TIMEOUT_S / 4


def test_a_problem_is_reported_once_from_its_own_thread() -> None:
    problems: list[str] = []
    reported = threading.Event()

    def report(problem: str) -> None:
        problems.append(problem)
        reported.set()

    dog = StepWatchdog(CPU, 0.05, report)
    with dog.step():
        assert reported.wait(_WAIT_S)
        time.sleep(0.2)
    assert problems == ["a step of the thinker did not return within 0.05 s"]
    dog.close()


def test_a_closed_watchdog_reports_nothing_and_ends_its_thread() -> None:
    problems: list[str] = []
    before = set(threading.enumerate())
    dog = StepWatchdog(CPU, 0.05, problems.append)
    (thread,) = set(threading.enumerate()) - before
    dog.close()
    with dog.step():
        thread.join(_WAIT_S)
        assert not thread.is_alive()
    assert not problems
