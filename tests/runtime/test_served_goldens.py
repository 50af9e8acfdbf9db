"""Recorded prompts through the thinker loop of a server, alone and together: what the official modules computed.

The engines are those of `eager_artifact`; embeddings are recorded, everything between them is the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collector import Collector
from recorded_thinker import CASES, THINKER, thinker_prompt
from sampling_reference import logprobs, most_likely

from mingc.runtime.request import SamplingParams, TokenLogprobs
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.worker import StepOptions


def submit(loop: ThinkerLoop, case: str, **options: Any) -> Collector:
    collector = Collector()
    count = THINKER[f"{case}.greedy_ids"].shape[1]
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, **options)
    loop.submit(thinker_prompt(case), sampling, 1, collector.put, recorder=collector.recorder)
    return collector


def check_answer(case: str, collector: Collector) -> None:
    assert collector.tokens() == THINKER[f"{case}.greedy_ids"][0].tolist(), case
    logits = np.stack(collector.recorder.logits)
    np.testing.assert_allclose(logits, THINKER[f"{case}.greedy_logits"][0], atol=1e-3, err_msg=case)


STEPS = {
    "host sampling": StepOptions(),
    "device sampling": StepOptions(is_static=True),
    "short chunks": StepOptions(max_chunk=1, max_prompts=4),
    "overlapped chunks": StepOptions(is_static=True, max_chunk=1, two_batch_overlap=True),
}


# What chunks cannot change.
SAMPLING = pytest.mark.parametrize("service", ["host sampling", "device sampling"], indirect=True)


@pytest.fixture(scope="module", params=STEPS, ids=STEPS.keys())
def service(eager_artifact: Path, request: pytest.FixtureRequest) -> Iterator[OmniService]:
    opened = open_service(eager_artifact, EngineOptions(max_total_tokens=2048, steps=STEPS[request.param]))
    yield opened
    asyncio.run(opened.close(shutdown_timeout_s=1.0))


def thinker_loop(service: OmniService) -> ThinkerLoop:
    assert service.thinker is not None
    return service.thinker


def test_every_prompt_is_answered_as_recorded(service: OmniService) -> None:
    """All of them twice at once: neighbours and their media have no influence."""
    loop = thinker_loop(service)
    together = [(case, submit(loop, case)) for case in (*CASES, *reversed(CASES))]
    for case, collector in together:
        check_answer(case, collector)


@SAMPLING
def test_log_probabilities_are_those_of_the_official_logits(service: OmniService) -> None:
    """Of the raw logits: penalties and bias change the tokens, and not what a token's log probability is."""
    loop = thinker_loop(service)
    for case in CASES:
        collector = submit(loop, case, num_logprobs=20)
        assert collector.tokens() == THINKER[f"{case}.greedy_ids"][0].tolist()
        items = [each for each in collector.items if isinstance(each, TokenItem)]
        for item, logits in zip(items, THINKER[f"{case}.greedy_logits"][0], strict=True):
            assert item.logprobs is not None
            check_logprobs(item.logprobs, item.token, logits)
    (token,) = THINKER["text.greedy_ids"][0, :1].tolist()
    biased = submit(loop, "text", num_logprobs=1, logit_bias=((token, -100.0),), frequency_penalty=1.0)
    assert token not in biased.tokens()
    first = biased.items[0]
    assert isinstance(first, TokenItem) and first.logprobs is not None
    check_logprobs(first.logprobs, first.token, THINKER["text.greedy_logits"][0, 0])


def check_logprobs(found: TokenLogprobs, token: int | None, logits: np.ndarray) -> None:
    assert token is not None
    expected, top = logprobs(logits), most_likely(logits, len(found.top))
    assert abs(found.logprob - expected[token]) < 1e-4
    np.testing.assert_allclose([value for _, value in found.top], expected[top], atol=1e-4)
    assert found.top[0][0] == top[0]


@SAMPLING
def test_a_request_in_a_used_slot_has_its_own_repetition_penalty(service: OmniService) -> None:
    """The tokens of the prompt and of the answer count, those of the slot's earlier requests do not."""
    loop = thinker_loop(service)
    first = submit(loop, "text", repetition_penalty=1.3).tokens()
    expected = penalized_greedy("text", 1.3)
    assert first[: len(expected)] == expected
    submit(loop, "video", repetition_penalty=1.3).tokens()
    assert submit(loop, "text", repetition_penalty=1.3).tokens() == first


def penalized_greedy(case: str, penalty: float) -> list[int]:
    """The answer by the recorded logits, as far as it is the recorded one."""
    seen = set(THINKER[f"{case}.input_ids"][0].tolist())
    tokens: list[int] = []
    for logits, recorded in zip(
        THINKER[f"{case}.greedy_logits"][0], THINKER[f"{case}.greedy_ids"][0], strict=True
    ):
        row = logits.copy()
        for token in seen:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        tokens.append(int(row.argmax()))
        if tokens[-1] != recorded:
            break
        seen.add(tokens[-1])
    return tokens
