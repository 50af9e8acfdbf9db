"""Edits of logits on a GPU: as on the CPU, without waiting, and between the captured graphs of a thinker."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import thinker_clients
import thinker_isolation
import torch
from collector import Collector
from sampling_reference import WalkMatcher, check_greedy

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.device_sampler import DeviceSampler
from mingc.runtime.thinker.logit_edits import logit_edits, top_logprobs
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.scheduler import ThinkerScheduler
from mingc.runtime.thinker.token_matcher import MaskWords, full_mask

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
LONG_CYCLES = 2_000_000_000  # about a second
VOCAB = 157_184
RULES = [
    SamplingParams(presence_penalty=0.5, frequency_penalty=0.25, repetition_penalty=1.3),
    SamplingParams(logit_bias=((3, 4.5), (VOCAB - 1, -100.0), (4, 0.1))),
    SamplingParams(frequency_penalty=-1.0, logit_bias=((5, 1.0),)),
    SamplingParams(),
]


def masks() -> list[MaskWords | None]:
    words = np.random.default_rng(0).integers(-(1 << 31), 1 << 31, (4, len(full_mask(VOCAB))), np.int32)
    return [None, words[1], words[2], words[3]]


def edit(sampler: DeviceSampler, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Counts, edits, a greedy token of each row, its count and its log probabilities."""
    slots = 1 + rows
    raw = logits.index_select(0, rows)
    sampler.begin_counts(
        np.arange(1, 5), [np.array([3, 3, 7]), np.zeros(0, np.int64), np.array([9]), np.array([5])]
    )
    sampler.edit_(logits, rows, slots, logit_edits(RULES, [(1,), (2,), (), ()], masks()))
    tokens = sampler.sample(logits, {"slots": slots}, is_random=False)
    sampler.count(tokens, slots)
    return top_logprobs(raw, tokens)


def given(device: torch.device) -> tuple[DeviceSampler, torch.Tensor, torch.Tensor]:
    sampler = DeviceSampler(None, num_slots=5, vocab_size=VOCAB, device=device)
    logits = 3 * torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(1)).bfloat16().float()
    return sampler, logits.to(device), torch.arange(4, device=device)


def test_edits_are_those_of_the_cpu() -> None:
    values = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        sampler, logits, rows = given(device)
        logprobs = edit(sampler, logits, rows)
        values.append((logits.cpu(), logprobs.cpu(), sampler._counts.cpu()))
    (expected, logprobs, counts), (found, found_logprobs, found_counts) = values
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(found.isinf(), expected.isinf()) and torch.equal(found_counts, counts)
    assert torch.equal(found_logprobs[:, 21:], logprobs[:, 21:]), "the same tokens in the same order"
    torch.testing.assert_close(found_logprobs, logprobs, rtol=1e-5, atol=1e-5)


def test_an_edited_step_is_launched_without_waiting() -> None:
    with torch.inference_mode():
        sampler, logits, rows = given(torch.device("cuda", 0))
        AsyncHostCopy(edit(sampler, logits, rows)).wait()  # allocates what the next call uses again
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG_CYCLES)
        ended = torch.cuda.Event()
        ended.record()
        copy = AsyncHostCopy(edit(sampler, logits, rows))
        assert not ended.query()
        assert copy.wait()[0].shape == (4, 41)


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    path = tmp_path_factory.mktemp("edited") / "tiny"
    cache = os.environ.get("MINGC_TEST_CACHE")
    thinker_isolation.make_artifact(
        path,
        target="cuda",
        dtype="float32",
        batch_sizes="1,8,32",
        jobs=os.cpu_count() or 1,
        cache=Path(cache) if cache else None,
    )
    return open_artifact(path)


def test_captured_steps_of_edited_and_other_requests_choose_what_numpy_chooses(artifact: Artifact) -> None:
    check_steps(artifact, torch.device("cuda", 0))


def check_steps(artifact: Artifact, device: torch.device) -> None:
    """Answers of 16 requests follow their rules, from the raw logits that the same steps recorded."""
    worker = thinker_clients.TracingWorker(artifact, device, is_static=True)
    requests = thinker_clients.make_requests(thinker_clients.thinker_parameters(artifact), count=16)
    rules: list[dict[str, Any]] = [
        {},
        {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.2, "num_logprobs": 20},
        {"logit_bias": ((9, 100.0), (11, -100.0)), "num_logprobs": 0},
        {"min_tokens": 30, "banned_tokens": (5,)},
    ]
    loop = ThinkerLoop(
        worker,
        ThinkerScheduler(
            PagePool(worker.num_pages, worker.page_size),
            max_running=16,
            chunk=worker.chunk,
            prefill_policy=ChunkedPrefillPolicy(num_layer_groups=worker.num_layer_groups),
            max_context=thinker_clients.CONTEXT_TOKENS,
            max_waiting=16,
        ),
        stop_ids=(),
        vocab_size=worker.vocab_size,
    )
    loop.start()
    try:
        asked = []
        for number, request in enumerate(requests):
            params = SamplingParams(max_tokens=40, **rules[number % 4])
            options = {"after": number % 3} if number % 2 else None
            matcher = None if options is None else WalkMatcher(worker.vocab_size, **options)
            answer = Collector()
            loop.submit(request.prompt, params, 1, answer.put, recorder=answer.recorder, matcher=matcher)
            walk = None if options is None else WalkMatcher(worker.vocab_size, **options)
            asked.append((answer, request.prompt, params, walk))
        for answer, prompt, params, walk in asked:
            assert len(answer.tokens()) == 40
            check_greedy(answer, prompt, params, walk)
    finally:
        loop.stop()
        worker.close()
