"""Many concurrent requests: early requests do not wait until later ones are prepared."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace

import numpy as np
import pytest
from collector import Collector
from fake_omni import collect, make_service, run, speech_request
from fake_service import FakeService
from fake_thinker import make_thinker_loop

from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.request import SamplingParams
from mingc.runtime.service import omni
from mingc.runtime.thinker import loop as thinker_loop
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel
from mingc.runtime.thinker.step import PrefillStep
from mingc.runtime.thinker.worker import LaunchedTokens
from mingc.server.app import create_app
from mingc.server.lifecycle import serve
from mingc.server.options import ServeOptions


def test_an_early_request_is_queued_for_speech_before_later_ones_are_segmented(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make_service(has_thinker=False)
    (loop,) = service.talkers  # type: ignore[union-attr]
    segment, add = omni.spoken_pieces, loop.add
    log: list[str] = []

    def logged_segment(*arguments: object) -> Iterator[str]:
        log.append("segment")
        yield from segment(*arguments)  # type: ignore[arg-type]

    def logged_add(*arguments: object, **options: bool) -> None:
        log.append("add")
        add(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(omni, "spoken_pieces", logged_segment)
    monkeypatch.setattr(loop, "add", logged_add)
    requests = [speech_request(f"Number {number}.", max_steps=2) for number in range(4)]

    async def all_requests() -> None:
        await asyncio.gather(*(collect(service.speech(each)) for each in requests))

    run(service, all_requests())
    assert sorted(log) == ["add"] * 4 + ["segment"] * 4
    # Two threads segment; each adds its segments before it takes the next request.
    assert "add" in log[:3]


def test_serving_shortens_the_switch_interval_of_threads() -> None:
    class Announced(Exception):
        pass

    before, during = sys.getswitchinterval(), []

    def announce(url: str) -> None:
        during.append(sys.getswitchinterval())
        raise Announced

    with pytest.raises(Announced):
        serve(create_app(FakeService(), ServeOptions(port=0)), announce=announce)
    assert during == [pytest.approx(0.001)]
    assert sys.getswitchinterval() == before


def prompt(ids: Sequence[int]) -> ThinkerPrompt:
    return ThinkerPrompt(
        input_ids=np.array(ids),
        positions=np.stack([np.arange(len(ids))] * 3),
        rope_delta=0,
        embed_kind=np.zeros(len(ids), np.int64),
        media_embeds=None,
    )


def test_prompts_that_arrive_during_a_chunk_share_the_next_one(
    started: Callable[[ThinkerLoop], ThinkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A chunk is expected to take 4 s, so the next one starts 2 s later at the earliest, by the frozen clock.
    latency_model = StepLatencyModel(chunks=((1, 4000.0), (32, 4000.0)), decodes=((1, 1.0), (8, 1.0)))
    now = 100.0
    monkeypatch.setattr(thinker_loop, "time", SimpleNamespace(perf_counter=lambda: now))
    loop = make_thinker_loop(
        is_static=True,
        max_prompts=4,
        prefill_policy=ChunkedPrefillPolicy(num_layer_groups=1, latency_model=latency_model),
    )
    runner = loop.runner
    launch, chunks = runner.launch_prefill, list[int]()

    def recorded(step: PrefillStep, **options: bool) -> LaunchedTokens:
        chunks.append(len(step.counts))
        return launch(step, **options)

    def wait_for_a_step() -> None:
        for _ in range(2):  # a step runs between two posted actions
            is_run = threading.Event()
            loop.post(is_run.set)
            assert is_run.wait(30)

    monkeypatch.setattr(runner, "launch_prefill", recorded)
    started(loop)
    answers = [Collector() for _ in range(4)]

    def submit(number: int) -> None:
        loop.submit(prompt(range(number, number + 4)), SamplingParams(max_tokens=2), 1, answers[number].put)

    submit(0)
    assert len(answers[0].tokens()) == 2  # the decode steps in between have no effect on the wait
    for number in (1, 2, 3):
        submit(number)
        wait_for_a_step()
        assert chunks == [1]
    now += 4.0
    loop.wake()
    assert all(len(each.tokens()) == 2 for each in answers)
    assert chunks == [1, 3]


def test_the_prefill_policy_observes_what_ran_before_each_call(
    started: Callable[[ThinkerLoop], ThinkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill_policy = ChunkedPrefillPolicy(
        num_layer_groups=1, latency_model=StepLatencyModel(chunks=((1, 0.5), (8, 2.0)), decodes=((8, 1.0),))
    )
    loop = make_thinker_loop(is_static=True, chunk=8, prefill_policy=prefill_policy)
    seen: list[tuple[float, int]] = []

    def observe(self: ChunkedPrefillPolicy, ms: float, *, prefill_ms: float, num_decoding: int) -> None:
        assert ms > 0.0
        seen.append((prefill_ms, num_decoding))

    monkeypatch.setattr(ChunkedPrefillPolicy, "observe", observe)
    answer = Collector()
    loop.submit(prompt(range(20)), SamplingParams(max_tokens=3), 1, answer.put)
    started(loop)
    assert len(answer.tokens()) == 3
    assert seen == [(6.0, 0), (0.0, 1), (0.0, 1)], "three chunks before the first token, then decode steps"
