"""Paced speech in the talker loop, over fake engines and a clock of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from collector import Collector
from fake_omni import chat, collect, make_service, run, speech_request
from fake_talker import PATCH_SAMPLES, SAMPLE_RATE, TAIL, make_talker_loop, make_talker_worker
from fake_talker import make_segment as segment
from hand_run import run_step, run_until_idle
from listeners import Clock, Listener, run_to_end

from mingc.runtime.request import AudioDelta, Done, Event
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.worker import SpeechSegment

PATCH_S = PATCH_SAMPLES / SAMPLE_RATE


def launched(loop: TalkerLoop, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of every patch, as they are launched."""
    worker, sizes = loop.worker, list[int]()
    launch = worker.launch

    def record(slots: Sequence[int]) -> None:
        sizes.append(len(slots))
        launch(slots)

    monkeypatch.setattr(worker, "launch", record)
    return sizes


def costing(loop: TalkerLoop, clock: Clock, row_s: float, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """Make each row of a batch take `row_s` of the clock. Returns the streams of every patch, as they are launched."""
    worker, batches = loop.worker, list[list[int]]()
    launch = worker.launch

    def run(slots: Sequence[int]) -> None:
        batches.append([loop.scheduler.slots.owner(slot) for slot in slots])
        launch(slots)
        clock.now += row_s * worker.batch_size(len(slots))

    monkeypatch.setattr(worker, "launch", run)
    return batches


def pieces_of(seed: int, count: int = 3) -> list[SpeechSegment]:
    return [
        segment(
            seed=seed, index=index, tokens=12 + seed + index, patches=3 + (seed + index) % 4, temperature=0.5
        )
        for index in range(count)
    ]


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("slots", [1, 3, 8, 12])
def test_paced_speech_has_the_samples_of_speech_made_at_once(depth: int, slots: int) -> None:
    """Alone and together, with fewer slots than streams and with more than a batch has rows, beside whole speech."""
    expected = []
    for seed in range(10):
        clock = Clock()
        loop = make_talker_loop(make_talker_worker(slots=1), clock=clock)
        alone = Listener(loop, *pieces_of(seed), is_live=False)
        run_to_end(loop, clock, [alone])
        expected.append(alone.segments(3))
    clock = Clock()
    loop = make_talker_loop(make_talker_worker(slots=slots, depth=depth), speech_lead=2, clock=clock)
    before = loop.held
    listeners = [Listener(loop, *pieces_of(seed), is_live=seed % 3 > 0) for seed in range(10)]
    run_to_end(loop, clock, listeners)
    for listener, waves in zip(listeners, expected, strict=True):
        for wave, alone_wave in zip(listener.segments(3), waves, strict=True):
            np.testing.assert_allclose(wave, alone_wave, rtol=0, atol=1e-6)
        loop.cancel(listener.stream)
    run_until_idle(loop)
    assert loop.held == before


@pytest.mark.parametrize("lead", [0, 1, 2, 3, 4])
def test_paced_speech_alone_has_exactly_the_same_bits(lead: int) -> None:
    waves = []
    for is_live in (True, False):
        clock = Clock()
        loop = make_talker_loop(speech_lead=lead, clock=clock)
        listener = Listener(loop, *pieces_of(5), is_live=is_live)
        ended_at = run_to_end(loop, clock, [listener])
        assert (ended_at > 0.0) == (is_live and lead > 0)
        waves.append(np.concatenate(listener.segments(3)))
    assert np.array_equal(*waves)


def test_a_stream_that_is_ahead_takes_no_part_in_patches_and_the_thread_sleeps_until_it_is_due() -> None:
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, clock=clock)
    ahead = Listener(loop, segment(patches=30))
    run_until_idle(loop)
    assert ahead.take() == 3, "three patches before the first one has left, and no more"
    assert loop.listeners == {"starting": 0, "playing": 1, "late": 0, "paused": 0}
    run_until_idle(loop)
    assert loop.due_at - clock.now == pytest.approx(PATCH_S - TAIL / SAMPLE_RATE)
    clock.now = loop.due_at
    run_until_idle(loop)
    assert len(ahead.items) == 4
    whole = Listener(loop, segment(seed=2, patches=20), is_live=False)
    run_until_idle(loop)
    assert len(whole.items) == 20, "as fast as possible"
    assert len(ahead.items) <= 5, "it has joined at most one patch of the other"


def test_streams_share_patches_instead_of_having_one_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six listeners, started at different times of a patch: from the second patch time on one launch serves all."""
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, clock=clock)
    sizes = launched(loop, monkeypatch)
    listeners = []
    for seed in range(6):
        clock.now = seed * PATCH_S / 6
        listeners.append(Listener(loop, segment(seed=seed, patches=40)))
        run_until_idle(loop)
        listeners[-1].take()
    sizes.clear()
    run_to_end(loop, clock, listeners)
    assert sum(sizes) <= 6 * 37
    assert len(sizes) <= 45, "37 patches each"
    assert loop.num_underruns == 0


def test_more_streams_than_a_batch_are_served_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    worker = make_talker_worker(slots=20)
    assert worker.max_batch == 8
    loop = make_talker_loop(worker, speech_lead=3, clock=clock)
    sizes = launched(loop, monkeypatch)
    listeners = [Listener(loop, segment(seed=seed, patches=12)) for seed in range(20)]
    run_to_end(loop, clock, listeners)
    assert max(sizes) == 8 and sum(sizes) == 20 * 12
    assert all(len(listener.items) == 12 for listener in listeners)
    assert clock.now > 8 * PATCH_S and loop.num_underruns == 0


def test_while_a_request_waits_for_a_slot_those_that_have_one_are_not_held() -> None:
    clock = Clock()
    loop = make_talker_loop(make_talker_worker(slots=2), speech_lead=3, clock=clock)
    first = [Listener(loop, segment(seed=seed, patches=30)) for seed in range(2)]
    run_until_idle(loop)
    for each in first:
        each.take()
    run_until_idle(loop)
    assert {len(each.items) for each in first} <= {3, 4}
    third = Listener(loop, segment(seed=3, patches=30))
    run_until_idle(loop)
    assert clock.now == 0.0 and third.take() == 3
    assert {len(each.items) for each in first} == {30}, "their slots are free as soon as without pacing"


def test_no_more_segments_join_before_a_patch_than_one_boundary_admits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next patch is held, because the device is busy with the one before it."""
    worker = make_talker_worker(slots=12, depth=2)
    loop = make_talker_loop(worker)  # which admits four
    monkeypatch.setattr(type(worker), "is_idle", False)
    Listener(loop, segment(patches=30))
    run_step(loop)
    assert worker.num_in_flight == 1
    monkeypatch.setattr(worker, "remaining_s", lambda: 1.0)
    listeners = [Listener(loop, segment(seed=seed, patches=3)) for seed in range(10)]
    for _ in range(4):
        assert run_step(loop)
        assert worker.num_segments == 5 and worker.num_in_flight == 1
    monkeypatch.setattr(worker, "remaining_s", lambda: 0.0)
    run_step(loop)
    run_step(loop)
    assert worker.num_segments == 9
    run_until_idle(loop)
    assert [len(each.items) for each in listeners] == [3] * 10


def test_a_segment_that_is_not_due_leaves_the_slot_to_others() -> None:
    clock = Clock()
    loop = make_talker_loop(make_talker_worker(slots=2), speech_lead=3, clock=clock)
    whole = Listener(loop, segment(seed=2, patches=9), is_live=False)
    first = Listener(loop, segment(patches=4), segment(index=1, patches=3))
    for _ in range(20):
        run_step(loop)
        first.take()
    assert len(whole.items) == 9
    assert len(first.items) == 4, "it has joined patches of the other"
    assert loop.scheduler.num_running == 0, (
        "the second segment is not admitted before its patch may be launched"
    )
    assert loop.due_at - clock.now == pytest.approx(PATCH_S)
    run_to_end(loop, clock, [first])
    assert len(first.items) == 7 and loop.num_underruns == 0
    assert clock.now > 2 * PATCH_S, "one clock for all of its segments"


def test_a_listener_that_takes_nothing_is_paused_and_fails_like_one_that_stops_reading() -> None:
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, slow_client_timeout_s=60.0, clock=clock)
    before = loop.held
    stuck = Listener(loop, segment(patches=30), is_stuck=True)
    run_until_idle(loop)
    for clock.now in (0.1, 59.0):
        run_until_idle(loop)
        assert len(stuck.items) == 3
    clock.now = 61.0
    run_until_idle(loop)
    assert stuck.error().status == 408
    assert loop.held == before


def test_a_listener_that_takes_nothing_fails_between_its_segments_too() -> None:
    """Its second segment waits for a slot until the first patch of the first one has left, which it never does."""
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, slow_client_timeout_s=60.0, clock=clock)
    stuck = Listener(loop, segment(patches=3), segment(index=1, patches=3), is_stuck=True)
    ended = Listener(loop, segment(patches=3), is_stuck=True)
    for clock.now in (0.0, 61.0):
        run_until_idle(loop)
    assert stuck.error().status == 408
    assert len(ended.segments()[0]) == 3 * PATCH_SAMPLES, "it waits for nothing"
    assert loop.num_streams == 1


def test_a_stream_that_fails_leaves_its_slot_to_another_in_the_same_step() -> None:
    """Nothing wakes the thread for it."""
    clock = Clock()
    loop = make_talker_loop(
        make_talker_worker(slots=1), speech_lead=3, slow_client_timeout_s=60.0, clock=clock
    )
    stuck = Listener(loop, segment(patches=30), is_stuck=True)
    waiting = Listener(loop, segment(seed=2, patches=2))
    run_until_idle(loop)
    assert not waiting.items
    clock.now = 61.0
    assert run_step(loop) and stuck.error().status == 408
    assert waiting.items


def test_no_more_patches_are_launched_than_a_segment_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = make_talker_loop(make_talker_worker(depth=2))
    sizes = launched(loop, monkeypatch)
    listener = Listener(loop, segment(patches=3), segment(index=1, patches=2))
    run_until_idle(loop)
    assert len(listener.items) == sum(sizes) == 5


def test_a_pause_ends_with_the_last_patch_in_flight() -> None:
    """What is left unread of speech that is complete costs nothing."""
    clock, is_behind = Clock(), [False]
    loop = make_talker_loop(
        make_talker_worker(stop_probability=0.9, depth=2), slow_client_timeout_s=60.0, clock=clock
    )
    client = Collector()
    loop.add(loop.open(client.put, lambda: is_behind[0], is_live=True), segment(patches=40))
    while len(client.items) < 4:  # the next one is the last
        run_step(loop)
    is_behind[0] = True
    run_until_idle(loop)
    clock.now = 61.0
    run_until_idle(loop)
    assert len(client.segments()[0]) == 5 * PATCH_SAMPLES


def test_patches_that_come_late_are_counted() -> None:
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, clock=clock)
    listener = Listener(loop, segment(patches=8))
    run_until_idle(loop)
    listener.take()
    clock.now = 10 * PATCH_S  # something else has kept the talker busy
    assert loop.listeners["late"] == 1
    run_to_end(loop, clock, [listener])
    assert len(listener.items) == 8 and loop.num_underruns == 1


def test_a_cancelled_or_unknown_stream_has_no_clock() -> None:
    loop = make_talker_loop(speech_lead=3, clock=Clock())
    listener = Listener(loop, segment(patches=8))
    loop.cancel(listener.stream)
    run_until_idle(loop)
    loop.begin_playback(listener.stream)
    assert set(loop.listeners.values()) == {0}


def test_a_segment_that_becomes_due_during_a_step_is_not_slept_over() -> None:
    """Between the admission of segments and the choice of patches time passes."""
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, clock=clock)
    listener = Listener(loop, segment(patches=4), segment(index=1, patches=3))
    while loop.scheduler.num_running or not listener.items:
        run_step(loop)
        listener.take()
        clock.now += 0.1 * PATCH_S
    run_until_idle(loop)
    assert loop.scheduler.num_waiting == 1, "its second segment is not due yet"
    before, after = loop.due_at - 1e-6, loop.due_at + 1e-6
    readings = [before]
    loop._clock = lambda: readings.pop() if readings else after
    assert not run_step(loop) and not readings
    assert loop.due_at <= after


def test_speech_is_not_held_any_more_when_pacing_stops() -> None:
    """Neither that of a listener nor that of which nothing has left the server."""
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, clock=clock)
    listeners = [
        Listener(loop, segment(seed=1, patches=30)),
        Listener(loop, segment(patches=30), is_stuck=True),
    ]
    run_until_idle(loop)
    listeners[0].take()
    run_until_idle(loop)
    assert all(len(each.items) < 6 for each in listeners)
    loop.stop_pacing()
    run_until_idle(loop)
    assert [len(each.items) for each in listeners] == [30, 30] and clock.now == 0.0


def test_a_service_that_closes_lets_its_listeners_have_the_rest() -> None:
    """At the speed of its playback it would be cut off: here that stands still."""
    service = make_service(speech_lead=2)
    service.talkers[0]._clock = lambda: 0.0
    text = speech_request("One sentence with several words in it, and then another one. And a third.", seed=4)

    async def listen_and_close() -> list[Event]:
        stream = service.speech(replace(text, is_live=True))
        events = [await anext(stream)]
        closing = asyncio.create_task(service.close(shutdown_timeout_s=10.0))
        events += [event async for event in stream]
        await closing
        return events

    events = run(service, listen_and_close())
    assert isinstance(events[-1], Done) and len(audio_of(events)) > 8 * PATCH_SAMPLES


def audio_of(events: list[Event]) -> np.ndarray:
    return np.concatenate([event.samples for event in events if isinstance(event, AudioDelta)])


@pytest.mark.parametrize("lead", [1, 3])
def test_the_service_starts_the_clock_of_live_speech(lead: int) -> None:
    """On the threads of a service: without the clock a listener gets no more than the lead."""
    text = speech_request("One sentence with several words in it, and then another one. And a third.", seed=4)
    spoken = chat("Hello", text.speech, max_tokens=40)
    requests: list[Callable[[bool], object]] = [
        lambda is_live: service.speech(replace(text, is_live=is_live)),
        lambda is_live: service.chat(replace(spoken, is_live=is_live)),
    ]
    for ask in requests:
        waves = []
        for is_live in (True, False):
            service = make_service(speech_lead=lead)
            waves.append(audio_of(run(service, collect(ask(is_live)))))  # type: ignore[arg-type]
        assert len(waves[0]) > 8 * PATCH_SAMPLES
        np.testing.assert_allclose(waves[0], waves[1], rtol=0, atol=1e-6)


JOBS, LISTENERS = 16, 6


def long_pieces(seed: int, count: int) -> list[SpeechSegment]:
    return [segment(seed=seed, index=index, patches=12) for index in range(count)]


def beside_jobs(
    row_s: float, monkeypatch: pytest.MonkeyPatch, **pace: int
) -> tuple[TalkerLoop, list[Listener], list[Listener], list[list[int]], list[float]]:
    """Listeners that come one after the other while files are made. Returns also all batches since, and the seconds
    to the first audio of each listener."""
    clock = Clock()
    loop = make_talker_loop(make_talker_worker(slots=16), max_jobs=8, speech_lead=3, clock=clock)
    batches = costing(loop, clock, row_s, monkeypatch)
    jobs = [Listener(loop, *long_pieces(seed, 40), is_live=False) for seed in range(JOBS)]
    for _ in range(10):
        run_step(loop)
    batches.clear()
    listeners, waited = list[Listener](), list[float]()
    for seed in range(LISTENERS):
        came_at = clock.now
        listener = Listener(loop, *long_pieces(100 + seed, 4), **pace)
        while not listener.take():
            run_step(loop)
            for other in listeners:
                other.take()
        listeners.append(listener)
        waited.append(clock.now - came_at)
    while not all(len(each.items) == 48 for each in listeners):
        if not run_step(loop):
            clock.now = max(clock.now, loop.due_at)
        for listener in listeners:
            listener.take()
    return loop, listeners, jobs, batches, waited


def test_listeners_are_in_time_beside_any_number_of_files_which_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six listeners alone would keep the device busy for `load` of the time (a batch has 1, 2, 4 or 8 rows)."""
    load = 0.8
    row_s = load * PATCH_S / 8
    loop, _, jobs, batches, waited = beside_jobs(row_s, monkeypatch)
    assert loop.num_underruns == 0
    # At most the patch that runs when the listener comes, and its own beside those of the listeners that are urgent.
    assert max(waited) <= 16 * row_s
    rows = [stream for batch in batches for stream in batch]
    progress = [rows.count(job.stream) for job in jobs]
    assert sum(progress) >= (1 - load) * len(batches)
    assert len([count for count in progress if count]) >= 8, "all that have a slot"
    run_until_idle(loop)
    assert [len(job.items) for job in jobs] == [480] * JOBS


def test_batches_are_full_while_no_listener_would_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _, _, batches, _ = beside_jobs(0.01 * PATCH_S, monkeypatch)
    assert loop.num_underruns == 0
    full = sum(len(batch) == 8 for batch in batches)
    assert full >= 0.9 * len(batches)


def test_a_talker_too_slow_for_its_listeners_still_makes_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingc.runtime.talker.pacing._PATIENCE_S", 20 * PATCH_S)
    loop, _, jobs, batches, _ = beside_jobs(0.3 * PATCH_S, monkeypatch)
    assert loop.num_underruns > 0
    rows = [stream for batch in batches for stream in batch]
    assert sum(rows.count(job.stream) > 1 for job in jobs) >= 8


def test_a_request_chooses_its_own_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    loop = make_talker_loop(speech_lead=3, clock=clock)
    listeners = [
        Listener(loop, segment(seed=1, patches=30), **pace) for pace in ({}, {"lead": 5}, {"lead": 0})
    ]
    run_until_idle(loop)
    for listener in listeners:
        listener.take()
    run_until_idle(loop)
    assert [len(each.items) for each in listeners] == [3, 5, 30]


def test_a_lower_priority_goes_first_also_before_listeners(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    loop = make_talker_loop(make_talker_worker(slots=1), speech_lead=3, clock=clock)
    first = Listener(loop, segment(seed=0, patches=3), is_live=False)
    run_step(loop)
    ended: list[int] = []
    others = [
        Listener(loop, segment(seed=seed, patches=2), is_live=is_live, priority=priority)
        for seed, (priority, is_live) in enumerate([(1, True), (0, False), (0, True), (-1, False)])
    ]
    while len(ended) < len(others):
        run_step(loop)
        for number, each in enumerate(others):
            if each.take() == 2 and number not in ended:
                ended.append(number)
    assert ended == [3, 2, 1, 0] and len(first.items) == 3
