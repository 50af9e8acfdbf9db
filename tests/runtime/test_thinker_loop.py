"""Thinker worker and loop over fake engines: an answer depends on its own request only."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from collector import Collector
from fake_thinker import CONTEXT, PAGE, VOCAB, make_thinker_loop, make_thinker_stage, make_thinker_worker
from fake_thinker import make_prompt as prompt
from hand_run import run_step, run_until_idle
from held_resources import wait_until_equal

from mingc.errors import CapacityError, RequestError, ServeError
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import FailedItem, TokenItem
from mingc.runtime.thinker.create_worker import measure_step_latencies
from mingc.runtime.thinker.logit_edits import SampleOptions
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel
from mingc.runtime.thinker.step import DecodeStep, PrefillStep
from mingc.runtime.thinker.worker import LaunchedTokens, ThinkerWorker

FAILING_ID, NAN_ID = 501, 502


def ask(
    loop: ThinkerLoop,
    request: ThinkerPrompt,
    *,
    seed: int = 5,
    is_recorded: bool = False,
    is_cached: bool = False,
    **params: Any,
) -> Collector:
    collector = Collector()
    sampling = SamplingParams(**{"max_tokens": 9, **params})
    recorder = collector.recorder if is_recorded else None
    keys = loop.page_keys(request) if is_cached else None
    collector.job = loop.submit(  # type: ignore[attr-defined]
        request, sampling, seed, collector.put, keys=keys, recorder=recorder
    )
    return collector


PROMPTS = [
    prompt([3, 1, 4, 1, 5]),
    prompt(list(range(40, 110)), media=[10, 11, 12, 50], rope_delta=-3),
    prompt([9] * 33),
    prompt([2, 7, 1, 8, 2, 8], media=[1, 2]),
    prompt([100]),
]


MakeLoop = Callable[..., ThinkerLoop]


@pytest.fixture(params=[(False, 1), (True, 1), (False, 4), (True, 4)], ids=str)
def make_loop(request: pytest.FixtureRequest) -> MakeLoop:
    """Whether the device samples, and how many prompts may share a chunk.

    Where it does, the next step is launched before the tokens of the one before are known.
    """
    is_static, max_prompts = request.param
    return partial(make_thinker_loop, is_static=is_static, max_prompts=max_prompts)


def test_chunked_prefill_equals_one_chunk(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    whole = [ask(started(make_loop(chunk=32)), each).tokens() for each in PROMPTS]
    for chunk, two_batch_overlap in ((3, False), (8, False), (32, True)):
        loop = started(make_loop(chunk=chunk, two_batch_overlap=two_batch_overlap))
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


@pytest.mark.parametrize("chunk", [8, 32])
def test_a_repetition_penalty_counts_every_chunk_of_a_prompt(
    chunk: int, started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    """A penalty so high that no token of the prompt or the answer can be chosen again."""
    ids = [*range(7, 207)]
    loop = started(make_loop(chunk=chunk))
    free = ask(loop, prompt(ids), max_tokens=30).tokens()
    answer = ask(loop, prompt(ids), max_tokens=30, repetition_penalty=1e6).tokens()
    assert {*free} & {*ids}
    assert not {*answer} & {*ids} and len({*answer}) == 30


def test_a_stop_token_ends_and_is_not_shown(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    free = ask(started(make_loop()), PROMPTS[0], max_tokens=20).tokens()
    stop = free[4]
    collector = ask(started(make_loop(stop_ids=[stop])), PROMPTS[0], max_tokens=20, is_recorded=True)
    assert collector.tokens() == free[: free.index(stop)]
    assert collector.items[-1] == TokenItem(token=None, finish="stop")
    recorded = [int(logits.argmax()) for logits in collector.recorder.logits]
    assert recorded == collector.tokens(), "a row for every token, and none for the stop token"


@pytest.mark.parametrize("room", [1, 6])
def test_an_answer_ends_where_the_context_does(
    room: int, started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    """Whatever `max_tokens` asks for: beyond it are no pages. Others go on."""
    request = prompt([5] * (CONTEXT - room))
    loop = started(make_loop())
    limited, other = ask(loop, request, max_tokens=10 * CONTEXT), ask(loop, PROMPTS[0], max_tokens=room + 9)
    expected = ask(started(make_loop()), request, max_tokens=room).tokens()
    assert limited.tokens() == expected and len(expected) == room
    (*_, last) = limited.items
    assert isinstance(last, TokenItem) and last.finish == "length"
    assert len(other.tokens()) == room + 9


def test_a_first_token_may_end_an_answer(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    first = ask(started(make_loop()), PROMPTS[0]).tokens()[0]
    assert ask(started(make_loop()), PROMPTS[0], max_tokens=1).tokens() == [first]
    loop = started(make_loop(stop_ids=[first]))
    collector = ask(loop, PROMPTS[0])
    assert collector.tokens() == [] and collector.items == [TokenItem(token=None, finish="stop")]
    assert len(ask(loop, PROMPTS[1], max_tokens=1).tokens()) == 1


def test_stop_tokens_of_a_request_end_its_answer_alone(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    free = ask(started(make_loop()), PROMPTS[0], max_tokens=20).tokens()
    loop = started(make_loop(stop_ids=[free[9]]))
    ending = ask(loop, PROMPTS[0], max_tokens=20, stop_token_ids=(free[4], 0))
    other = ask(loop, PROMPTS[0], max_tokens=20)
    without_eos = ask(loop, PROMPTS[0], max_tokens=20, stop_token_ids=(free[4],), ignore_eos=True)
    first = free.index(free[4])
    assert ending.tokens() == without_eos.tokens() == free[:first]
    assert ending.items[-1] == TokenItem(token=None, finish="stop")
    assert other.tokens() == free[: free.index(free[9])]


def test_no_stop_token_is_chosen_before_min_tokens(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    """As in vLLM: until then the model's and the request's stop tokens have no probability."""
    free = ask(started(make_loop()), PROMPTS[0], max_tokens=20).tokens()
    stop = free[2]
    loop = started(make_loop(stop_ids=[stop]))
    assert ask(loop, PROMPTS[0], max_tokens=20, min_tokens=2).tokens() == free[:2]
    for temperature in (0.0, 0.8):
        held = ask(loop, PROMPTS[0], max_tokens=20, min_tokens=12, temperature=temperature)
        beside = ask(loop, PROMPTS[0], max_tokens=20)
        assert len(held.tokens()) >= 12 and stop not in held.tokens()
        assert beside.tokens() == free[: free.index(stop)]
    own = ask(loop, PROMPTS[0], max_tokens=20, min_tokens=12, stop_token_ids=(free[0],))
    assert len(own.tokens()) >= 12 and not {stop, free[0]} & {*own.tokens()}
    ignoring = ask(loop, PROMPTS[0], max_tokens=20, min_tokens=12, ignore_eos=True)
    assert ignoring.tokens() == free, "not a stop token, so not banned"


@pytest.mark.parametrize(
    ("ids", "param", "words"),
    [
        ((5, 576), "stop_token_ids[1]", "token 576 is not one of the model's 576"),
        (tuple(range(21)), "stop_token_ids", "21 tokens"),
        (tuple(range(4, 24)), "stop_token_ids", "21 tokens"),  # the model's own is one of them
    ],
)
def test_stop_tokens_that_cannot_be_served_are_refused(ids: tuple[int, ...], param: str, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        ask(make_thinker_loop(stop_ids=[3]), PROMPTS[0], stop_token_ids=ids)
    assert (caught.value.param, caught.value.code) == (param, "invalid_value")


def test_a_prefill_begins_with_its_first_chunk() -> None:
    stage = make_thinker_stage()
    calls: list[float] = []
    watch_calls(stage, "embed", lambda tensors: calls.append(time.perf_counter()))
    loop = make_thinker_loop(stage, chunk=8)
    calls.clear()  # of warm-up calls
    answer = ask(loop, prompt([5] * 20), max_tokens=1)
    run_until_idle(loop)
    (item,) = answer.items
    assert isinstance(item, TokenItem) and item.begun_at is not None
    assert len(calls) == 3 and item.begun_at < calls[0]


def watch_calls(stage: LoadedStage, graph: str, watch: Callable[[Sequence[torch.Tensor]], None]) -> None:
    """Call `watch` with the input tensors of every call of a graph's engine, before the call."""
    engine = stage[graph].engines[None]
    run = engine.run

    def watched(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        watch(tensors)
        return run(tensors)

    engine.run = watched  # type: ignore[method-assign]


def test_the_next_step_is_launched_before_first_tokens_are_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = make_thinker_loop(is_static=True)  # not started: steps are run here
    calls: list[str] = []
    worker = loop.runner

    def noting(name: str, launch: Callable[..., LaunchedTokens]) -> Callable[..., LaunchedTokens]:
        def noted(step: PrefillStep | DecodeStep, *, options: SampleOptions) -> LaunchedTokens:
            calls.append(f"{name} {len(calls)}")
            launched = launch(step, options=options)
            return _Noted(
                host_copy=launched.host_copy,
                rows=launched.rows,
                calls=calls,
                name=f"wait for {calls[-1]}",
            )

        return noted

    for name in ("launch_decode", "launch_prefill"):
        monkeypatch.setattr(worker, name, noting(name, getattr(worker, name)))
    running = ask(loop, PROMPTS[0], max_tokens=20)
    run_step(loop)
    assert calls == ["launch_prefill 0"] and not running.items
    run_step(loop)
    assert calls[1:] == ["launch_decode 1", "wait for launch_prefill 0"] and len(running.items) == 1
    joining = ask(loop, PROMPTS[3], max_tokens=20)
    run_step(loop)
    assert (
        calls[3:] == ["launch_prefill 3", "launch_decode 4", "wait for launch_decode 1"] and not joining.items
    )
    run_step(loop)
    assert calls[6:] == ["launch_decode 6", "wait for launch_prefill 3", "wait for launch_decode 4"]
    assert len(joining.items) == 1 and len(running.items) == 3


def test_a_stop_token_is_one_like_others_to_a_request_that_ignores_them(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    free = ask(started(make_loop()), PROMPTS[0], max_tokens=20).tokens()
    loop = started(make_loop(stop_ids=[free[4]]))
    collector = ask(loop, PROMPTS[0], max_tokens=20, ignore_eos=True)
    assert collector.tokens() == free
    assert collector.items[-1] == TokenItem(token=free[-1], finish="length")


def test_cancelling_running_and_waiting_requests_frees_everything(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    loop = started(make_loop(max_running=2))
    before = loop.held
    jobs = [ask(loop, each, max_tokens=150) for each in (PROMPTS[0], PROMPTS[2], PROMPTS[4])]
    jobs[0].wait(lambda items: len(items) > 2, "tokens")
    assert loop.has_work
    for job in jobs:
        loop.cancel(job.job)  # type: ignore[attr-defined]
    last = ask(loop, PROMPTS[0], max_tokens=200)
    assert len(last.tokens()) == 200
    wait_until_equal(before, lambda: loop.held)
    assert not loop.has_work


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


def test_no_step_looks_up_the_token_of_an_answer_that_is_not_finite() -> None:
    """Where the device samples, the step after is launched before the host has seen the tokens."""
    stage = make_thinker_stage(nan_on=NAN_ID)
    rows = record_embedded_rows(stage)
    loop = make_thinker_loop(stage, is_static=True)
    good, sick = ask(loop, PROMPTS[0], max_tokens=12), ask(loop, prompt([1, NAN_ID]))
    run_until_idle(loop)
    assert "not finite" in sick.error().message and len(good.tokens()) == 12
    assert all(0 <= cast(int, row[0]) < VOCAB for row in rows)


def test_the_queue_is_bounded(started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop) -> None:
    loop = make_loop(max_running=1, max_waiting=2)  # not started: nothing leaves the queue but what can run
    for _ in range(3):
        ask(loop, PROMPTS[0])
    with pytest.raises(CapacityError):
        ask(loop, PROMPTS[0])
    with pytest.raises(RequestError, match="context"):
        ask(loop, prompt([1] * 600))


def test_a_failed_loop_fails_all_requests_and_refuses_new_ones(
    started: Callable[[ThinkerLoop], ThinkerLoop], make_loop: MakeLoop
) -> None:
    loop = started(make_loop())
    running = ask(loop, PROMPTS[0], max_tokens=200)
    loop.fail(ServeError("gone"))
    assert running.error().message == "gone"
    assert not loop.is_healthy
    with pytest.raises(ServeError, match="gone"):
        ask(loop, PROMPTS[0])


def test_a_stopped_loop_fails_its_requests(make_loop: MakeLoop) -> None:
    loop = make_loop()
    waiting = ask(loop, PROMPTS[0], max_tokens=200)
    loop.start()
    loop.stop()
    assert waiting.items and (isinstance(waiting.items[-1], FailedItem) or len(waiting.items) == 200)


def test_async_scheduling_changes_no_answer(started: Callable[[ThinkerLoop], ThinkerLoop]) -> None:
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


def test_a_failed_launch_fails_its_requests_and_later_ones_run(
    started: Callable[[ThinkerLoop], ThinkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_thinker_loop(is_static=True)
    launch, calls = loop.runner.launch_decode, itertools.count()

    def fail_once(step: DecodeStep, **options: SampleOptions) -> LaunchedTokens:
        if next(calls) == 3:
            raise RuntimeError("launch failure")
        return launch(step, **options)

    monkeypatch.setattr(loop.runner, "launch_decode", fail_once)
    started(loop)
    assert "launch failure" in ask(loop, PROMPTS[0], max_tokens=20).error().message
    assert len(ask(loop, PROMPTS[0], max_tokens=20).tokens()) == 20


def test_a_failed_launch_fails_a_request_whose_last_token_is_in_flight(
    started: Callable[[ThinkerLoop], ThinkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The device reports errors late: the token of the call before may be lost as well."""
    loop = make_thinker_loop(is_static=True, max_prompts=2)
    launch, steps = loop.runner.launch_decode, list[int]()

    def fail_third(step: DecodeStep, **options: SampleOptions) -> LaunchedTokens:
        steps.append(len(step.input_ids))
        if len(steps) == 3:
            raise RuntimeError("launch failure")
        return launch(step, **options)

    monkeypatch.setattr(loop.runner, "launch_decode", fail_third)
    short, long = ask(loop, PROMPTS[0], max_tokens=3), ask(loop, PROMPTS[3], max_tokens=20)
    started(loop)
    for each in (short, long):
        assert "launch failure" in each.error().message
    assert steps == [2, 2, 1], "the failed step has no row of the short answer"
    assert len(ask(loop, PROMPTS[0], max_tokens=20).tokens()) == 20


@pytest.mark.parametrize(
    ("num_chats", "max_running", "is_held"), [(1, 8, True), (2, 8, True), (3, 8, False), (3, 2, False)]
)
def test_first_patch_of_a_spoken_answer_goes_before_the_next_step(
    num_chats: int, max_running: int, is_held: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing runs on the device while it is waited for, and what ran was sent. Many chats do not wait, one of which
    may be in the queue."""
    loop = make_thinker_loop(is_static=True, max_running=max_running)
    starts, waits = loop.speech_starts, list[int]()
    answers = [ask(loop, each, max_tokens=20) for each in PROMPTS[:num_chats]]
    while not all(each.items for each in answers[:max_running]):
        run_step(loop)
    expected = [len(each.items) + 1 for each in answers]

    def wait() -> None:
        assert [len(each.items) for each in answers] == expected
        waits.append(loop.held["thinker steps in flight"])
        starts.end("answer")

    monkeypatch.setattr(starts, "wait_for_patches", wait)
    starts.begin("answer")
    run_step(loop)
    assert waits == ([0] if is_held else [])
    monkeypatch.undo()
    run_until_idle(loop)
    alone = [make_thinker_loop(is_static=True) for _ in answers]
    for answer, other, request in zip(answers, alone, PROMPTS, strict=False):
        again = ask(other, request, max_tokens=20)
        run_until_idle(other)
        assert answer.tokens() == again.tokens(), "waiting changes no token"


def test_no_row_outside_the_given_pages_is_written() -> None:
    worker = make_thinker_worker(num_pages=9)
    worker.prefill(
        PrefillStep(
            input_ids=np.arange(1, 7),
            positions=np.zeros((3, 6), np.int64),
            embed_kind=np.zeros(6, np.int64),
            embeds=None,
            counts=np.array([6]),
            starts=np.zeros(1, np.int64),
            pages=np.array([[5, 2]]),
            slots=np.zeros(1, np.int64),
        )
    )
    rows = worker.state["layers.0.attention.k_pages"][:, 0, 0].view(-1, PAGE)
    assert rows[5].tolist() == [1, 2, 3, 4] and rows[2].tolist() == [5, 6, 0, 0]
    assert not rows[[1, 3, 4, 6, 7, 8]].any()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Noted(LaunchedTokens):
    """Tokens that note when they are waited for."""

    calls: list[str]
    name: str

    def wait(self) -> list[int]:
        self.calls.append(self.name)
        return LaunchedTokens.wait(self)


@pytest.mark.parametrize(("is_static", "two_batch_overlap"), [(False, False), (True, False), (True, True)])
def test_measuring_latencies_covers_every_size_and_changes_no_answer(
    started: Callable[[ThinkerLoop], ThinkerLoop],
    is_static: bool,
    two_batch_overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = ask(started(make_thinker_loop(is_static=is_static)), PROMPTS[1], max_tokens=20).tokens()
    loop = make_thinker_loop(is_static=is_static, two_batch_overlap=two_batch_overlap)
    worker = loop.runner
    assert isinstance(worker, ThinkerWorker)
    sampled: list[int] = []
    launch = worker.launch_decode

    def noted(step: DecodeStep) -> LaunchedTokens:
        sampled.append(len(step.input_ids))
        return launch(step)

    monkeypatch.setattr(worker, "launch_decode", noted)
    latency_model = measure_step_latencies(worker)
    assert {*sampled} == ({1, 2, 4, 8} if is_static else set()), "what a step takes includes its sampling"
    monkeypatch.undo()
    pairs = [32 + 8, 32 + 16, 32 + 32]
    assert [size for size, _ in latency_model.chunks] == [8, 16, 32, *(pairs if two_batch_overlap else [])]
    assert [size for size, _ in latency_model.decodes] == [1, 2, 4, 8]
    assert all(ms > 0 for _, ms in (*latency_model.chunks, *latency_model.decodes))
    assert ask(started(loop), PROMPTS[1], max_tokens=20).tokens() == expected


def slow_chunks() -> ChunkedPrefillPolicy:
    """One layer group per step beside decoding requests."""
    return ChunkedPrefillPolicy(
        num_layer_groups=5, latency_model=StepLatencyModel(chunks=((32, 400.0),), decodes=((8, 1.0),))
    )


@pytest.mark.parametrize("max_prompts", [1, 4])
def test_layer_groups_between_decode_steps_change_no_answer(
    max_prompts: int,
    started: Callable[[ThinkerLoop], ThinkerLoop],
    make_loop: MakeLoop,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = make_thinker_stage(num_layers=5, max_prompts=max_prompts)
    alone = [ask(started(make_loop(stage)), each, max_tokens=30).tokens() for each in PROMPTS]
    loop = make_loop(stage, prefill_policy=slow_chunks())
    parts: list[tuple[int, int | None]] = []

    def noting(run: Callable[[PrefillStep], object]) -> Callable[[PrefillStep], object]:
        def noted(step: PrefillStep, **options: SampleOptions) -> object:
            parts.append((step.first_group, step.end_group))
            return run(step, **options)

        return noted

    for name in ("prefill", "launch_prefill"):
        monkeypatch.setattr(loop.runner, name, noting(getattr(loop.runner, name)))
    first = ask(started(loop), PROMPTS[0], max_tokens=30)
    first.wait(lambda items: len(items) > 2, "tokens")
    together = [first, *(ask(loop, each, max_tokens=30) for each in PROMPTS[1:])]
    assert [each.tokens() for each in together] == alone
    assert {*parts} - {(0, 5)}, "no chunk was split into layer groups"


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_waiting_prompts_share_a_chunk_and_one_may_be_cancelled_in_it(
    started: Callable[[ThinkerLoop], ThinkerLoop], is_static: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = make_thinker_stage(num_layers=5, max_prompts=4)
    short = [PROMPTS[0], PROMPTS[3], PROMPTS[4]]
    alone = [ask(started(make_thinker_loop(stage, is_static=is_static)), each).tokens() for each in short]
    loop = make_thinker_loop(stage, is_static=is_static, prefill_policy=slow_chunks())
    answers = [ask(loop, PROMPTS[2], max_tokens=60)]
    steps: list[PrefillStep] = []

    def noting(run: Callable[[PrefillStep], object]) -> Callable[[PrefillStep], object]:
        def noted(step: PrefillStep, **options: SampleOptions) -> object:
            steps.append(step)
            if len(step.counts) == 3 and step.first_group == 0:
                loop.cancel(answers[2].job)  # type: ignore[attr-defined]
            return run(step, **options)

        return noted

    for name in ("prefill", "launch_prefill"):
        monkeypatch.setattr(loop.runner, name, noting(getattr(loop.runner, name)))
    is_reached, are_asked = threading.Event(), threading.Event()
    name = "launch_decode" if is_static else "decode"
    run_decode = getattr(loop.runner, name)

    def decode_when_asked(step: DecodeStep, **options: SampleOptions) -> object:
        is_reached.set()
        assert are_asked.wait(60)
        return run_decode(step, **options)

    monkeypatch.setattr(loop.runner, name, decode_when_asked)
    started(loop)
    assert is_reached.wait(60)
    answers += [ask(loop, each) for each in short]
    are_asked.set()
    assert [answers[1].tokens(), answers[3].tokens()] == [alone[0], alone[2]]
    shared = [step for step in steps if len(step.counts) == 3]
    assert shared and shared[0].first_group == 0 and shared[-1].end_group == 5, "no chunk was shared"
    assert answers[0].tokens() and not answers[2].items


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("max_prompts", [1, 4])
@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_cancelling_with_a_step_in_flight_frees_everything_and_reaches_no_other_request(
    is_static: bool, max_prompts: int, num_steps: int
) -> None:
    options = {"is_static": is_static, "max_prompts": max_prompts, "max_running": 1, "num_pages": 25}
    expected = answer_alone(PROMPTS[2], **options)
    loop = make_thinker_loop(**options)
    before = loop.held
    cancelled = ask(loop, PROMPTS[0], max_tokens=80)
    for _ in range(num_steps):
        run_step(loop)
    assert loop.held["thinker steps in flight"] == int(is_static)
    items = list(cancelled.items)
    loop.cancel(cancelled.job)  # type: ignore[attr-defined]
    following = ask(loop, PROMPTS[2])  # takes the slot and the pages of the cancelled one
    run_until_idle(loop)
    assert cancelled.items == items, "a cancelled request received a token"
    assert following.tokens() == expected
    assert loop.held == before


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_a_chunk_whose_request_is_cancelled_between_its_layer_groups_is_left(is_static: bool) -> None:
    stage = make_thinker_stage(num_layers=5)
    expected = [answer_alone(each, stage, is_static=is_static, max_tokens=20) for each in PROMPTS[:3]]
    loop = make_thinker_loop(stage, is_static=is_static, prefill_policy=slow_chunks())
    before = loop.held
    running = ask(loop, PROMPTS[0], max_tokens=20)
    for _ in range(3):
        run_step(loop)
    cancelled = ask(loop, PROMPTS[1], max_tokens=20)
    for _ in range(2):
        run_step(loop)
    assert loop.held["prompts in a chunk"], "a chunk is under way"
    loop.cancel(cancelled.job)  # type: ignore[attr-defined]
    following = ask(loop, PROMPTS[2], max_tokens=20)
    run_until_idle(loop)
    assert not cancelled.items
    assert [running.tokens(), following.tokens()] == [expected[0], expected[2]]
    assert loop.held == before


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_requests_that_end_in_any_way_free_everything(is_static: bool) -> None:
    stop = answer_alone(PROMPTS[0], is_static=is_static)[2]
    stage = make_thinker_stage(fail_on=FAILING_ID, nan_on=NAN_ID)
    loop = make_thinker_loop(stage, is_static=is_static, stop_ids=[stop], max_running=3)
    before = loop.held
    requests = [*PROMPTS, prompt([1, FAILING_ID]), prompt([1, NAN_ID]), prompt([7] * 9)]
    asked = [ask(loop, each, max_tokens=30) for each in requests]
    loop.cancel(asked[-1].job)  # type: ignore[attr-defined]
    run_until_idle(loop)
    finishes = [item.finish for each in asked for item in each.items if isinstance(item, TokenItem)]
    assert finishes.count("stop") >= 1 and finishes.count("length") >= 1
    assert [len(each.items) for each in asked[-3:-1]] == [1, 1], "one error each"
    assert loop.held == before


@pytest.mark.parametrize(
    ("way", "is_cached"),
    [
        ("host samples", False),
        *((way, True) for way in ("device samples", "shared chunks", "two batches", "layer groups")),
    ],
)
def test_preempted_answers_go_on_as_if_they_had_never_stopped(way: str, is_cached: bool) -> None:
    """Same tokens, logits and cached tokens as alone, where there is room for less than half of the answers."""
    options: dict[str, Any] = {
        "host samples": {"is_static": False},
        "device samples": {"is_static": True},
        "shared chunks": {"is_static": True, "max_prompts": 4},
        "two batches": {"is_static": True, "two_batch_overlap": True},
        "layer groups": {"is_static": True, "max_prompts": 4, "prefill_policy": slow_chunks()},
    }[way]
    num_layers = 5 if way == "layer groups" else 1
    stage = make_thinker_stage(max_prompts=options.get("max_prompts", 1), num_layers=num_layers)
    if is_cached:
        options["prefix_salt"] = b"model"
    rules: list[dict[str, Any]] = [
        {"max_tokens": 90},
        {"max_tokens": 70, "temperature": 0.9, "repetition_penalty": 1.3},
        {"max_tokens": 60, "temperature": 1.2, "top_p": 0.8, "min_tokens": 50},
        {"max_tokens": 80, "repetition_penalty": 1e6},
        {"max_tokens": 40, "temperature": 0.7, "top_k": 9},
        {"max_tokens": 100, "temperature": 1.0, "ignore_eos": True},
    ]
    requests = [*PROMPTS, prompt(list(range(200, 260)), media=[5, 6, 58], rope_delta=2)]
    stop_ids = [answer_alone(requests[2], stage)[5]]

    def submit(loop: ThinkerLoop, number: int) -> Collector:
        return ask(
            loop, requests[number], seed=number, is_recorded=True, is_cached=is_cached, **rules[number]
        )

    def result(answer: Collector) -> tuple[list[int], list[list[float]], set[int]]:
        logits = [each.tolist() for each in answer.recorder.logits]
        return (
            answer.tokens(),
            logits,
            {each.reused_tokens for each in answer.items if isinstance(each, TokenItem)},
        )

    alone = []
    for number in range(len(requests)):
        loop = make_thinker_loop(stage, stop_ids=stop_ids, **options)
        answer = submit(loop, number)
        run_until_idle(loop)
        alone.append(result(answer))
    loop = make_thinker_loop(stage, stop_ids=stop_ids, num_pages=CONTEXT // PAGE + 1, **options)
    before, answers = loop.held, []
    for number in range(len(requests)):
        answers.append(submit(loop, number))
        for _ in range(3):
            run_step(loop)
    cancelled = ask(loop, prompt([8] * 30), max_tokens=60)
    while not any(each.prefilled == 0 and each.answer for each in loop._requests.values()):
        assert run_step(loop)
    loop.cancel(cancelled.job)  # type: ignore[attr-defined]
    run_until_idle(loop)
    assert loop.scheduler.num_preempted > 2, "there was room for all"
    assert [result(each) for each in answers] == alone
    assert loop.held == before
    loop.scheduler.check()


def answer_alone(request: ThinkerPrompt, stage: LoadedStage | None = None, **options: Any) -> list[int]:
    """Tokens of a request that has the loop to itself."""
    max_tokens = options.pop("max_tokens", 9)
    loop = make_thinker_loop(stage, **options)
    answer = ask(loop, request, max_tokens=max_tokens)
    run_until_idle(loop)
    return answer.tokens()


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
@pytest.mark.parametrize("rope_delta", [-3, 0, 4])
def test_an_answer_goes_on_as_if_its_tokens_were_part_of_the_prompt(is_static: bool, rope_delta: int) -> None:
    """Generated token n, counted from the start of the prompt, has position n + rope_delta (spec: thinker.md §4)."""
    asked = prompt([3, 1, 4, 1, 5, 9], rope_delta=rope_delta)
    answer = answer_alone(asked, is_static=is_static)
    for count in range(1, len(answer)):
        positions = np.arange(6, 6 + count) + rope_delta
        continued = ThinkerPrompt(
            input_ids=np.append(asked.input_ids, answer[:count]),
            positions=np.append(asked.positions, np.tile(positions, (3, 1)), axis=1),
            rope_delta=rope_delta,
            embed_kind=np.zeros(6 + count, np.int64),
        )
        assert answer_alone(continued, is_static=is_static, max_tokens=1) == [answer[count]]


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
@pytest.mark.parametrize(("chunk", "max_prompts"), [(32, 4), (8, 1)])
def test_the_engines_get_every_token_as_its_prompt_says_and_zeros_between_prompts(
    is_static: bool, chunk: int, max_prompts: int
) -> None:
    stage = make_thinker_stage(max_prompts=max_prompts)
    rows = record_embedded_rows(stage)
    loop = make_thinker_loop(stage, chunk=chunk, max_prompts=max_prompts, is_static=is_static)
    requests = [
        prompt([3, 1, 4], media=[1]),
        prompt([2, 7, 1, 8, 2], media=[1, 2]),
        prompt([9] * 21, media=[4]),
    ]
    rows.clear()  # of warm-up calls
    for each in requests:
        ask(loop, each, max_tokens=1)
    run_until_idle(loop)
    expected = [
        (int(token), kind, tuple(positions), embeds)
        for each in requests
        for token, kind, positions, embeds in zip(
            each.input_ids, each.embed_kind, each.positions.T.tolist(), media_rows(each), strict=True
        )
    ]
    found = [row for row in rows if row != (0, 0, (0, 0, 0), None)]
    assert sorted(found, key=repr) == sorted(expected, key=repr)
    assert len(rows) > len(found), "there was padding, and it was zero"


def test_steps_take_the_smallest_engines_that_hold_their_pages() -> None:
    """A page that is exactly full needs no further one: the next engines attend to twice as many rows."""
    stage = make_thinker_stage()
    loop = make_thinker_loop(stage)
    widths: dict[str, list[int]] = {"prefill_attention": [], "decode_attention": []}
    for name, found in widths.items():
        place = [each.name for each in stage[name].spec.inputs].index("page_table")

        def record(tensors: Sequence[torch.Tensor], place: int = place, found: list[int] = found) -> None:
            found.append(tensors[place].shape[1])

        watch_calls(stage, name, record)
    for count in (4 * PAGE, 4 * PAGE + 1):
        ask(loop, prompt([5] * count), max_tokens=1)
        run_until_idle(loop)
    assert widths.pop("prefill_attention") == [4, 8]
    ask(loop, prompt([5] * (4 * PAGE - 2)), max_tokens=5)  # steps with 15 to 18 tokens
    run_until_idle(loop)
    assert widths == {"decode_attention": [4, 4, 8, 8]}


def media_rows(request: ThinkerPrompt) -> list[tuple[float, ...] | None]:
    """The media embedding of each token; None for words."""
    embeds = iter([] if request.media_embeds is None else request.media_embeds.tolist())
    return [tuple(next(embeds)) if kind else None for kind in request.embed_kind]


def record_embedded_rows(stage: LoadedStage) -> list[tuple[object, ...]]:
    """Rows that the embedding engine gets: id, kind, positions, and its media embedding if it reads that."""
    rows: list[tuple[object, ...]] = []

    def record(tensors: Sequence[torch.Tensor]) -> None:
        ids, embeds, kinds, positions = (tensor.tolist() for tensor in tensors)
        for token, media, kind, *place in zip(ids, embeds, kinds, *positions, strict=True):
            rows.append((token, kind, tuple(place), tuple(media) if kind else None))

    watch_calls(stage, "embed", record)
    return rows


@pytest.mark.parametrize("is_static", [False, True], ids=["host samples", "device samples"])
def test_a_failed_chunk_fails_every_prompt_in_it_and_no_other(is_static: bool) -> None:
    stage = make_thinker_stage(fail_on=FAILING_ID, max_prompts=4)
    loop = make_thinker_loop(stage, is_static=is_static)
    before = loop.held
    running = ask(loop, PROMPTS[0], max_tokens=12)
    run_step(loop)
    sharing = [ask(loop, each) for each in (prompt([4, 5]), prompt([1, FAILING_ID]), prompt([7]))]
    run_until_idle(loop)
    for each in sharing:
        assert [type(item) for item in each.items] == [FailedItem]
    assert running.tokens() == answer_alone(PROMPTS[0], is_static=is_static, max_tokens=12)
    assert loop.held == before


def test_the_time_of_a_call_begins_when_the_device_is_free_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes 20 ms on the device; the next one is launched before the last one is collected."""
    now = 100.0
    monkeypatch.setattr("mingc.runtime.thinker.loop.time", SimpleNamespace(perf_counter=lambda: now))
    wait = LaunchedTokens.wait

    def wait_20_ms(self: LaunchedTokens) -> list[int]:
        nonlocal now
        now += 0.020
        return wait(self)

    monkeypatch.setattr(LaunchedTokens, "wait", wait_20_ms)
    model = StepLatencyModel(
        chunks=((8, 4.0), (16, 8.0), (32, 16.0)), decodes=((1, 5.0), (2, 5.0), (4, 5.0), (8, 5.0))
    )
    policy = ChunkedPrefillPolicy(num_layer_groups=1, latency_model=model)
    observed: list[tuple[float, float, int]] = []

    def observe(policy: object, ms: float, *, prefill_ms: float, num_decoding: int) -> None:
        observed.append((round(ms, 6), prefill_ms, num_decoding))

    monkeypatch.setattr(ChunkedPrefillPolicy, "observe", observe)
    loop = make_thinker_loop(is_static=True, prefill_policy=policy)
    first = ask(loop, prompt([5] * 10), max_tokens=4)
    run_until_idle(loop)
    assert observed == [(20.0, 8.0, 0), *[(20.0, 0.0, 1)] * 3]
    assert [item.begun_at for item in first.items if isinstance(item, TokenItem)] == [100.0] * 4
    observed.clear()
    now = 200.0
    ask(loop, prompt([5] * 3), max_tokens=9)
    run_step(loop)
    run_step(loop)
    ask(loop, prompt([6] * 20), max_tokens=1)  # its chunk runs beside a decode step
    run_until_idle(loop)
    assert observed[0] == (20.0, 4.0, 0)
    assert {(ms, prefill_ms) for ms, prefill_ms, _ in observed[1:]} >= {(20.0, 16.0), (20.0, 0.0)}
    assert sum(prefill_ms for _, prefill_ms, _ in observed) == 20.0, "each chunk is counted once"


def test_calls_in_flight_are_given_up_with_the_one_that_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device reports errors late: what was launched behind a failed call is not collected any more."""
    loop = make_thinker_loop(is_static=True)
    before = loop.held
    hurt = [ask(loop, each, max_tokens=30) for each in PROMPTS[:2]]
    for _ in range(4):
        run_step(loop)
    assert loop.held["thinker steps in flight"] > 0
    wait, waits = LaunchedTokens.wait, []

    def fail(self: LaunchedTokens) -> list[int]:
        waits.append(self)
        raise RuntimeError("device lost")

    monkeypatch.setattr(LaunchedTokens, "wait", fail)
    run_step(loop)
    monkeypatch.setattr(LaunchedTokens, "wait", wait)
    assert len(waits) == 1 and loop.held["thinker steps in flight"] == 0
    for each in hurt:
        assert "device lost" in each.error().message
    later = ask(loop, PROMPTS[0], max_tokens=9)
    run_until_idle(loop)
    assert later.tokens() == answer_alone(PROMPTS[0], is_static=True)
    assert loop.held == before
