"""The service over fake engines: events, seeds, isolation, cancellation, errors, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial, partialmethod
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from fake_omni import chat, collect, make_service, run, slow_down, speech_request
from fake_talker import PATCH_SAMPLES, SAMPLE_RATE
from fake_thinker import PAGE, VOCAB, make_prompt, make_thinker_loop, thinker_parameters
from held_resources import service_resources, wait_until_equal, wait_until_free

from mingc.errors import CapacityError, RequestError, WorkerError
from mingc.media.decoder_pool import DecoderPool
from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.prompts.features import VisionFeatures
from mingc.prompts.prompt_writer import MediaFeatures, PreparedPrompt
from mingc.prompts.thinker_prompt import AUDIO, VISION, WORD
from mingc.prompts.tools import Tool, ToolUse
from mingc.runtime import engine_thread
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.encoder import VisionEncoder
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.noise import NoiseSource, PhiloxNoise
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    CompletionRequest,
    Constraint,
    Done,
    Event,
    MemoryUse,
    SamplingParams,
    ServiceLoad,
    SpeechParams,
    SpeechRequest,
    TextDelta,
    TextDone,
    TextRequest,
)
from mingc.runtime.request_stream import EventQueue, RequestStream
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.output_processor import ChatOutputProcessor, SpeechStream, Timings
from mingc.runtime.service.pipelines import ChatPipeline, media_embeds
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.step import PrefillStep
from mingc.server.metrics import Metrics


def text_of(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, TextDelta))


def audio_of(events: list[Event]) -> np.ndarray:
    return np.concatenate([event.samples for event in events if isinstance(event, AudioDelta)])


def done_of(events: list[Event]) -> Done:
    assert isinstance(events[-1], Done)
    return events[-1]


def test_chat_yields_one_delta_per_token_then_done() -> None:
    service = make_service()
    events = run(service, collect(service.chat(chat("Hello"))))
    deltas = [event for event in events if isinstance(event, TextDelta)]
    done = done_of(events)
    assert len(deltas) >= done.usage.completion_tokens == 12
    assert done.finish_reason == "length"
    assert [type(event) for event in events[-2:]] == [TextDone, Done]
    assert done.usage.prompt_tokens > 10 and done.usage.audio_patches == 0
    moments = [
        done.timings_ms[name]
        for name in ("preprocessing", "prepared", "encoded", "prefill", "first_token", "text_done", "done")
    ]
    assert moments == sorted(moments)


@pytest.mark.parametrize("num_prompts", [4, 5])
def test_short_prompts_that_come_together_share_the_first_chunk(
    num_prompts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first one would take a chunk alone, and the others would wait. A full chunk begins at once."""
    monkeypatch.setattr(engine_thread, "_IDLE_WAIT_S", 60.0)
    loop = make_thinker_loop(is_static=True, max_prompts=4)
    counts: list[int] = []
    has_begun = threading.Event()
    prefill, submit = loop.runner.prefill, loop.submit

    def noting(step: PrefillStep) -> torch.Tensor:
        counts.append(len(step.counts))
        has_begun.set()
        return prefill(step)

    def submit_slowly(*arguments: Any, **options: Any) -> int:
        job = submit(*arguments, **options)
        time.sleep(0.02)  # the thinker's thread runs meanwhile
        if job == 4 < num_prompts:
            assert has_begun.wait(30)
        return job

    monkeypatch.setattr(loop.runner, "prefill", noting)
    monkeypatch.setattr(loop, "submit", submit_slowly)
    service = make_service(loop=loop)

    async def answer(prompt: str) -> list[Event]:
        return [event async for _, event in service.answers(completion(prompt))]

    async def ask() -> list[list[Event]]:
        return await asyncio.gather(*(answer(f"Why {number}?") for number in range(num_prompts)))

    answers = run(service, ask())
    assert [done_of(events).usage.completion_tokens for events in answers] == [2] * num_prompts
    assert counts == [4, 1][: num_prompts - 3]


def turns(*messages: Sequence[str]) -> ChatRequest:
    """A chat whose messages have these parts."""
    parts = [tuple(TextPart(text=text) for text in each) for each in messages]
    return replace(chat(""), messages=tuple(Message(role="user", parts=each) for each in parts))


def completion(prompt: str) -> CompletionRequest:
    return CompletionRequest(request_id="r", prompt=prompt, sampling=SamplingParams(max_tokens=2))


PICTURE = MediaPart(kind="image", data=b"", where="messages[0]")


@pytest.mark.parametrize(
    ("request_", "is_inline"),
    [
        (turns(["Why?"]), True),
        (turns(["Why?"], ["Because."] * 3, ["No."]), True),
        (completion("Why?"), True),
        (turns(["Why? " * 300]), False),
        (completion("Why? " * 300), False),
        (turns(*([[""]] * 60)), False),
        (turns([""] * 60), False),
        (replace(chat(""), messages=(Message(role="user", parts=(PICTURE,)),)), False),
        (replace(chat("Why?"), tools=ToolUse(tools=(Tool(name="f", definition="{}"),))), False),
        (chat("Why?", constraint=Constraint(kind="regex", text="a", param="regex")), False),
    ],
    ids=["short", "short turns", "text", "long", "long text", "many messages", "many parts", "media", "tools",
         "constraint"],
)  # fmt: skip
def test_only_short_prompts_are_written_on_the_event_loop(
    request_: TextRequest, is_inline: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Media, schemas of tools and constraints may take long however short the text is."""
    threads: set[int] = set()
    service = make_service()

    def noting(work: Callable[..., Any], *arguments: Any) -> Any:
        threads.add(threading.get_ident())
        return work(*arguments)

    for work in (ChatPipeline.matchers, ChatPipeline.prepare):
        monkeypatch.setattr(ChatPipeline, work.__name__, partialmethod(partial(noting, work)))

    async def ask() -> None:
        with contextlib.suppress(RequestError):  # longer than the context, or more than this service has
            async for _ in service.answers(request_):
                pass
        assert [each == threading.get_ident() for each in threads] == [is_inline]

    run(service, ask())


@pytest.mark.parametrize("num_requests", [4, 5])
def test_speech_requests_that_come_together_share_the_first_patch(
    num_requests: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the first one would take a patch alone. Four, as many as may join a patch, do not wait for more."""
    monkeypatch.setattr(engine_thread, "_IDLE_WAIT_S", 60.0)
    service = make_service()
    (talker,) = service.talkers
    sizes: list[int] = []
    added: list[object] = []
    has_begun = threading.Event()
    launch, add = talker.worker.launch, talker.add

    def noting(slots: Sequence[int]) -> None:
        sizes.append(len(slots))
        has_begun.set()
        launch(slots)

    def add_slowly(*arguments: Any, **options: Any) -> None:
        add(*arguments, **options)
        added.append(arguments)
        time.sleep(0.02)  # the talker's thread runs meanwhile
        if len(added) == 4 < num_requests:
            assert has_begun.wait(30)

    monkeypatch.setattr(talker.worker, "launch", noting)
    monkeypatch.setattr(talker, "add", add_slowly)

    async def ask() -> list[list[Event]]:
        requests = (speech_request(f"I have {number}.", max_steps=2) for number in range(num_requests))
        return await asyncio.gather(*(collect(service.speech(each)) for each in requests))

    assert all(audio_of(events).size for events in run(service, ask()))
    assert sizes[0] == 4


def test_the_stages_of_a_spoken_answer_follow_each_other_and_are_measured() -> None:
    service = make_service()
    request = chat("Hello", speech_request("x", seed=1).speech, max_tokens=40)
    timings = done_of(run(service, collect(service.chat(request)))).timings_ms
    ordered = [
        "preprocessing",
        "prepared",
        "encoded",
        "prefill",
        "first_token",
        "first_segment",
        "first_audio",
    ]
    assert [timings[name] for name in ordered] == sorted(timings[name] for name in ordered)
    metrics = Metrics()
    metrics.observe_stages(timings)
    metrics.observe_stages({"preprocessing": 1000.0, "prepared": 3000.0})  # a request that had no other stage
    found = {
        (sample.labels, sample.name.removeprefix("mingc_stage_seconds_")): sample.value
        for sample in metrics.samples(service.load)
        if sample.name in ("mingc_stage_seconds_sum", "mingc_stage_seconds_count")
    }
    stages = {dict(labels)["stage"]: value for (labels, kind), value in found.items() if kind == "count"}
    assert stages == {
        "preprocess_queue": 2, "preprocess": 2, "encode": 1, "queue": 1, "prefill": 1, "first_segment": 1,
        "first_patch": 1,
    }  # fmt: skip
    total = sum(value for (_, kind), value in found.items() if kind == "sum")
    assert total == pytest.approx(3.0 + timings["first_audio"] / 1e3), "they add up to the first audio"


def test_the_first_patch_of_a_speech_request_is_timed_from_its_segment() -> None:
    service = make_service()
    timings = done_of(run(service, collect(service.speech(speech_request("One. Two.", seed=1))))).timings_ms
    assert 0 < timings["first_segment"] <= timings["first_audio"] <= timings["done"]


def test_an_answer_ends_before_its_stop_string() -> None:
    service = make_service()
    whole = text_of(run(service, collect(service.chat(chat("Hello", max_tokens=40)))))
    stop = whole[len(whole) // 2 :][:5]
    service = make_service()
    events = run(service, collect(service.chat(chat("Hello", max_tokens=40, stop=(stop,)))))
    assert text_of(events) == whole[: whole.index(stop)]
    assert done_of(events).finish_reason == "stop"


def test_speech_yields_one_event_per_patch() -> None:
    service = make_service()
    events = run(service, collect(service.speech(speech_request("Good morning, how are you today?", seed=1))))
    done = done_of(events)
    patches = [event for event in events if isinstance(event, AudioDelta)]
    assert len(patches) == done.usage.audio_patches > 1
    assert len(audio_of(events)) == done.usage.audio_patches * PATCH_SAMPLES
    assert done.usage.audio_seconds == pytest.approx(len(audio_of(events)) / SAMPLE_RATE)
    assert done.finish_reason == "length", "the fake talker never stops by itself"


def test_long_text_is_spoken_completely() -> None:
    text = "This is the first sentence. " * 20
    service = make_service()
    one = done_of(
        run(service, collect(service.speech(speech_request("This is the first sentence.", seed=1))))
    ).usage
    service = make_service()
    many = done_of(run(service, collect(service.speech(speech_request(text, seed=1))))).usage
    assert many.audio_patches > 10 * one.audio_patches


def test_chat_speaks_its_answer() -> None:
    service = make_service()
    events = run(service, collect(service.chat(chat("Hello", SpeechParams(), max_tokens=60, seed=4))))
    done = done_of(events)
    assert done.usage.audio_patches > 0
    assert sum(isinstance(event, TextDone) for event in events) == 1
    first_audio = next(i for i, event in enumerate(events) if isinstance(event, AudioDelta))
    text_done = next(i for i, event in enumerate(events) if isinstance(event, TextDone))
    assert len(audio_of(events)) == done.usage.audio_patches * PATCH_SAMPLES
    assert first_audio < len(events) - 1 and text_done < len(events) - 1


REQUESTS = [
    chat("Hello", SpeechParams(voice="bob"), seed=1, temperature=0.7, max_tokens=40),
    chat("你好，今天天气怎么样？", SpeechParams(), seed=2, max_tokens=30),
    chat("What is this?", seed=3, temperature=1.0, top_p=0.9),
    speech_request("Good morning, how are you?", seed=4),
    speech_request("感谢你的认可。我们可以聊聊这件事吗？", seed=5, voice="bob", temperature=1.0),
    chat("1 + 1", max_tokens=5),
    speech_request("One more sentence to be spoken.", seed=6, guidance=1.0),
    chat("Hello", SpeechParams(seed=9), seed=1, temperature=0.7, max_tokens=40),
]


def start(service: OmniService, request: ChatRequest | SpeechRequest) -> AsyncIterator[Event]:
    return service.chat(request) if isinstance(request, ChatRequest) else service.speech(request)


def test_eight_mixed_requests_get_the_same_results_as_alone() -> None:
    alone = []
    for request in REQUESTS:
        service = make_service()
        alone.append(run(service, collect(start(service, request))))
    service = make_service(slots=3, max_running=4)

    async def together() -> list[list[Event]]:
        return await asyncio.gather(*(collect(start(service, request)) for request in REQUESTS))

    for mine, expected in zip(run(service, together()), alone, strict=True):
        assert text_of(mine) == text_of(expected)
        assert done_of(mine).usage == done_of(expected).usage
        if done_of(mine).usage.audio_patches:
            np.testing.assert_allclose(audio_of(mine), audio_of(expected), rtol=0, atol=1e-5)


def test_without_a_seed_two_requests_differ() -> None:
    service = make_service()

    async def both() -> list[list[Event]]:
        return [await collect(service.speech(speech_request("Good morning."))) for _ in range(2)]

    first, second = run(service, both())
    assert not np.allclose(audio_of(first), audio_of(second))


LONG = {
    "chat": chat("Hello", max_tokens=200),
    "spoken chat": chat("Hello", SpeechParams(seed=1), max_tokens=200),
    "speech": speech_request("This is one of many sentences. " * 20),
}
MANY_STEPS = 60  # steps in which a request must be gone; those above take hundreds


async def until_event(events: AsyncIterator[Event], kind: type[Event]) -> None:
    async for event in events:
        if isinstance(event, kind):
            return


@pytest.mark.parametrize("name", LONG)
def test_a_closed_iterator_frees_everything(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    steps = slow_down(service, monkeypatch)

    async def leave() -> None:
        before = service_resources(service, asyncio.get_running_loop())
        events = start(service, LONG[name])
        await until_event(events, TextDelta if name == "chat" else AudioDelta)
        held = service_resources(service, asyncio.get_running_loop())
        assert held["requests"] == 1 and held != before
        num_steps = len(steps)
        await events.aclose()  # type: ignore[attr-defined]
        await wait_until_free(service, before)
        assert len(steps) < num_steps + MANY_STEPS, "the engines went on with an abandoned request"

    run(service, leave())


def test_a_cancelled_task_frees_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(slots=2, max_running=3)
    thinker = service.thinker
    assert thinker is not None
    slow_down(service, monkeypatch)

    async def cancel() -> None:
        before = service_resources(service, asyncio.get_running_loop())
        requests = [*REQUESTS, *LONG.values()]
        tasks = [asyncio.create_task(collect(start(service, request))) for request in requests]
        while service.held["requests"] < len(tasks) or not thinker.scheduler.num_waiting:
            await asyncio.sleep(0.001)
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        await wait_until_free(service, before)

    run(service, cancel())


@pytest.mark.parametrize(
    "request_", [*REQUESTS, chat("x " * 400), speech_request("***"), chat("Hello", SpeechParams(voice="no"))]
)
def test_a_request_that_ends_by_itself_frees_everything(request_: ChatRequest | SpeechRequest) -> None:
    service = make_service()

    async def whole() -> None:
        before = service_resources(service, asyncio.get_running_loop())
        with contextlib.suppress(RequestError):
            await collect(start(service, request_))
        await wait_until_free(service, before)

    run(service, whole())


def test_a_stop_string_stops_the_thinker_while_the_answer_is_spoken(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service()
    whole = text_of(run(service, collect(service.chat(chat("Hello", max_tokens=40)))))
    service = make_service()
    assert service.thinker is not None
    loop, cancelled = service.thinker, []
    cancel = loop.cancel

    def note(job: int) -> None:
        cancelled.append(job)
        cancel(job)

    monkeypatch.setattr(loop, "cancel", note)

    async def speak() -> None:
        request = chat("Hello", SpeechParams(seed=1), max_tokens=200, stop=(whole[20:25],))
        async for event in service.chat(request):
            if isinstance(event, Done):
                assert cancelled == [1], "the thinker goes on with tokens that are discarded"

    run(service, speak())


def test_a_slow_reader_gets_all_its_audio(monkeypatch: pytest.MonkeyPatch) -> None:
    # An idle talker looks only when it is woken: reading must do that.
    monkeypatch.setattr(engine_thread, "_IDLE_WAIT_S", 3600.0)
    expected_service = make_service()
    request = speech_request("Good morning, how are you today my friend?", seed=1)
    expected = run(expected_service, collect(expected_service.speech(request)))
    service = make_service(max_pending=2)

    async def slowly() -> list[Event]:
        events = []
        async for event in service.speech(request):
            events.append(event)
            await asyncio.sleep(0.01)
        return events

    got = run(service, asyncio.wait_for(slowly(), 20))
    assert np.array_equal(audio_of(got), audio_of(expected))


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (chat("x " * 400), "tokens"),
        (chat("Hello", SpeechParams(voice="absent")), "there is no voice 'absent'; there are: amy, bob"),
        (speech_request("Hello", voice="absent"), "amy, bob"),
        (speech_request("***"), "nothing to speak"),
        (speech_request("Hello", instructions="{broken"), "JSON"),
        (chat("Hello", SpeechParams(instructions="{broken")), "JSON"),
        (replace(chat("x"), messages=()), "no message"),
    ],
)
def test_bad_requests_are_refused_before_the_first_event(
    request_: ChatRequest | SpeechRequest, message: str
) -> None:
    service = make_service()

    async def both() -> None:
        good = asyncio.create_task(collect(service.chat(chat("Hello"))))
        with pytest.raises(RequestError, match=message):
            await anext(start(service, request_))
        assert done_of(await good)

    run(service, both())


def test_a_prompt_longer_than_the_context_has_its_error_code() -> None:
    service = make_service()
    with pytest.raises(RequestError) as error:
        run(service, collect(service.chat(chat("x " * 400))))
    assert error.value.code == "context_length_exceeded"


def test_unsupported_modalities_are_refused() -> None:
    service = make_service(has_talker=False)
    with pytest.raises(RequestError, match="without its talker"):
        run(service, collect(service.chat(chat("Hello", SpeechParams()))))
    service = make_service(has_thinker=False)
    with pytest.raises(RequestError, match="without its thinker"):
        run(service, collect(service.chat(chat("Hello"))))


def test_closing_fails_running_requests_and_refuses_new_ones() -> None:
    service = make_service()

    async def work() -> None:
        running = asyncio.create_task(collect(service.chat(chat("Hello", SpeechParams(), max_tokens=220))))
        while not service.held["requests"]:
            await asyncio.sleep(0)
        assert service.is_ready
        await service.close(shutdown_timeout_s=0)
        assert not service.is_ready
        with pytest.raises(WorkerError, match="stop") as cut:
            await running
        assert cut.value.status == 503, "another server may answer"
        with pytest.raises(CapacityError, match="stopping"):
            await collect(service.chat(chat("Hello")))

    run(service, work())


def test_closing_fails_an_answer_in_the_middle_as_one_that_another_server_may_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service = make_service()
    slow_down(service, monkeypatch)

    async def work() -> None:
        events = service.chat(chat("Hello", max_tokens=220))
        await anext(events)
        await service.close(shutdown_timeout_s=0)
        with pytest.raises(WorkerError, match="the server is stopping") as cut:
            await collect(events)
        assert cut.value.status == 503

    run(service, work())


def test_closing_lets_short_requests_finish() -> None:
    service = make_service()

    async def work() -> list[Event]:
        running = asyncio.create_task(collect(service.chat(chat("Hello", max_tokens=5))))
        while not service.held["requests"]:
            await asyncio.sleep(0)
        await service.close(shutdown_timeout_s=30)
        return await running

    assert done_of(run(service, work())).usage.completion_tokens == 5


def scrape(service: OmniService) -> tuple[float, int]:
    """KV cache usage and number of chats that wait for the thinker, from the text of `/metrics`."""
    text = Metrics().render(service.load).decode()
    usage = re.search(r"^mingc_kv_cache_usage_ratio (\S+)$", text, re.MULTILINE)
    waiting = re.search(r'^mingc_num_requests_waiting\{engine="thinker"\} (\S+)$', text, re.MULTILINE)
    assert usage and waiting
    return float(usage[1]), int(float(waiting[1]))


def test_metrics_count_pages_in_use_and_waiting_chats(monkeypatch: pytest.MonkeyPatch) -> None:
    service = make_service(max_running=1)
    assert service.thinker is not None
    loop = service.thinker
    inside, go_on = threading.Event(), threading.Event()
    prefill = loop.runner.prefill

    def held(step: Any) -> Any:
        inside.set()
        assert go_on.wait(30)
        return prefill(step)

    monkeypatch.setattr(loop.runner, "prefill", held)

    async def work() -> None:
        assert scrape(service) == (0.0, 0)
        tasks = [asyncio.create_task(collect(service.chat(chat("Hello", max_tokens=100)))) for _ in range(3)]
        try:
            assert await asyncio.to_thread(inside.wait, 30)
            while loop.scheduler.num_waiting < 2:
                await asyncio.sleep(0.001)
            usage, waiting = scrape(service)
        finally:
            go_on.set()
        dones = [done_of(each) for each in await asyncio.gather(*tasks)]
        num_pages = -(
            -(dones[0].usage.prompt_tokens + 1) // PAGE
        )  # the prompt, and the row of the first token
        assert (usage, waiting) == (num_pages / 128, 2)
        while loop.scheduler.num_running:
            await asyncio.sleep(0.001)
        assert scrape(service) == (0.0, 0)

    run(service, work())


def test_a_dead_rank_fails_chats_but_not_speech() -> None:
    service = make_service()

    async def work() -> None:
        speech = asyncio.create_task(collect(service.speech(speech_request("Good morning.", seed=1))))
        running = asyncio.create_task(collect(service.chat(chat("Hello", max_tokens=220))))
        while service.held["chat requests"] < 1:
            await asyncio.sleep(0)
        service.fail(WorkerError("rank 1 ended"))
        with pytest.raises(WorkerError, match="rank 1"):
            await running
        assert not service.is_ready
        with pytest.raises(WorkerError, match="rank 1"):
            await collect(service.chat(chat("Hello")))
        assert done_of(await speech)

    run(service, work())
    gc.collect()


def test_a_service_may_be_used_from_a_second_event_loop() -> None:
    service = make_service()

    async def first() -> list[Event]:
        return await collect(service.chat(chat("Hello", seed=1)))

    before = service.held
    events = asyncio.run(first())
    wait_until_equal(before, lambda: service.held)
    assert text_of(events) == text_of(run(service, first()))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_seed_gives_the_same_answer_again(seed: int) -> None:
    request = chat("Hello", seed=seed, temperature=1.0, max_tokens=20)

    async def twice(service: OmniService) -> list[str]:
        return [text_of(await collect(service.chat(request))) for _ in range(2)]

    service = make_service()
    first, second = run(service, twice(service))
    assert first == second


def test_seed_0_speaks_the_same_again() -> None:
    async def twice(service: OmniService) -> list[np.ndarray]:
        return [audio_of(await collect(service.speech(speech_request("Hi.", seed=0)))) for _ in range(2)]

    service = make_service()
    first, second = run(service, twice(service))
    assert np.array_equal(first, second)


def test_a_service_is_ready_while_all_its_ranks_are() -> None:
    service = make_service()
    ranks = SimpleNamespace(is_alive=True, close=lambda: None)
    service._ranks = cast(RankGroup, ranks)
    assert service.is_ready
    ranks.is_alive = False
    assert not service.is_ready

    async def nothing() -> None:
        pass

    run(service, nothing())


@pytest.mark.parametrize("kind", ["vision", "audio"])
def test_a_service_with_a_failed_encoder_is_not_ready(kind: str) -> None:
    encoder = EncoderLoop(kind, cast(VisionEncoder, None))
    service = make_service(**{kind: encoder})
    assert service.is_ready
    encoder.fail(WorkerError("gone"))
    assert not service.is_ready
    asyncio.run(service.close(shutdown_timeout_s=0))


def test_media_of_a_client_that_left_while_they_were_decoded_are_not_encoded() -> None:
    submitted: list[str] = []

    def encoder(kind: str) -> SimpleNamespace:
        return SimpleNamespace(submit=lambda *_: submitted.append(kind) or [])

    service = make_service()
    pipeline = service._chat
    assert pipeline is not None
    pipeline = replace(pipeline, vision=cast(Any, encoder("vision")))
    image = np.zeros((1, 2, 4), np.float32)
    media = MediaFeatures(spans=(), vision=(VisionFeatures(patches=image[0], grid=(1, 1, 2)),), audio=())
    prepared = PreparedPrompt(tokens=make_prompt([1, 2, 3]), media=media)
    for is_gone in (False, True):
        stream = RequestStream(cast(EventQueue, None))
        if is_gone:
            stream.close()
        pipeline.prepare(lambda: prepared, Timings(), stream)
        assert submitted == ["vision"]
    asyncio.run(service.close(shutdown_timeout_s=0))


def test_a_failure_is_reported_whether_it_comes_before_or_after_the_registration() -> None:
    for is_early in (True, False):
        service, reports = make_service(), []
        if is_early:
            service.fail(WorkerError("rank 1 ended"))
        service.on_failure(reports.append)
        if not is_early:
            assert not reports
            service.fail(WorkerError("rank 1 ended"))
        assert [error.message for error in reports] == ["rank 1 ended"]
        asyncio.run(service.close(shutdown_timeout_s=0))


def test_forgotten_caches_hold_no_embeddings() -> None:
    cache = EncoderCache(1 << 20)
    service = make_service(encoder_cache=cache)
    cache.put(b"picture", torch.zeros(8))
    assert service.load.encoder_cache_bytes == 32
    service.forget_caches()
    assert service.load.encoder_cache_bytes == 0 and cache.get(b"picture") is None
    asyncio.run(service.close(shutdown_timeout_s=0))


def test_a_closed_service_leaves_no_decoder_process() -> None:
    """Its own process may live on, as that of a replica does."""
    decoders = DecoderPool()
    decoders.start()
    (pid,) = decoders.pids
    service = make_service(media=decoders)
    asyncio.run(service.close(shutdown_timeout_s=0))
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert decoders.pids == []


def test_a_request_that_leaves_withdraws_all_of_its_media() -> None:
    """The first future is the one that it waits for; the others are only known to it."""
    futures: dict[int, list[Future[torch.Tensor]]] = {kind: [Future(), Future()] for kind in (VISION, AUDIO)}

    async def leave() -> None:
        kinds = np.array([VISION, VISION, AUDIO, AUDIO], np.int64)
        waiting = asyncio.create_task(media_embeds(kinds, futures, torch.device("cpu")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(leave())
    assert all(future.cancelled() for each in futures.values() for future in each)


def test_embeddings_of_a_single_medium_are_not_copied_on_the_host() -> None:
    """Several are put together; so are those of one that cannot be copied to a device without waiting."""

    def encoded(device: torch.device, *tensors: torch.Tensor) -> torch.Tensor:
        futures: list[Future[torch.Tensor]] = [Future() for _ in tensors]
        for future, tensor in zip(futures, tensors, strict=True):
            future.set_result(tensor)
        kinds = np.repeat(np.array([WORD, VISION, WORD], np.int64), [2, sum(map(len, tensors)), 3])
        return asyncio.run(media_embeds(kinds, {VISION: futures}, device))

    cpu, gpu = torch.device("cpu"), torch.device("meta")  # which stands for a device
    first, second = torch.rand(4, 3), torch.rand(5, 3)
    assert encoded(cpu, first).data_ptr() == first.data_ptr()
    assert torch.equal(encoded(cpu, first, second), torch.cat([first, second]))
    copies: list[tuple[torch.device, bool]] = []

    class Result(torch.Tensor):
        def to(self, device: torch.device, *, non_blocking: bool = False) -> torch.Tensor:  # type: ignore[override]
            copies.append((device, non_blocking))
            return first

    result = first.as_subclass(Result)
    assert encoded(gpu, result).device.type == "meta" and not copies
    result.is_pinned = lambda: True  # type: ignore[method-assign, assignment]
    assert encoded(gpu, result) is first and copies == [(gpu, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_embeddings_of_several_media_are_placed_in_their_order_and_dtype(dtype: torch.dtype) -> None:
    rows = torch.arange(15.0).view(5, 3).to(dtype)
    kinds = np.array([WORD, VISION, AUDIO, AUDIO, WORD, VISION, VISION], np.int64)
    futures: dict[int, list[Future[torch.Tensor]]] = {VISION: [Future(), Future()], AUDIO: [Future()]}
    for future, tensor in zip(
        [*futures[VISION], *futures[AUDIO]], [rows[:1], rows[3:], rows[1:3]], strict=True
    ):
        future.set_result(tensor)
    placed = asyncio.run(media_embeds(kinds, futures, torch.device("cpu")))
    assert placed.dtype == dtype and torch.equal(placed, rows)


def test_the_load_has_the_figures_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = EncoderCache(10_000)
    service = make_service(talkers=2, encoder_cache=cache)
    assert service.thinker is not None
    scheduler, talkers = service.thinker.scheduler, service._speech.talkers

    def fix(owner: Any, **values: Any) -> None:
        """Properties of one object: those of its class return the value for it."""
        for name, value in values.items():
            monkeypatch.setattr(type(owner), name, property(lambda self, value=value: value))

    fix(scheduler, num_waiting=2)
    fix(scheduler.pool, num_free=100, num_published=5)
    scheduler.num_prefilled, scheduler.num_reused, scheduler.pool.num_evicted = 30, 40, 50
    scheduler.num_preempted = 7
    cache.num_hits, cache.num_misses, cache.num_bytes = 60, 70, 80
    fix(talkers, num_waiting=3, listeners={"late": 4}, num_underruns=9)
    service._memory = (MemoryUse(device="cpu", owner="kv_pages", num_bytes=1),)
    total = scheduler.pool.num_pages - 1
    try:
        assert service.load == ServiceLoad(
            kv_pages_used=total - 100,
            kv_pages_total=total,
            num_waiting={"thinker": 2, "talker": 3},
            prefilled_tokens=30,
            reused_tokens=40,
            num_preempted=7,
            cached_pages=5,
            evicted_pages=50,
            encoder_hits=60,
            encoder_misses=70,
            encoder_cache_bytes=80,
            listeners={"late": 4},
            num_underruns=9,
            limits={
                "preprocessing": (0, 2),
                "chats": (0, 8),
                "chat_queue": (2, 64),
                "kv_pages": (total - 100, total),
                "encoder_cache_bytes": (80, 10000),
                "speech_streams": (0, 128),
                "speech_slots": (0, 16),
            },
            memory=service._memory,
        )
    finally:
        monkeypatch.undo()
        asyncio.run(service.close(shutdown_timeout_s=0))
    without = make_service(has_thinker=False)
    assert without.load == ServiceLoad(
        num_waiting={"talker": 0},
        listeners=dict.fromkeys(("starting", "playing", "late", "paused"), 0),
        limits={"preprocessing": (0, 2), "speech_streams": (0, 64), "speech_slots": (0, 8)},
    )
    asyncio.run(without.close(shutdown_timeout_s=0))


@pytest.mark.parametrize("is_live", [False, True])
@pytest.mark.parametrize(
    ("speech_seed", "chat_seed", "noise_seed"), [(5, 7, 5), (None, 7, 7), (0, 7, 0), (None, None, None)]
)
def test_what_a_spoken_chat_gives_to_its_parts(
    speech_seed: int | None,
    chat_seed: int | None,
    noise_seed: int | None,
    is_live: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speech takes its own seed, else the chat's."""
    given: list[dict[str, Any]] = []

    def record(kind: type) -> None:
        begin = kind.__init__  # type: ignore[misc]

        def init(self: Any, *arguments: Any, **named: Any) -> None:
            given.append(named)
            begin(self, *arguments, **named)

        monkeypatch.setattr(kind, "__init__", init)

    record(SpeechStream)
    record(ChatOutputProcessor)
    service = make_service(max_pending=17)
    spoken = chat("Hello there", SpeechParams(voice="bob", seed=speech_seed), seed=chat_seed)
    done = done_of(run(service, collect(service.chat(replace(spoken, is_live=is_live)))))
    stream, processor = given
    assert (stream["max_pending_patches"], stream["is_live"]) == (17, is_live)
    assert noise_seed is None or stream["noise"] == PhiloxNoise(noise_seed)
    assert processor["sample_rate"] == SAMPLE_RATE
    assert processor["prompt_tokens"] == done.usage.prompt_tokens > 5


@pytest.mark.parametrize(("is_live", "device"), [(True, "cpu"), (False, "cpu"), (True, "meta")])
def test_thinker_knows_the_spoken_answers_that_somebody_waits_for(
    is_live: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a talker on its own device; until their first audio is sent."""
    service, told = make_service(), list[str]()
    assert service.thinker is not None
    starts = service.thinker.speech_starts

    def tells(name: str) -> Callable[[object], None]:
        tell = getattr(starts, name)

        def tell_it(stream: object) -> None:
            told.append(name)
            tell(stream)

        return tell_it

    for name in ("expect", "begin", "end"):
        monkeypatch.setattr(starts, name, tells(name))
    monkeypatch.setattr(service.talkers[0].worker, "device", torch.device(device))
    request = replace(chat("Hello", SpeechParams(voice="amy"), max_tokens=40), is_live=is_live)

    async def until_first_audio() -> None:
        async with contextlib.aclosing(service.chat(request)) as events:
            await until_event(events, AudioDelta)
            assert told == (["expect", "begin", "end"] if is_live and device == "cpu" else [])

    run(service, until_first_audio())


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_thinker_waits_for_no_answer_that_has_ended(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And for one patch only of one that has several segments."""
    service, told = make_service(), list[str]()
    assert service.thinker is not None
    starts = service.thinker.speech_starts
    for name in ("expect", "begin", "end"):
        monkeypatch.setattr(starts, name, lambda stream, name=name: told.append(name))
    request = replace(chat("Hello", SpeechParams(voice="amy"), max_tokens=200, seed=3), is_live=True)

    async def ask() -> list[Event]:
        async with contextlib.aclosing(service.chat(request)) as events:
            return [await anext(events)] if is_cancelled else await collect(events)

    events = run(service, ask())
    pieces = [each for each in events if isinstance(each, AudioDelta) and each.segment_text is not None]
    assert (len(pieces) > 1) != is_cancelled
    assert told.count("begin") <= 1 and told[-1] == "end"


@pytest.mark.parametrize("is_live", [False, True])
def test_a_live_speech_request_counts_as_a_listener(is_live: bool) -> None:
    service = make_service()

    async def num_listeners() -> int:
        request = replace(speech_request("Hello there."), is_live=is_live)
        async with contextlib.aclosing(service.speech(request)) as events:
            await anext(events)
            return sum(service.load.listeners.values())

    assert run(service, num_listeners()) == is_live


@pytest.mark.parametrize(("text", "is_here"), [("Hello there.", True), ("Hello there. " * 80, False)])
def test_only_a_long_text_is_handed_to_a_thread_to_be_read(
    text: str, is_here: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment, threads = SpeechPlanner.segment, set[threading.Thread]()

    def noted(self: SpeechPlanner, *arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return segment(self, *arguments)

    monkeypatch.setattr(SpeechPlanner, "segment", noted)
    service = make_service()
    assert done_of(run(service, collect(service.speech(speech_request(text, max_steps=1))))).finish_reason
    assert (threads == {threading.main_thread()}) == is_here


def test_a_text_that_takes_long_to_read_is_handed_to_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind its first piece; a short text may consist of numbers and marks."""
    segment, read = SpeechPlanner.segment, list[tuple[str, bool]]()

    def noted(self: SpeechPlanner, text: str, *arguments: Any) -> Any:
        read.append((text, threading.current_thread() is threading.main_thread()))
        return segment(self, text, *arguments)

    monkeypatch.setattr(SpeechPlanner, "segment", noted)
    monkeypatch.setattr("mingc.runtime.service.omni._INLINE_S", -1.0)
    service = make_service()
    text = (
        "One sentence has many words in it. Two sentences have more words. Three sentences have most of all."
    )
    events = run(service, collect(service.speech(speech_request(text, max_steps=1))))
    assert [is_here for _, is_here in read] == [True, False]
    assert " ".join(piece for piece, _ in read) == text and done_of(events).usage.audio_patches == 2


def test_a_text_that_ends_with_the_piece_that_took_long_is_spoken_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is left for the thread to queue, which would wake the talker."""
    monkeypatch.setattr(engine_thread, "_IDLE_WAIT_S", 90.0)
    monkeypatch.setattr("mingc.runtime.service.omni._INLINE_S", -1.0)
    service = make_service()
    assert done_of(run(service, collect(service.speech(speech_request("Hello.", max_steps=1))))).finish_reason


def test_speech_with_given_noise_is_reproducible() -> None:
    """As `mingc verify` asks for it, without a seed."""
    service = make_service()

    def ask(noise: NoiseSource | None) -> AsyncIterator[Event]:
        request = chat("Hello there", SpeechParams())
        return service.answer(
            lambda: service.prepare(request.messages), request.sampling, SpeechParams(), noise=noise
        )

    async def work() -> list[np.ndarray]:
        return [audio_of(await collect(ask(noise))) for noise in (PhiloxNoise(3), PhiloxNoise(3), None)]

    first, second, other = run(service, work())
    np.testing.assert_array_equal(first, second)
    assert first.shape != other.shape or not np.array_equal(first, other)


def test_the_first_failure_is_the_one_that_is_reported() -> None:
    """Later ones follow from it: when a rank is lost, the others break off as well."""
    service = make_service()
    first, second = WorkerError("rank 1 is lost"), WorkerError("rank 2 is lost")
    noticed: list[Exception] = []
    service.fail(first)
    service.fail(second)
    service.on_failure(noticed.append)
    assert noticed == [first]
    asyncio.run(service.close(shutdown_timeout_s=0))


def test_a_text_of_marks_alone_is_the_fault_of_the_input() -> None:
    service = make_service()
    with pytest.raises(RequestError, match="nothing to speak") as caught:
        run(service, collect(service.speech(speech_request("...!"))))
    assert (caught.value.param, caught.value.status) == ("input", 400)


def several(service: OmniService, request: ChatRequest | CompletionRequest) -> list[list[Event]]:
    """The events of each answer."""
    found: list[list[Event]] = [[] for _ in range(request.num_answers)]

    async def collect_answers() -> None:
        async for answer, event in service.answers(request):
            found[answer].append(event)

    run(service, collect_answers())
    return found


@pytest.mark.parametrize("limits", [{}, {"max_running": 1, "max_waiting": 1}])
def test_several_answers_are_those_of_one_request_each_and_share_a_prefill(limits: dict[str, int]) -> None:
    request = replace(chat("Hello there, how are you?", seed=5, temperature=1.0), num_answers=4)
    alone = []
    for seed in range(5, 9):
        single = replace(request, sampling=replace(request.sampling, seed=seed), num_answers=1)
        service = make_service()
        alone.append(text_of(run(service, collect(service.chat(single)))))
    assert len(set(alone)) == 4
    service = make_service(loop=make_thinker_loop(prefix_salt=b"salt", **limits))
    answers = several(service, request)
    assert [text_of(events) for events in answers] == alone
    usages = [done_of(events).usage for events in answers]
    assert [usage.completion_tokens for usage in usages] == [12] * 4
    num_prompt = usages[0].prompt_tokens
    assert num_prompt > 4 * PAGE and [usage.prompt_tokens for usage in usages[1:]] == [0, 0, 0]
    assert [usage.cached_tokens for usage in usages] == [0] * 4, "of the prompt, which is counted once"
    # a last page that is not full belongs to its own answer
    assert service.load.prefilled_tokens <= num_prompt + 3 * PAGE


def test_an_answer_that_ends_at_once_does_not_hold_the_others_back() -> None:
    service = make_service()
    answers = several(service, replace(chat("Hello", max_tokens=1), num_answers=3))
    assert [done_of(events).usage.completion_tokens for events in answers] == [1, 1, 1]


def test_a_stop_string_ends_each_of_several_answers_once() -> None:
    """Tokens that arrive after the stop string of one answer, while others go on, change nothing."""
    request = replace(chat("Hello there", seed=5, temperature=1.0, max_tokens=60), num_answers=4)
    whole = [text_of(events) for events in several(make_service(), request)]
    for stop in {text[1] for text in whole}:
        sampling = replace(request.sampling, stop=(stop,))
        answers = several(make_service(), replace(request, sampling=sampling))
        assert [text_of(events) for events in answers] == [text.split(stop)[0] for text in whole]
        assert [sum(isinstance(event, Done) for event in events) for events in answers] == [1] * 4


def test_leaving_cancels_all_answers() -> None:
    service = make_service()

    async def leave() -> None:
        answers = service.answers(replace(chat("Hello", max_tokens=200), num_answers=5))
        async with contextlib.aclosing(answers):
            async for answer, _ in answers:
                if answer == 4:
                    break

    run(service, leave())  # checks that nothing is held


def test_a_text_is_continued_without_the_template() -> None:
    service = make_service()
    text = "Once <|role_end|> upon a tïme"
    ids = tuple(service.tokenizer.encode_plain(text))
    sampling = SamplingParams(max_tokens=5)
    by_text, by_ids = (
        several(make_service(), CompletionRequest(request_id="c", prompt=prompt, sampling=sampling))[0]
        for prompt in (text, ids)
    )
    assert text_of(by_text) == text_of(by_ids)
    assert done_of(by_text).usage.prompt_tokens == done_of(by_ids).usage.prompt_tokens == len(ids)
    assert run(service, service.tokenize(text)) == list(ids)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [("", "prompt"), ((), "prompt"), ((5, VOCAB), "prompt[1]"), ((-1,), "prompt[0]"), ("a " * 300, "prompt")],
)
def test_a_prompt_that_cannot_be_continued_is_refused(prompt: str | tuple[int, ...], param: str) -> None:
    service = make_service()
    with pytest.raises(RequestError) as caught:
        several(service, CompletionRequest(request_id="c", prompt=prompt, sampling=SamplingParams()))
    assert caught.value.param == param


def test_tokens_that_stand_for_media_are_refused() -> None:
    parameters = thinker_parameters(make_service().tokenizer.token_id)
    for token in (parameters.image_patch_token, parameters.frame_patch_token, parameters.audio_patch_token):
        request = CompletionRequest(request_id="c", prompt=(5, token), sampling=SamplingParams())
        with pytest.raises(RequestError, match="part of an image, video or clip") as caught:
            several(make_service(), request)
        assert caught.value.param == "prompt[1]"


@pytest.mark.parametrize("num_turns", range(4))
def test_speech_whose_closing_is_cancelled_holds_nothing(num_turns: int) -> None:
    """A client may leave while the speech of its text is being closed."""
    service = make_service(has_thinker=False)

    async def deltas() -> AsyncIterator[str]:
        yield "These are words enough, and "
        await asyncio.sleep(60)

    async def work() -> None:
        before = service_resources(service, asyncio.get_running_loop())
        events = service.stream_speech(speech_request(""), deltas())
        await anext(events)
        closing = asyncio.create_task(events.aclose())  # type: ignore[arg-type]
        for _ in range(num_turns):
            await asyncio.sleep(0)
        closing.cancel()
        await asyncio.wait((closing,))
        if num_turns == 0:  # it had not begun
            await events.aclose()
        await wait_until_free(service, before)

    run(service, work())
