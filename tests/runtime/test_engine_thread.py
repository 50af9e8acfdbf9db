"""Engine threads: work that arrives when a thread is about to wait is run at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest
from collector import Collector
from fake_talker import make_segment, make_talker_loop
from fake_thinker import make_prompt, make_thinker_loop

from mingc.errors import ServeError
from mingc.runtime import engine_thread
from mingc.runtime.engine_thread import EngineThread
from mingc.runtime.request import SamplingParams

_WAIT_S = 10.0


@pytest.fixture(autouse=True)
def endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle thread waits until it is woken, so a wake-up that is lost is never made up for."""
    monkeypatch.setattr(engine_thread, "_IDLE_WAIT_S", 3600.0)


class Jobs(EngineThread):
    """Runs jobs, one per step. `arrive` is called once, between the first step without a job and the wait."""

    def __init__(self) -> None:
        super().__init__("jobs")
        self.arrive: Callable[[], None] = lambda: None
        self.num_jobs = 0
        self.done = threading.Event()
        self.failures: list[ServeError] = []

    @property
    def held(self) -> dict[str, int]:
        return {"jobs": self.num_jobs}

    def _step(self) -> bool:
        if self.num_jobs:
            self.num_jobs -= 1
            self.done.set()
            return True
        self.arrive, arrive = lambda: None, self.arrive
        arrive()
        return False

    def _fail_all(self, error: ServeError) -> None:
        self.failures.append(error)
        self.done.set()


@pytest.fixture
def jobs() -> Iterator[Jobs]:
    thread = Jobs()
    yield thread
    thread.stop()


def add_job(thread: Jobs) -> None:
    thread.num_jobs += 1
    thread.wake()


ARRIVALS: dict[str, Callable[[Jobs], None]] = {
    "wake": add_job,
    "post": lambda thread: thread.post(thread.done.set),
    "fail": lambda thread: thread.fail(ServeError("gone")),
}


@pytest.mark.parametrize("how", ARRIVALS)
def test_what_arrives_before_the_wait_is_not_missed(how: str, jobs: Jobs) -> None:
    jobs.arrive = lambda: ARRIVALS[how](jobs)
    jobs.start()
    assert jobs.done.wait(_WAIT_S), f"the thread sleeps although `{how}` was called"


@pytest.mark.parametrize("how", ARRIVALS)
def test_what_arrives_during_the_wait_ends_it(how: str, jobs: Jobs) -> None:
    is_idle = threading.Event()
    jobs.arrive = is_idle.set
    jobs.start()
    assert is_idle.wait(_WAIT_S)
    with jobs._lock:  # free only while the thread waits
        assert not jobs.done.is_set()
    ARRIVALS[how](jobs)
    assert jobs.done.wait(_WAIT_S), f"`{how}` did not wake the thread"


def test_a_thread_whose_step_raises_fails_its_requests_and_refuses_others(jobs: Jobs) -> None:
    def crash() -> None:
        raise ZeroDivisionError("a bug")

    jobs.arrive = crash
    jobs.start()
    assert jobs.done.wait(_WAIT_S), "requests hang"
    assert jobs.failures[0].message == "the jobs failed: a bug"
    assert not jobs.is_healthy
    with pytest.raises(ServeError, match="a bug"):
        jobs._check_healthy()


def test_a_failed_thread_waits(jobs: Jobs) -> None:
    jobs.fail(ServeError("gone"))
    jobs.start()
    assert jobs.done.wait(_WAIT_S)
    time.sleep(0.2)
    # One round for the failure, and one when its own wake-up came while it was failing requests.
    assert len(jobs.failures) <= 2, "the thread takes a whole core"


def test_the_first_failure_counts_and_a_stopped_thread_fails_its_requests(jobs: Jobs) -> None:
    jobs.fail(ServeError("first"))
    jobs.fail(ServeError("second"))
    jobs.start()
    assert jobs.done.wait(_WAIT_S)
    jobs.stop()
    assert {error.message for error in jobs.failures} == {"first"} and not jobs._thread.is_alive()


def test_a_stopped_thread_says_so(jobs: Jobs) -> None:
    jobs.start()
    jobs.stop()
    assert [(error.message, error.status) for error in jobs.failures] == [("the jobs was stopped", 503)]
    with pytest.raises(ServeError, match="the jobs is stopping") as refused:
        jobs._check_healthy()
    assert refused.value.status == 503, "another server may answer"


def test_a_chat_that_arrives_before_the_wait_is_answered_at_once(
    started: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_thinker_loop()
    answer = Collector()

    def submit() -> None:
        loop.submit(make_prompt([3, 1, 4]), SamplingParams(max_tokens=2), 5, answer.put)

    before_first_wait(loop, submit, monkeypatch)
    started(loop)
    assert len(answer.tokens()) == 2


def test_speech_that_arrives_before_the_wait_starts_at_once(
    started: Callable[..., EngineThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_talker_loop()
    speech = Collector()
    stream = loop.open(speech.put, lambda: False)
    before_first_wait(loop, lambda: loop.add(stream, make_segment(patches=2)), monkeypatch)
    started(loop)
    assert len(speech.segments()) == 1


def before_first_wait(
    loop: EngineThread, arrive: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Call `arrive` when the loop's first step has found nothing to do."""
    step, arrivals = loop._step, [arrive]

    def step_then_arrive() -> bool:
        is_busy = step()
        if not is_busy and arrivals:
            arrivals.pop()()
        return is_busy

    monkeypatch.setattr(loop, "_step", step_then_arrive)


def test_a_thread_is_healthy_while_it_runs_and_has_not_failed(jobs: Jobs) -> None:
    assert not jobs.is_healthy, "not started"
    jobs.start()
    assert jobs.is_healthy
    jobs.stop()
    assert not jobs.is_healthy, "stopped"
    failing = Jobs()
    failing.start()
    failing.fail(ServeError("lost"))
    assert not failing.is_healthy
    failing.stop()


@pytest.mark.parametrize("call", ["begin_playback", "stop_pacing"])
def test_speech_that_is_held_goes_on_when_its_listener_or_the_server_says_so(
    call: str, started: Callable[..., EngineThread]
) -> None:
    """Until its first audio is sent a listener gets as many patches as it may be ahead; the thread then waits."""
    now = 0.0
    loop = make_talker_loop(speech_lead=2, clock=lambda: now)
    speech = Collector()
    stream = loop.open(speech.put, lambda: False, is_live=True)
    loop.add(stream, make_segment(patches=40))
    started(loop)
    speech.wait(lambda items: len(items) == 2, "patches")
    with loop._lock:  # free only while the thread waits
        assert len(speech.items) == 2
    if call == "begin_playback":
        loop.begin_playback(stream)
        now = 100.0
    else:
        loop.stop_pacing()
    speech.wait(lambda items: len(items) >= 3, "patches")
    loop.stop_pacing()
    assert len(speech.segments()) == 1
    loop.cancel(stream)
