"""Talker worker and loop over fake engines: speech depends on its own segment only."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from collector import Collector
from fake_talker import PATCH_SAMPLES, SLOT_TOKENS, TAIL, TALKER, make_talker_loop, make_talker_worker
from fake_talker import make_segment as segment
from hand_run import run_step, run_until_idle
from held_resources import wait_until_equal
from server_thread import eventually

from mingc.errors import EngineSizeError, RequestError, WorkerError
from mingc.runtime.request import AudioDelta
from mingc.runtime.request_stream import FailedItem
from mingc.runtime.service.image_builder import others_have_work
from mingc.runtime.talker import worker as worker_module
from mingc.runtime.talker.engines import LaunchedPatch
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker


def run_alone(one: SpeechSegment, *, slot: int = 1, worker: TalkerWorker | None = None) -> np.ndarray:
    worker = worker or make_talker_worker()
    worker.add(slot, one)
    parts = []
    while True:
        worker.launch([slot])
        (patch,) = worker.collect().values()
        parts.append(patch.samples)
        if patch.is_segment_end:
            worker.remove(slot)
            return np.concatenate(parts)


def test_samples_of_a_segment_are_patches_times_their_length() -> None:
    wave = run_alone(segment(patches=6))
    assert len(wave) == 6 * PATCH_SAMPLES
    assert np.isfinite(wave).all()
    assert len(run_alone(segment(patches=1))) == PATCH_SAMPLES


def test_audio_is_the_same_in_any_slot_and_after_other_uses_of_it() -> None:
    expected = run_alone(segment(seed=3))
    worker = make_talker_worker()
    for slot in (1, 8, 1, 4):
        assert np.array_equal(run_alone(segment(seed=3), slot=slot, worker=worker), expected)
        run_alone(segment(seed=slot, tokens=30), slot=slot, worker=worker)


def test_a_prefix_of_a_voice_is_reused_without_a_trace() -> None:
    worker = make_talker_worker()
    first = run_alone(segment(seed=1), worker=worker)
    assert worker.num_prefixes == 1
    assert np.array_equal(run_alone(segment(seed=1), slot=5, worker=worker), first)
    assert np.array_equal(run_alone(segment(seed=1, prefix=0), slot=2, worker=worker), first)
    run_alone(segment(seed=1, tokens=30), worker=worker)
    assert worker.num_prefixes == 2


def test_only_the_prefixes_used_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "_MAX_PREFIXES", 2)
    worker = make_talker_worker()
    read, computed = worker.engines.read_rows, []

    def record(slot: int, count: int) -> torch.Tensor:
        computed.append(tokens)
        return read(slot, count)

    monkeypatch.setattr(worker.engines, "read_rows", record)
    expected = {tokens: run_alone(segment(tokens=tokens)) for tokens in (21, 22, 23)}
    for tokens in (21, 22, 21, 23, 21, 22, 23):
        assert np.array_equal(run_alone(segment(tokens=tokens), worker=worker), expected[tokens])
        assert worker.num_prefixes <= 2
    assert computed == [21, 22, 23, 22, 23]


def test_segments_are_added_and_removed_without_changing_others() -> None:
    pieces = [
        segment(seed=i, tokens=14 + i, patches=2 + 3 * (i % 3), temperature=0.5 * (i % 2)) for i in range(6)
    ]
    alone = [run_alone(piece) for piece in pieces]
    worker = make_talker_worker()
    waves: list[list[np.ndarray]] = [[] for _ in pieces]
    going: list[int] = []
    coming = list(range(len(pieces)))
    while going or coming:
        for _ in range(2):  # two join at each boundary
            if coming:
                worker.add(coming[0] + 1, pieces[coming[0]])
                going.append(coming.pop(0))
        slots = [each + 1 for each in reversed(going)]
        worker.launch(slots)
        for slot, patch in worker.collect().items():
            waves[slot - 1].append(patch.samples)
            if patch.is_segment_end:
                worker.remove(slot)
                going.remove(slot - 1)
    for mine, expected in zip(waves, alone, strict=True):
        np.testing.assert_allclose(np.concatenate(mine), expected, rtol=0, atol=1e-6)


def test_segments_that_join_together_are_prefilled_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many in a call as the engine takes, and never two parts of one prompt."""
    pieces = [segment(seed=i, tokens=tokens, patches=2) for i, tokens in enumerate((9, 11, 10, 40, 8))]
    worker = make_talker_worker()
    run, calls = worker.engines.run_prompts, list[list[int]]()

    def record(size: int, inputs: Mapping[str, torch.Tensor]) -> None:
        calls.append([slot for slot in inputs["slots"].tolist() if slot])
        run(size, inputs)

    for slot, piece in enumerate(pieces, 1):
        worker.add(slot, replace(piece, num_prefix=0))
    monkeypatch.setattr(worker.engines, "run_prompts", record)
    worker.remove(5)
    worker.prefill()
    worker.launch([1, 2, 3, 4])
    assert calls == [[1, 2], [3], [4], [4]]
    for slot, patch in worker.collect().items():
        expected = run_alone(replace(pieces[slot - 1], num_prefix=0))[: len(patch.samples)]
        np.testing.assert_allclose(patch.samples, expected, rtol=0, atol=1e-6)


def test_the_stop_head_is_ignored_before_the_minimum_step_and_its_patch_is_kept() -> None:
    worker = make_talker_worker(stop_probability=0.9)
    worker.add(1, segment(patches=40))
    flags = []
    for _ in range(TALKER.min_stop_step + 2):
        worker.launch([1])
        (patch,) = worker.collect().values()
        flags.append((patch.is_segment_end, patch.is_capped))
    assert flags == [(False, False)] * (TALKER.min_stop_step + 1) + [(True, False)]


@pytest.mark.parametrize(
    ("threshold", "is_capped"), [(0.3, False), (0.59, False), (0.61, True), (0.95, True)]
)
def test_the_threshold_of_the_artifact_decides_where_speech_stops(threshold: float, is_capped: bool) -> None:
    worker = make_talker_worker(stop_probability=0.6)
    worker.parameters = replace(worker.parameters, stop_threshold=threshold)
    worker.add(1, segment(patches=9))
    patches = []
    while worker.is_launchable(1):
        worker.launch([1])
        patches += worker.collect().values()
    assert (patches[-1].is_capped, len(patches)) == (is_capped, 9 if is_capped else TALKER.min_stop_step + 2)


def test_a_cap_marks_its_patch_as_last() -> None:
    worker = make_talker_worker()
    worker.add(1, segment(patches=2))
    worker.launch([1])
    (first,) = worker.collect().values()
    worker.launch([1])
    (second,) = worker.collect().values()
    assert not worker.is_launchable(1)
    assert (first.is_segment_end, second.is_segment_end, second.is_capped) == (False, True, True)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("tokens", [SLOT_TOKENS - 1, SLOT_TOKENS - 6])
def test_a_segment_may_fill_its_slot_to_the_last_row(depth: int, tokens: int) -> None:
    """The patch at the cap needs no row of its own: its embedding is never fed back."""
    worker = make_talker_worker(depth=depth)
    worker.add(2, segment(tokens=tokens, patches=SLOT_TOKENS - tokens))
    patches: list[AudioDelta] = []
    while not patches or not patches[-1].is_segment_end:
        while worker.num_in_flight < depth and worker.is_launchable(2):
            worker.launch([2])
        patches += worker.collect().values()
    assert len(patches) == SLOT_TOKENS - tokens and patches[-1].is_capped
    assert not worker.num_in_flight and not worker.is_launchable(2)


@pytest.mark.parametrize("patches", [1, 2, 3])
def test_no_step_of_the_speech_llm_follows_the_last_patch(
    patches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_talker_worker()
    launch, steps = worker.engines.launch, []

    def record(size: int, inputs: Mapping[str, torch.Tensor]) -> LaunchedPatch:
        steps.append((int(inputs["step_slots"][0]), int(inputs["lengths"][0])))
        return launch(size, inputs)

    monkeypatch.setattr(worker.engines, "launch", record)
    run_alone(segment(tokens=21, patches=patches), slot=3, worker=worker)
    assert steps == [*((3, 21 + index) for index in range(patches - 1)), (0, 0)]


def test_noise_depends_on_seed_segment_and_patch() -> None:
    assert np.array_equal(run_alone(segment(seed=1)), run_alone(segment(seed=1)))
    for other in (segment(seed=2), segment(seed=1, index=1), segment(seed=1, temperature=1.0)):
        assert not np.allclose(run_alone(other), run_alone(segment(seed=1)))


def speak(
    loop: TalkerLoop, *pieces: SpeechSegment, is_behind: Callable[[], bool] = lambda: False
) -> Collector:
    collector = Collector()
    stream = loop.open(collector.put, is_behind)
    collector.stream = stream  # type: ignore[attr-defined]
    for piece in pieces:
        loop.add(stream, piece)
    return collector


def test_calls_run_between_patches_on_the_thread(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    """Speech goes on around them, an error stays with its caller, and what waits when the thread ends fails."""
    loop = started(make_talker_loop(make_talker_worker(slots=3)))
    speech = speak(loop, segment(patches=3))
    names = [loop.call(lambda: threading.current_thread().name) for _ in range(3)]
    assert {each.result(20) for each in names} == {"mingc-talker"}
    failed = loop.call(lambda: 1 // 0)
    assert isinstance(failed.exception(20), ZeroDivisionError) and loop.is_healthy
    np.testing.assert_allclose(speech.segments(1)[0], run_alone(segment(patches=3)), rtol=0, atol=1e-6)
    begun, goes_on = threading.Event(), threading.Event()
    first = loop.call(lambda: (begun.set(), goes_on.wait(20)))
    assert begun.wait(20)
    second = loop.call(lambda: None)
    loop.stop(timeout_s=0)
    goes_on.set()
    assert first.result(20) == (None, True)
    assert isinstance(second.exception(20), WorkerError)
    assert loop.held["talker calls"] == 0
    with pytest.raises(WorkerError, match="stopping"):
        loop.call(lambda: None)


def test_streams_speak_their_segments_in_order(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    loop = started(make_talker_loop(make_talker_worker(slots=3)))
    streams = [
        [segment(seed=i, index=j, tokens=12 + i + j, patches=3 + j) for j in range(3)] for i in range(5)
    ]
    collectors = [speak(loop, *pieces) for pieces in streams]
    for collector, pieces in zip(collectors, streams, strict=True):
        for wave, piece in zip(collector.segments(3), pieces, strict=True):
            np.testing.assert_allclose(wave, run_alone(piece), rtol=0, atol=1e-6)


def test_segments_of_one_request_are_never_spoken_at_once(
    started: Callable[[TalkerLoop], TalkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With free slots for all of them; further segments arrive while the first is spoken."""
    worker = make_talker_worker(slots=6)
    launch, seen = worker.launch, []

    def record(slots: Sequence[int]) -> None:
        seen.append([worker._running[slot].segment.index for slot in slots])
        launch(slots)

    monkeypatch.setattr(worker, "launch", record)
    loop = started(make_talker_loop(worker))
    collector = speak(loop, segment(index=0, patches=20))
    for index in (1, 2, 3):
        collector.wait(lambda items, wanted=index: len(items) >= wanted, "patches")
        loop.add(collector.stream, segment(index=index, patches=4))  # type: ignore[attr-defined]
    collector.segments(4)
    assert seen == [[0]] * 20 + [[1]] * 4 + [[2]] * 4 + [[3]] * 4


@pytest.mark.parametrize("stop_probability", [0.0, 0.9])
def test_launching_patches_ahead_changes_no_audio(
    started: Callable[[TalkerLoop], TalkerLoop], stop_probability: float
) -> None:
    # Few slots, so that a surplus patch is in flight while its slot already belongs to the next segment.
    streams = [[segment(seed=i, index=j, tokens=12 + i, patches=9 - j) for j in range(3)] for i in range(5)]
    waves = []
    for depth in (1, 2, 3):
        worker = make_talker_worker(slots=2, stop_probability=stop_probability, depth=depth)
        loop = started(make_talker_loop(worker))
        collectors = [speak(loop, *pieces) for pieces in streams]
        waves.append([wave for collector in collectors for wave in collector.segments(3)])
    lengths = {len(wave) for wave in waves[0]}
    ended_by_stop = (TALKER.min_stop_step + 2) * PATCH_SAMPLES
    assert lengths == ({ended_by_stop} if stop_probability else {each * PATCH_SAMPLES for each in (7, 8, 9)})
    for others in waves[1:]:
        for mine, expected in zip(others, waves[0], strict=True):
            np.testing.assert_allclose(mine, expected, rtol=0, atol=1e-6)


def test_a_failed_launch_fails_requests_in_flight_and_no_others(
    started: Callable[[TalkerLoop], TalkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_talker_worker(slots=2, depth=2)
    loop = started(make_talker_loop(worker))
    launch, num_rows, failures = worker.engines.launch, [0], []

    def fail_once(size: int, inputs: Mapping[str, torch.Tensor]) -> LaunchedPatch:
        if not failures and worker.num_in_flight and num_rows[-1] == 2:
            failures.append(size)
            raise RuntimeError("device lost")
        num_rows.append(int((inputs["slots"] > 0).sum()))
        return launch(size, inputs)

    monkeypatch.setattr(worker.engines, "launch", fail_once)
    hurt = [speak(loop, segment(seed=i, patches=40)) for i in range(2)]
    waiting = speak(loop, segment(seed=2, patches=5))
    for collector in hurt:
        assert "device lost" in collector.error().message
    np.testing.assert_allclose(
        waiting.segments()[0], run_alone(segment(seed=2, patches=5)), rtol=0, atol=1e-6
    )


def test_cancelled_speech_frees_its_slot(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    loop = started(make_talker_loop(make_talker_worker(slots=1)))
    before = loop.held
    first = speak(loop, segment(patches=40), segment(index=1, patches=40))
    first.wait(lambda items: len(items) > 1, "patches")
    second = speak(loop, segment(seed=2, patches=2))
    loop.cancel(first.stream)  # type: ignore[attr-defined]
    assert len(second.segments()[0]) == 2 * PATCH_SAMPLES
    loop.cancel(second.stream)  # type: ignore[attr-defined]
    wait_until_equal(before, lambda: loop.held)


def test_a_slow_reader_is_paused_and_others_go_on(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    loop = started(make_talker_loop())
    reads = threading.Event()
    slow = Collector()
    stream = loop.open(slow.put, lambda: len(slow.items) >= 2 and not reads.is_set())
    loop.add(stream, segment(patches=8))
    fast = speak(loop, segment(seed=2, patches=12))
    fast.segments()
    assert len(slow.items) == 2
    reads.set()
    loop.wake()
    np.testing.assert_allclose(slow.segments()[0], run_alone(segment(patches=8)), rtol=0, atol=1e-6)


def test_a_reader_that_never_reads_loses_its_slot(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    loop = started(make_talker_loop(slow_client_timeout_s=0.0))
    stuck = speak(loop, segment(), is_behind=lambda: True)
    assert stuck.error().status == 408


def test_samples_that_are_not_finite_fail_their_request_only(
    started: Callable[[TalkerLoop], TalkerLoop],
) -> None:
    loop = started(make_talker_loop(make_talker_worker(nan_guidance=9.0)))
    good, sick = speak(loop, segment(patches=9)), speak(loop, segment(seed=2, guidance=9.0))
    assert "not finite" in sick.error().message
    np.testing.assert_allclose(good.segments()[0], run_alone(segment(patches=9)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("place", [TAIL, PATCH_SAMPLES - 1, PATCH_SAMPLES + TAIL - 1])
def test_one_sample_that_is_not_finite_is_enough(
    value: float, place: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the borders of what the first patch of a segment, which is its last one here, hands out."""
    worker = make_talker_worker()
    decode = worker.engines.decode

    def sick(*inputs: torch.Tensor) -> torch.Tensor:
        samples = decode(*inputs)
        samples[0, place] = value
        return samples

    monkeypatch.setattr(worker.engines, "decode", sick)
    loop, listener = make_talker_loop(worker), Collector()
    loop.add(loop.open(listener.put, lambda: False), segment(patches=1))
    run_until_idle(loop)
    assert "not finite" in listener.error().message and len(listener.items) == 1


def test_a_segment_that_arrives_during_a_patch_starts_with_the_next_one(
    started: Callable[[TalkerLoop], TalkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_talker_worker(depth=2)
    launch, ended = worker.engines.launch, 0.0
    sizes: list[int] = []

    class Slow:
        """A device that takes 0.5 s for a patch."""

        def __init__(self, patch: LaunchedPatch) -> None:
            nonlocal ended
            ended = max(ended, time.perf_counter()) + 0.5
            self._patch, self._end = patch, ended

        @property
        def is_ready(self) -> bool:
            return time.perf_counter() >= self._end

        def wait(self) -> tuple[np.ndarray, ...]:
            time.sleep(max(0.0, self._end - time.perf_counter()))
            return self._patch.wait()

    def slow(size: int, inputs: Mapping[str, torch.Tensor]) -> Slow:
        sizes.append(int((inputs["slots"] > 0).sum()))
        return Slow(launch(size, inputs))

    monkeypatch.setattr(worker.engines, "launch", slow)
    loop = started(make_talker_loop(worker))
    first = speak(loop, segment(patches=5))
    first.wait(lambda items: len(items) == 2, "patches")
    assert sizes == [1, 1, 1]  # the first two before anything was known, the third shortly before they ended
    second = speak(loop, segment(seed=2, patches=2))
    for collector, seed, patches in ((first, 1, 5), (second, 2, 2)):
        expected = run_alone(segment(seed=seed, patches=patches))
        np.testing.assert_allclose(collector.segments()[0], expected, rtol=0, atol=1e-6)
    assert sizes == [1, 1, 1, 2, 2]


def test_one_very_slow_patch_does_not_delay_later_launches(
    started: Callable[[TalkerLoop], TalkerLoop],
) -> None:
    worker = make_talker_worker(depth=2)
    now = time.perf_counter()
    worker._latency_model.observe(1, launched=now - 3600.0, ended=now)
    collector = speak(started(make_talker_loop(worker)), segment(patches=5))
    np.testing.assert_allclose(collector.segments()[0], run_alone(segment(patches=5)), rtol=0, atol=1e-6)
    assert worker._latency_model.remaining_s([(1, now)], now) < 60.0  # and it is soon forgotten


class Clock:
    """A clock that a test sets."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_cancelling_with_patches_in_flight_frees_everything_and_reaches_no_other_stream(depth: int) -> None:
    worker = make_talker_worker(slots=1, depth=depth)
    loop = make_talker_loop(worker)
    before = loop.held
    cancelled = speak(loop, segment(patches=40), segment(index=1, patches=40))
    for _ in range(4):
        run_step(loop)
    assert worker.num_in_flight == depth - 1 and cancelled.items and loop.has_work == (depth > 1)
    items = list(cancelled.items)
    loop.cancel(cancelled.stream)  # type: ignore[attr-defined]
    following = speak(loop, segment(seed=2, patches=3))
    run_until_idle(loop)
    assert cancelled.items == items, "a cancelled stream received a patch"
    assert np.array_equal(following.segments()[0], run_alone(segment(seed=2, patches=3)))
    loop.cancel(following.stream)  # type: ignore[attr-defined]
    run_until_idle(loop)
    assert loop.held == before and not loop.has_work


def test_pictures_do_not_give_way_to_a_talker_that_failed_with_patches_in_flight() -> None:
    loop = make_talker_loop(make_talker_worker(slots=1, depth=2))
    gives_way = others_have_work([loop.worker.device], None, [loop])
    speaking = speak(loop, segment(patches=40))
    while not loop.has_work:
        run_step(loop)
    loop.fail(WorkerError("the device is lost"))
    loop.start()
    try:
        eventually(lambda: any(isinstance(each, FailedItem) for each in speaking.items))
        assert not gives_way()
    finally:
        loop.stop()


def test_cancelling_a_waiting_stream_frees_everything_at_once() -> None:
    loop = make_talker_loop(make_talker_worker(slots=1))
    before = loop.held
    speaking, waiting = (
        speak(loop, segment(patches=40)),
        speak(loop, segment(seed=2), segment(seed=2, index=1)),
    )
    run_step(loop)
    for stream in (waiting, speaking):
        loop.cancel(stream.stream)  # type: ignore[attr-defined]
    assert not run_step(loop)
    assert loop.held == before and not waiting.items


def test_a_stream_that_fails_or_ends_frees_everything() -> None:
    loop = make_talker_loop(make_talker_worker(slots=2, nan_guidance=9.0))
    before = loop.held
    sick, good = speak(loop, segment(guidance=9.0), segment(index=1)), speak(loop, segment(seed=2))
    run_until_idle(loop)
    assert "not finite" in sick.error().message
    (spoken,) = good.segments()  # the patch that it shared with the other one as well
    np.testing.assert_allclose(spoken, run_alone(segment(seed=2)), rtol=0, atol=1e-6)
    loop.cancel(good.stream)  # type: ignore[attr-defined]
    run_until_idle(loop)
    assert loop.held == before


def test_samples_that_are_not_finite_are_found_in_any_row() -> None:
    worker = make_talker_worker(nan_guidance=9.0)
    for slot, guidance in ((1, 2.0), (2, 9.0), (3, 2.0)):
        worker.add(slot, segment(seed=slot, guidance=guidance))
    for _ in range(2):  # the first samples of all are discarded, and may be anything
        worker.launch([1, 2, 3])
        assert [slot for slot, patch in worker.collect().items() if patch is None] == [2]


def test_prompt_of_a_removed_segment_is_not_prefilled(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = make_talker_worker()
    worker.add(1, segment(prefix=0))
    worker.remove(1)
    monkeypatch.setattr(worker.engines, "run_prompts", lambda *_: pytest.fail("a prompt was run"))
    worker.prefill()


def test_every_pause_of_a_slow_client_counts_anew() -> None:
    clock = Clock()
    loop = make_talker_loop(slow_client_timeout_s=60.0, clock=clock)
    before = loop.held
    unread = [0]  # patches that the client may still leave unread
    client = speak(loop, segment(patches=40), is_behind=lambda: unread[0] == 0)

    def pause(seconds: float) -> None:
        unread[0] = 0
        run_step(loop)
        for _ in range(4):
            clock.now += seconds / 4
            run_step(loop)

    for _ in range(3):  # three pauses of 50 s, each with a patch read between them
        pause(50.0)
        count = len(client.items)
        unread[0] = 1
        run_step(loop)
        assert len(client.items) == count + 1, "the talker does not resume"
    pause(60.0)
    assert len(client.items) == 3
    pause(0.1)
    assert client.error().status == 408
    assert loop.held == before


def test_a_pause_at_second_zero_is_one_like_others() -> None:
    clock = Clock()
    loop = make_talker_loop(slow_client_timeout_s=60.0, clock=clock)
    client = speak(loop, segment(), is_behind=lambda: True)
    for clock.now in (0.0, 59.0, 61.0):
        run_step(loop)
    assert client.error().status == 408


def test_a_patch_in_flight_of_an_ended_segment_is_discarded() -> None:
    worker = make_talker_worker(stop_probability=0.9, depth=2)
    worker.add(1, segment(patches=40))
    worker.launch([1])
    is_last = []
    while not any(is_last):
        worker.launch([1])
        is_last.append(worker.collect()[1].is_segment_end)
    assert not worker.is_launchable(1) and worker.num_in_flight == 1
    assert worker.collect() == {}


def test_a_failure_of_the_device_hurts_only_segments_with_a_patch_in_flight() -> None:
    worker = make_talker_worker(depth=2)
    for slot in (1, 2):
        worker.add(slot, segment(seed=slot))
    worker.launch([1, 2])
    worker.remove(1)
    worker.add(1, segment(seed=3))  # nothing of it is in flight
    assert worker.drop() == {2}
    assert worker.num_in_flight == 0


@pytest.mark.parametrize("call", ["launch", "run_prompts"])
@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (RuntimeError("device lost"), 500, "the talker failed: device lost"),
        (RequestError("too long", param="input"), 400, "too long"),
        (EngineSizeError("no engine of that size"), 500, "no engine of that size"),
    ],
)
def test_the_error_of_an_engine_reaches_the_streams_that_it_hurts(
    call: str, error: Exception, status: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call of all: nothing else is in flight."""
    worker = make_talker_worker()
    loop = make_talker_loop(worker)
    before = loop.held
    real = getattr(worker.engines, call)

    def fail(*words: object) -> None:
        raise error

    monkeypatch.setattr(worker.engines, call, fail)
    hurt = speak(loop, segment(patches=3))
    run_until_idle(loop)
    found = hurt.error()
    assert (found.status, found.message) == (status, message)
    monkeypatch.setattr(worker.engines, call, real)
    later = speak(loop, segment(seed=2, patches=3))
    run_until_idle(loop)
    np.testing.assert_allclose(later.segments()[0], run_alone(segment(seed=2, patches=3)), rtol=0, atol=1e-6)
    loop.cancel(later.stream)  # type: ignore[attr-defined]
    run_until_idle(loop)
    assert loop.held == before


def test_surplus_patches_of_an_ended_segment_do_not_count_as_being_played() -> None:
    """With two patches in flight the second one of the last patch is discarded."""
    loop = make_talker_loop(make_talker_worker(stop_probability=0.9, depth=2), speech_lead=3)
    listener = Collector()
    stream = loop.open(listener.put, lambda: False, is_live=True)
    for index in range(3):
        loop.add(stream, segment(index=index, patches=40))
    for _ in range(200):
        run_step(loop)
        loop.begin_playback(stream)
    assert len(listener.segments(3)) == 3
    assert loop._pacing._streams[stream].in_flight == 0
    loop.cancel(stream)
    run_until_idle(loop)
