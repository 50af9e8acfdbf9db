"""Many requests at once: what the first ones need is not kept waiting by reading the others."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from collector import Collector
from fake_omni import collect, make_service, run, say
from fake_service import FakeService
from fake_thinker import make_thinker_loop

from mingc.runtime.http.options import ServeOptions
from mingc.runtime.http.server import create_app, serve
from mingc.runtime.prompt import ThinkerPrompt
from mingc.runtime.request import SamplingParams
from mingc.runtime.service import omni
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel
from mingc.runtime.thinker.step import PrefillStep
from mingc.runtime.thinker.worker import LaunchedTokens


def test_a_request_of_a_crowd_is_spoken_before_the_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(has_thinker=False)
    loop = service._speech.loop  # type: ignore[union-attr]
    read, add = omni.iter_speech_segments, loop.add
    log: list[str] = []

    def logged_read(text: str, max_length: int) -> Iterator[str]:
        log.append("read")
        yield from read(text, max_length)

    def logged_add(*arguments: object) -> None:
        log.append("add")
        add(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(omni, "iter_speech_segments", logged_read)
    monkeypatch.setattr(loop, "add", logged_add)
    requests = [say(f"Number {number}.", max_steps=2) for number in range(4)]

    async def crowd() -> None:
        await asyncio.gather(*(collect(service.speech(each)) for each in requests))

    # The first two may be read side by side.
    run(service, crowd())
    assert sorted(log) == ["add"] * 4 + ["read"] * 4
    assert "add" in log[:3]


def test_engine_threads_get_their_turn_soon_while_a_server_runs() -> None:
    class Seen(Exception):
        pass

    before, during = sys.getswitchinterval(), []

    def announce(url: str) -> None:
        during.append(sys.getswitchinterval())
        raise Seen

    with pytest.raises(Seen):
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


def test_prompts_that_come_during_a_chunk_share_the_next_one(
    started: Callable[[ThinkerLoop], ThinkerLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    # So long the device is taken to work on a chunk: the next one is gathered after half of it, 2 s.
    latency_model = StepLatencyModel(chunks=((1, 4000.0), (32, 4000.0)), decodes=((1, 1.0), (8, 1.0)))
    loop = make_thinker_loop(
        is_static=True,
        max_prompts=4,
        prefill_policy=ChunkedPrefillPolicy(num_layer_groups=1, latency_model=latency_model),
    )
    runner = loop._runner
    launch, chunks = runner.launch_prefill, list[int]()

    def noted(step: PrefillStep) -> LaunchedTokens:
        chunks.append(len(step.counts))
        return launch(step)

    monkeypatch.setattr(runner, "launch_prefill", noted)
    started(loop)
    answers = [Collector() for _ in range(4)]

    def ask(number: int) -> None:
        loop.submit(prompt(range(number, number + 4)), SamplingParams(max_tokens=2), 1, answers[number].put)

    ask(0)
    assert len(answers[0].tokens()) == 2  # decode steps in between change nothing
    for number in (1, 2, 3):
        ask(number)
        time.sleep(0.02)
    assert all(len(each.tokens()) == 2 for each in answers)
    assert chunks == [1, 3]


def test_the_pace_learns_of_each_call_what_ran_before_it(
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
