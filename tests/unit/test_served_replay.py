"""Replay of recorded requests on a service that answers nothing: rows that fail, and no error of the replay itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mingc.errors import WorkerError
from mingc.runtime.request import Done, Event, SpeechParams, Usage
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.recorded_noise import RecordedNoise
from mingc.verify.served import replay
from mingc.verify.served.cases import (
    RecordedMessage,
    RecordedPart,
    RecordedSpeech,
    ServedCase,
    ServedGoldens,
)
from mingc.verify.served.comparison import Served, ServedComparison
from mingc.verify.served.conversion import speech_params
from mingc.verify.served.replay import ServedReplay

CHAT = ServedCase(
    name="chat",
    messages=(RecordedMessage(role="user", parts=(RecordedPart(kind="text", text="Hi"),)),),
    max_tokens=2,
)
SPEECH = ServedCase(name="speech", text="Hello.", speech=RecordedSpeech())


class StuckService:
    """Every request waits for ever."""

    info = SimpleNamespace(sample_rate=16000)

    def __init__(self) -> None:
        self.held = {"requests": 0}

    async def answer(self, *arguments: object, **options: object) -> AsyncGenerator[Event]:
        self.held["requests"] += 1
        try:
            await asyncio.Event().wait()
            yield Done(finish_reason="stop", usage=Usage())
        finally:
            self.held["requests"] -= 1

    speech = answer


def goldens_of(tokens: list[int], *, is_exact: bool = True) -> tuple[ServedGoldens, ComparisonLog]:
    """Of the chat's recorded answer, every row of logits has 3 columns."""
    tensors = {
        "chat.input_ids": np.arange(4),
        "chat.tokens": np.array(tokens, np.int64),
        "chat.logits": np.ones((len(tokens) + 1, 3), np.float32),
        "chat.columns": np.array([0, 2, 4]),
    }
    goldens = ServedGoldens(cases=(CHAT, SPEECH), tensors=tensors, sample_rate=16000, parameters={})
    log = ComparisonLog("served", tensors, tolerance=1e-4, is_exact=is_exact)
    return goldens, log


def test_a_request_that_never_ends_fails_and_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "_LIMIT_S", 0.01)
    service: Any = StuckService()
    goldens, log = goldens_of([7])
    run = ServedReplay(service, goldens, log)

    async def serve() -> list[Served]:
        alone = await run.serve(SPEECH, Served())
        mixed = await run.serve_mixed()
        await run.check_leaving({"requests": 0})
        return [alone, *mixed]

    for served in asyncio.run(serve()):
        assert isinstance(served.error, WorkerError) and "has not ended" in served.error.message
    assert [(each.name, each.outcome) for each in log.comparisons] == [
        ("served: requests that leave", "FAIL")
    ]
    assert service.held == {"requests": 0}


@pytest.mark.parametrize("is_exact", [True, False])
@pytest.mark.parametrize(("tokens", "expected"), [([7, 8], {"tokens", "logits"}), ([], set())])
def test_an_answer_without_a_token_is_compared(tokens: list[int], expected: set[str], is_exact: bool) -> None:
    goldens, log = goldens_of(tokens, is_exact=is_exact)
    run = ServedComparison(goldens, log, 16000)
    done = Done(finish_reason="length", usage=Usage(prompt_tokens=4, completion_tokens=0))
    run.compare(CHAT, Served(done=done), "alone")
    failed = {
        each.name.partition("chat.")[2].split()[0] for each in log.comparisons if each.outcome == "FAIL"
    }
    assert failed == (expected if is_exact else set())
    assert (run.text.near, run.text.total) == ((0, 0) if is_exact else (0, len(tokens) + 1))


def test_recorded_speech_is_asked_for_with_all_its_parameters() -> None:
    recorded = RecordedSpeech(
        voice="Lina", instructions="slowly", max_steps=4, guidance=1.5, sigma=0.25, temperature=0.5
    )
    assert speech_params(recorded) == SpeechParams(
        voice="Lina", instructions="slowly", max_steps=4, guidance=1.5, sigma=0.25, temperature=0.5
    )


def test_recorded_noise_follows_the_segments() -> None:
    """Two segments of 2 and 3 patches; beyond the recorded ones the noise is zero."""
    start = np.arange(5, dtype=np.float32).reshape(5, 1, 1) + 1
    steps = np.arange(10, dtype=np.float32).reshape(5, 2, 1, 1) + 11
    noise = RecordedNoise([2, 3], start, steps)
    found = [[noise.start(segment, patch, (1, 1)).item() for patch in range(4)] for segment in range(3)]
    assert found == [[1, 2, 0, 0], [3, 4, 5, 0], [0, 0, 0, 0]]
    assert noise.diffusion(1, 0, (2, 1, 1)).ravel().tolist() == [15, 16]
    assert noise.diffusion(0, 2, (2, 1, 1)).ravel().tolist() == [0, 0]
    silent = RecordedNoise([2, 3], start)
    assert (
        silent.diffusion(0, 0, (2, 1, 1)).shape == (2, 1, 1) and not silent.diffusion(0, 0, (2, 1, 1)).any()
    )
