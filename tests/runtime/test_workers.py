"""Workers and their threads over fake engines: a request's result is its own, alone or among others."""

from __future__ import annotations

import itertools
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import numpy as np
import pytest
import torch
from fake_engines import (
    FLOW,
    HIDDEN,
    HISTORY,
    LATENT_DIM,
    PAGE,
    PATCH_SAMPLES,
    TALKER,
    make_talker_loop,
    make_talker_worker,
    make_thinker_loop,
    make_thinker_stage,
    make_thinker_worker,
)

from mingc.errors import CapacityError, RequestError, ServeError
from mingc.runtime.channel import FailedItem, Item, PatchItem, TokenItem
from mingc.runtime.request import SamplingParams
from mingc.runtime.step_wire import Step, receive_step, send_step
from mingc.runtime.talker import SpeechSegment, TalkerWorker
from mingc.runtime.talker_engines import LaunchedPatch
from mingc.runtime.talker_loop import TalkerLoop
from mingc.runtime.thinker import DecodeStep, LaunchedTokens, PrefillStep
from mingc.runtime.thinker_loop import ThinkerLoop, ThinkerPrompt

FAILING_ID, NAN_ID = 501, 502


class Collector:
    """Receives the items of one request."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()

    def wait(self, is_done: Callable[[Sequence[Item]], bool], what: str = "the end") -> list[Item]:
        with self._changed:
            assert self._changed.wait_for(lambda: is_done(self.items), 30), f"no {what}: {self.items[-3:]}"
            return list(self.items)

    def tokens(self) -> list[int]:
        items = self.wait(
            lambda items: any(isinstance(i, FailedItem) or getattr(i, "finish", None) for i in items)
        )
        return [item.token for item in items if isinstance(item, TokenItem) and item.token is not None]

    def error(self) -> ServeError:
        items = self.wait(lambda items: any(isinstance(item, FailedItem) for item in items), "error")
        return next(item.error for item in items if isinstance(item, FailedItem))

    def segments(self, count: int = 1) -> list[np.ndarray]:
        """Samples of each of `count` segments."""
        items = self.wait(
            lambda items: (
                any(isinstance(i, FailedItem) for i in items)
                or sum(isinstance(i, PatchItem) and i.is_segment_end for i in items) == count
            )
        )
        done: list[np.ndarray] = []
        parts: list[np.ndarray] = []
        for item in items:
            assert isinstance(item, PatchItem), item
            parts.append(item.samples)
            if item.is_segment_end:
                done.append(np.concatenate(parts))
                parts = []
        return done


def prompt(ids: Sequence[int], *, media: Sequence[int] = (), rope_delta: int = 0) -> ThinkerPrompt:
    """A prompt whose rows `media` hold embeddings."""
    rows = np.array(media, dtype=np.int64)
    kind = np.zeros(len(ids), np.int64)
    kind[rows] = 1 + rows % 2
    generator = torch.Generator().manual_seed(len(ids))
    return ThinkerPrompt(
        input_ids=np.array(ids, dtype=np.int64),
        positions=np.stack([np.arange(len(ids))] * 3) - np.array([[0], [1], [2]]),
        rope_delta=rope_delta,
        embed_kind=kind,
        media_rows=rows,
        media_embeds=torch.randn(len(rows), HIDDEN, generator=generator) if len(rows) else None,
    )


def segment(
    seed: int = 1,
    index: int = 0,
    *,
    tokens: int = 21,
    patches: int = 6,
    prefix: int = 9,
    guidance: float = 2.0,
    temperature: float = 0.0,
) -> SpeechSegment:
    generator = np.random.default_rng(tokens)
    return SpeechSegment(
        input_ids=generator.integers(0, 500, tokens),
        embed_rows=np.array([3, tokens - 2, tokens - 1]),
        embeds=generator.standard_normal((3, HIDDEN)).astype(np.float32),
        num_prefix=prefix,
        history=generator.standard_normal((HISTORY, LATENT_DIM)).astype(np.float32),
        seed=seed,
        index=index,
        max_patches=patches,
        guidance=guidance,
        sigma=FLOW.sigma,
        temperature=temperature,
    )


@pytest.fixture
def started() -> object:
    """Starts loops and stops them after the test."""
    loops: list[ThinkerLoop | TalkerLoop] = []

    def start(loop: ThinkerLoop | TalkerLoop) -> ThinkerLoop | TalkerLoop:
        loops.append(loop)
        loop.start()
        return loop

    yield start
    for loop in loops:
        loop.stop()
        loop.scheduler.check()


def ask(loop: ThinkerLoop, request: ThinkerPrompt, *, seed: int = 5, **params: float) -> Collector:
    collector = Collector()
    sampling = SamplingParams(**{"max_tokens": 9, **params})  # type: ignore[arg-type]
    collector.job = loop.submit(request, sampling, seed, collector.put)  # type: ignore[attr-defined]
    return collector


PROMPTS = [
    prompt([3, 1, 4, 1, 5]),
    prompt(list(range(40, 110)), media=[10, 11, 12, 50], rope_delta=-3),
    prompt([9] * 33),
    prompt([2, 7, 1, 8, 2, 8], media=[1, 2]),
    prompt([100]),
]


MakeLoop = Callable[..., ThinkerLoop]


@pytest.fixture(params=[False, True], ids=["host samples", "device samples"])
def make_loop(request: pytest.FixtureRequest) -> MakeLoop:
    """Where the device samples, the next step is launched before the tokens of the one before are known."""
    return partial(make_thinker_loop, is_static=request.param)


def test_chunked_prefill_equals_one_chunk(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    whole = [ask(started(make_loop(chunk=32)), each).tokens() for each in PROMPTS]
    for chunk in (3, 8):
        loop = started(make_loop(chunk=chunk))
        assert [ask(loop, each).tokens() for each in PROMPTS] == whole
    assert len({tuple(tokens) for tokens in whole}) == len(PROMPTS)


def test_a_batch_gives_what_each_gets_alone(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    settings = [
        {"temperature": 0.3 * (i % 3), "seed": i, "max_tokens": 5 + 2 * i} for i in range(len(PROMPTS))
    ]
    settings[3]["repetition_penalty"] = 1.3
    alone = [
        ask(started(make_loop(chunk=8)), each, **chosen).tokens()
        for each, chosen in zip(PROMPTS, settings, strict=True)
    ]
    loop = started(make_loop(chunk=8, max_running=3))
    together = [ask(loop, each, **chosen) for each, chosen in zip(PROMPTS, settings, strict=True)]
    assert [each.tokens() for each in together] == alone
    assert [len(tokens) for tokens in alone] == [5, 7, 9, 11, 13]


def test_a_stop_token_ends_and_is_not_shown(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    free = ask(started(make_loop()), PROMPTS[0], max_tokens=20).tokens()
    stop = free[4]
    collector = ask(started(make_loop(stop_ids=[stop])), PROMPTS[0], max_tokens=20)
    assert collector.tokens() == free[: free.index(stop)]
    assert collector.items[-1] == TokenItem(token=None, finish="stop")


def test_cancelling_frees_all_pages(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    loop = started(make_loop(max_running=2))
    jobs = [ask(loop, each, max_tokens=150) for each in (PROMPTS[0], PROMPTS[2], PROMPTS[4])]
    jobs[0].wait(lambda items: len(items) > 2, "tokens")
    for job in jobs:
        loop.cancel(job.job)  # type: ignore[attr-defined]
    last = ask(loop, PROMPTS[0], max_tokens=200)
    assert len(last.tokens()) == 200
    assert loop.scheduler.num_running <= 1


def test_a_failing_request_leaves_the_others_alone(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    expected = ask(started(make_loop()), PROMPTS[0]).tokens()
    loop = started(make_loop(make_thinker_stage(fail_on=FAILING_ID, nan_on=NAN_ID)))
    good = ask(loop, PROMPTS[0])
    broken, sick = ask(loop, prompt([1, FAILING_ID])), ask(loop, prompt([1, NAN_ID]))
    assert "engine failure" in broken.error().message
    assert "not finite" in sick.error().message
    assert good.tokens() == expected
    assert ask(loop, PROMPTS[0]).tokens() == expected


def test_the_queue_is_bounded(started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop) -> None:
    loop = make_loop(max_running=1, max_waiting=2)  # not started: nothing leaves the queue
    ask(loop, PROMPTS[0])
    ask(loop, PROMPTS[0])
    with pytest.raises(CapacityError):
        ask(loop, PROMPTS[0])
    with pytest.raises(RequestError, match="context"):
        ask(loop, prompt([1] * 600))


def test_a_failed_loop_tells_everybody_and_takes_nobody(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    loop = started(make_loop())
    running = ask(loop, PROMPTS[0], max_tokens=200)
    loop.fail(ServeError("gone"))
    assert running.error().message == "gone"
    assert not loop.is_healthy
    with pytest.raises(ServeError, match="gone"):
        ask(loop, PROMPTS[0])


def test_a_stopped_loop_tells_its_requests(make_loop: MakeLoop) -> None:
    loop = make_loop()
    waiting = ask(loop, PROMPTS[0], max_tokens=200)
    loop.start()
    loop.stop()
    assert waiting.items and (isinstance(waiting.items[-1], FailedItem) or len(waiting.items) == 200)


def test_launching_ahead_changes_no_answer(started: Callable[[ThinkerLoop], ThinkerLoop]) -> None:
    """Mixed rules, stop tokens met while the next step runs, requests that join and leave."""
    rules: list[dict[str, float]] = [
        {},
        {"temperature": 0.9, "top_k": 20},
        {"temperature": 1.2, "top_p": 0.8, "repetition_penalty": 1.5},
        {"temperature": 0.7, "min_p": 0.1},
        {"repetition_penalty": 2.0},
    ]
    stop_ids = ask(started(make_thinker_loop()), PROMPTS[0], max_tokens=20).tokens()[5:6]
    answers = []
    for is_static in (False, True):
        loop = started(make_thinker_loop(chunk=8, max_running=3, stop_ids=stop_ids, is_static=is_static))
        asked = [
            ask(loop, each, seed=seed, max_tokens=30, **rule)
            for seed, (each, rule) in enumerate(zip(PROMPTS * 2, rules * 2, strict=True))
        ]
        answers.append([(each.tokens(), each.items[-1]) for each in asked])
    assert answers[0] == answers[1]


def test_a_failed_launch_tells_its_requests_and_the_next_ones_run(
    started: Callable[[ThinkerLoop], ThinkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_thinker_loop(is_static=True)
    launch, calls = loop._runner.launch, itertools.count()

    def fail_once(step: DecodeStep) -> LaunchedTokens:
        if next(calls) == 3:
            raise RuntimeError("launch failure")
        return launch(step)

    monkeypatch.setattr(loop._runner, "launch", fail_once)
    started(loop)
    assert "launch failure" in ask(loop, PROMPTS[0], max_tokens=20).error().message
    assert len(ask(loop, PROMPTS[0], max_tokens=20).tokens()) == 20


def run_alone(one: SpeechSegment, *, slot: int = 1, worker: TalkerWorker | None = None) -> np.ndarray:
    worker = worker or make_talker_worker()
    worker.join(slot, one)
    parts = []
    while True:
        worker.launch([slot])
        (patch,) = worker.collect().values()
        parts.append(patch.samples)
        if patch.is_last:
            worker.leave(slot)
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
    assert len(worker._prefixes) == 1
    assert np.array_equal(run_alone(segment(seed=1), slot=5, worker=worker), first)
    assert np.array_equal(run_alone(segment(seed=1, prefix=0), slot=2, worker=worker), first)
    run_alone(segment(seed=1, tokens=30), worker=worker)
    assert len(worker._prefixes) == 2


def test_segments_join_and_leave_a_batch_unchanged() -> None:
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
                worker.join(coming[0] + 1, pieces[coming[0]])
                going.append(coming.pop(0))
        slots = [each + 1 for each in reversed(going)]
        worker.launch(slots)
        for slot, patch in worker.collect().items():
            waves[slot - 1].append(patch.samples)
            if patch.is_last:
                worker.leave(slot)
                going.remove(slot - 1)
    for mine, expected in zip(waves, alone, strict=True):
        np.testing.assert_allclose(np.concatenate(mine), expected, rtol=0, atol=1e-6)


def test_the_stop_head_counts_only_beyond_the_least_step_and_its_patch_is_kept() -> None:
    worker = make_talker_worker(stop_probability=0.9)
    worker.join(1, segment(patches=40))
    flags = []
    for _ in range(TALKER.min_stop_step + 2):
        worker.launch([1])
        (patch,) = worker.collect().values()
        flags.append((patch.is_last, patch.is_capped))
    assert flags == [(False, False)] * (TALKER.min_stop_step + 1) + [(True, False)]


def test_a_cap_marks_its_patch_as_last() -> None:
    worker = make_talker_worker()
    worker.join(1, segment(patches=2))
    worker.launch([1])
    (first,) = worker.collect().values()
    worker.launch([1])
    (second,) = worker.collect().values()
    assert not worker.is_launchable(1)
    assert (first.is_last, second.is_last, second.is_capped) == (False, True, True)


def test_noise_is_of_seed_segment_and_patch() -> None:
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


def test_streams_speak_their_segments_in_order(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    loop = started(make_talker_loop(make_talker_worker(slots=3)))
    streams = [
        [segment(seed=i, index=j, tokens=12 + i + j, patches=3 + j) for j in range(3)] for i in range(5)
    ]
    collectors = [speak(loop, *pieces) for pieces in streams]
    for collector, pieces in zip(collectors, streams, strict=True):
        for wave, piece in zip(collector.segments(3), pieces, strict=True):
            np.testing.assert_allclose(wave, run_alone(piece), rtol=0, atol=1e-6)


@pytest.mark.parametrize("stop_probability", [0.0, 0.9])
def test_launching_ahead_changes_no_audio(
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


def test_a_failed_launch_tells_those_in_flight_and_no_others(
    started: Callable[[TalkerLoop], TalkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = make_talker_worker(slots=2, depth=2)
    loop = started(make_talker_loop(worker))
    launch, failures = worker._engines.launch, []

    def fail_once(size: int, inputs: Mapping[str, torch.Tensor]) -> LaunchedPatch:
        if not failures and any(len(rows) == 2 for rows, _ in worker._launched):
            failures.append(size)
            raise RuntimeError("device lost")
        return launch(size, inputs)

    monkeypatch.setattr(worker._engines, "launch", fail_once)
    hurt = [speak(loop, segment(seed=i, patches=40)) for i in range(2)]
    waiting = speak(loop, segment(seed=2, patches=5))
    for collector in hurt:
        assert "device lost" in collector.error().message
    np.testing.assert_allclose(
        waiting.segments()[0], run_alone(segment(seed=2, patches=5)), rtol=0, atol=1e-6
    )


def test_cancelled_speech_frees_its_slot(started: Callable[[TalkerLoop], TalkerLoop]) -> None:
    loop = started(make_talker_loop(make_talker_worker(slots=1)))
    first = speak(loop, segment(patches=40), segment(index=1, patches=40))
    first.wait(lambda items: len(items) > 1, "patches")
    second = speak(loop, segment(seed=2, patches=2))
    loop.cancel(first.stream)  # type: ignore[attr-defined]
    assert len(second.segments()[0]) == 2 * PATCH_SAMPLES


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
    loop = started(make_talker_loop(max_behind_s=0.0))
    stuck = speak(loop, segment(), is_behind=lambda: True)
    assert stuck.error().status == 408


def test_samples_that_are_not_finite_fail_their_request_only(
    started: Callable[[TalkerLoop], TalkerLoop],
) -> None:
    loop = started(make_talker_loop(make_talker_worker(nan_guidance=9.0)))
    good, sick = speak(loop, segment(patches=9)), speak(loop, segment(seed=2, guidance=9.0))
    assert "not finite" in sick.error().message
    np.testing.assert_allclose(good.segments()[0], run_alone(segment(patches=9)), rtol=0, atol=1e-6)


def test_steps_cross_the_wire_unchanged() -> None:
    ours, theirs = socket.socketpair()
    steps: list[Step] = [
        PrefillStep(
            input_ids=np.arange(5),
            positions=np.arange(15).reshape(3, 5) - 4,
            embed_kind=np.array([0, 1, 0, 2, 0]),
            embeds=torch.randn(5, HIDDEN).bfloat16(),
            start=7,
            pages=np.array([4, 2]),
            slot=3,
        ),
        PrefillStep(
            input_ids=np.arange(2),
            positions=np.zeros((3, 2), np.int64),
            embed_kind=np.zeros(2, np.int64),
            embeds=None,
            start=0,
            pages=np.array([1]),
        ),
        DecodeStep(
            input_ids=np.array([3, 4]),
            positions=np.array([8, 9]),
            lengths=np.array([9, 10]),
            pages=np.array([[1, 2], [3, 0]]),
        ),
        DecodeStep(
            input_ids=np.array([3, -1]),
            positions=np.array([8, 9]),
            lengths=np.array([9, 10]),
            pages=np.array([[1, 2], [3, 0]]),
            slots=np.array([2, 1]),
            sampling=np.random.default_rng(1).random((2, 6)),
        ),
    ]
    with ours, theirs:
        for step in steps:
            send_step(ours, step)
            got = receive_step(theirs)
            assert type(got) is type(step)
            for name in step.__slots__:
                sent, received = getattr(step, name), getattr(got, name)
                if isinstance(sent, torch.Tensor):
                    assert torch.equal(sent, received) and sent.dtype == received.dtype
                else:
                    assert np.array_equal(sent, received), name
        ours.close()
        assert receive_step(theirs) is None


def test_no_row_outside_the_given_pages_is_written() -> None:
    worker = make_thinker_worker(num_pages=9)
    worker.prefill(
        PrefillStep(
            input_ids=np.arange(1, 7),
            positions=np.zeros((3, 6), np.int64),
            embed_kind=np.zeros(6, np.int64),
            embeds=None,
            start=0,
            pages=np.array([5, 2]),
        )
    )
    rows = worker.state["layers.0.attention.k_pages"][:, 0, 0].view(-1, PAGE)
    assert rows[5].tolist() == [1, 2, 3, 4] and rows[2].tolist() == [5, 6, 0, 0]
    assert not rows[[1, 3, 4, 6, 7, 8]].any()
