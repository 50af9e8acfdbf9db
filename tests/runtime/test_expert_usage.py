"""Experts that decode steps read: counts against the recorded router choices, and answers that do not change."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from collector import Collector
from eager_export import copy_of, export_eager
from fake_engines import CPU
from manifest_edit import edit_manifest
from mingc_command import ENVIRONMENT, serving
from recorded_thinker import CASES, THINKER, thinker_prompt

from mingc.artifacts.artifact import open_artifact
from mingc.errors import ConfigError
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.device_sampler import sampling_columns
from mingc.runtime.thinker.expert_usage import ExpertUsage
from mingc.runtime.thinker.startup import create_worker
from mingc.runtime.thinker.step import DecodeStep, PrefillStep
from mingc.runtime.thinker.worker import StepOptions, ThinkerWorker

TOP_K = THINKER["text.moe_topk_ids"].shape[-1]
EVERY_STEP_S = 1e-9
WAYS = {"host sampling": StepOptions(), "device sampling": StepOptions(is_static=True)}
IDS, POSITIONS = THINKER["text.input_ids"][0], THINKER["text.position_ids"][:, 0]
PAGES = 4  # of a request


@pytest.fixture(scope="module", params=WAYS)
def worker(eager_artifact: Path, request: pytest.FixtureRequest) -> ThinkerWorker:
    artifact = open_artifact(eager_artifact)
    stage = load_stage(artifact, "thinker", CPU)
    return create_worker(stage, artifact.manifest, num_pages=40, device=CPU, options=WAYS[request.param])


def prefill(worker: ThinkerWorker, row: int, num_tokens: int) -> None:
    """The first tokens of the recorded text, as request `row` of a decode step."""
    step = PrefillStep(
        input_ids=IDS[:num_tokens],
        positions=POSITIONS[:, :num_tokens],
        embed_kind=np.zeros(num_tokens, np.int64),
        embeds=None,
        counts=np.array([num_tokens]),
        starts=np.zeros(1, np.int64),
        pages=pages_of(row)[None],
        slots=np.array([1 + row]),
    )
    worker.prefill(step)


def pages_of(row: int) -> np.ndarray:
    return 1 + PAGES * row + np.arange(PAGES)


def decode_step(worker: ThinkerWorker, places: Sequence[int], *, counts_experts: bool) -> DecodeStep:
    """The recorded text's tokens at `places`, each of a request that has the tokens before it."""
    at = np.array(places)
    step = DecodeStep(
        input_ids=IDS[at],
        positions=POSITIONS[0, at],
        lengths=at + 1,
        pages=np.stack([pages_of(row) for row in range(len(at))]),
        counts_experts=counts_experts,
    )
    if not worker.samples_on_device:
        return step
    sampling = np.array([sampling_columns(SamplingParams(temperature=0.7), 0.5)] * len(at))
    return replace(step, slots=1 + np.arange(len(at)), sampling=sampling)


def run(worker: ThinkerWorker, step: DecodeStep) -> tuple[list[int], np.ndarray]:
    """The tokens (sampled on the device) and logits of a step."""
    count = len(step.input_ids)
    if not worker.samples_on_device:
        return [], worker.decode(step)[:count].numpy().copy()
    launched = worker.launch_decode(step, with_logits=True)
    logits = launched.logits()
    assert logits is not None
    return launched.wait(), logits.copy()


def recorded_counts(places: Sequence[int]) -> list[int]:
    """Different experts that the official router selects for these tokens of the text, by layer."""
    return [len(set(layer[0, list(places)].flatten().tolist())) for layer in THINKER["text.moe_topk_ids"]]


@pytest.mark.parametrize(
    "places",
    [[47], [12, 30], [5, 17, 29, 41], [3, 9, 14, 21, 28, 33, 40, 46]],
    ids=lambda at: f"batch {len(at)}",
)
def test_counts_are_those_of_the_recorded_choice(worker: ThinkerWorker, places: list[int]) -> None:
    """The counted step has the bits of one that is not, and leaves the same keys and values."""
    for row, place in enumerate(places):
        prefill(worker, row, place)
    tokens, logits = run(worker, decode_step(worker, places, counts_experts=False))
    state = {name: value.clone() for name, value in worker.state.items()}
    for row, place in enumerate(places):
        prefill(worker, row, place)
    found = run(worker, decode_step(worker, places, counts_experts=True))
    assert found[0] == tokens and np.array_equal(found[1], logits)
    assert all(torch.equal(worker.state[name], value) for name, value in state.items())
    assert worker.experts_read is not None
    assert worker.experts_read.num_rows == len(places)
    assert worker.experts_read.wait() == recorded_counts(places)


def test_rows_of_padding_are_counted_as_the_engines_read_their_experts(worker: ThinkerWorker) -> None:
    """Three requests take a batch of four, whose last row is token 0 at the first place of page 0."""
    places = [5, 17, 29]
    for row, place in enumerate(places):
        prefill(worker, row, place)
    step = decode_step(worker, places, counts_experts=True)
    run(worker, step)
    assert worker.experts_read is not None and worker.experts_read.num_rows == 4
    padded = worker.experts_read.wait()

    def joined(values: np.ndarray, value: int) -> np.ndarray:
        return np.concatenate([values, np.full((1, *values.shape[1:]), value)])

    whole = replace(
        step,
        input_ids=joined(step.input_ids, 0),
        positions=joined(step.positions, 0),
        lengths=joined(step.lengths, 1),
        pages=joined(step.pages, 0),
    )
    if step.slots is not None and step.sampling is not None:
        whole = replace(whole, slots=joined(step.slots, 0), sampling=joined(step.sampling, 0))
    run(worker, whole)
    assert worker.experts_read.wait() == padded
    own = recorded_counts(places)
    assert all(each <= most <= each + TOP_K for each, most in zip(own, padded, strict=True))
    assert padded != own, "the row of padding selects no other expert: the case tests nothing"


def submit(service: OmniService, case: str) -> Collector:
    assert service._chat is not None
    collector = Collector()
    sampling = SamplingParams(max_tokens=THINKER[f"{case}.greedy_ids"].shape[1], ignore_eos=True)
    service._chat.loop.submit(thinker_prompt(case), sampling, 1, collector.put, records_logits=True)
    return collector


def logits_of(collector: Collector) -> np.ndarray:
    collector.tokens()
    return np.stack([item.logits for item in collector.items if isinstance(item, TokenItem)])


def as_recorded(case: str, collector: Collector) -> bool:
    close = np.allclose(logits_of(collector), THINKER[f"{case}.greedy_logits"][0], rtol=0, atol=1e-3)
    return close and collector.tokens() == THINKER[f"{case}.greedy_ids"][0].tolist()


def answers(
    artifact: Path, steps: StepOptions, interval_s: float
) -> tuple[dict[str, np.ndarray], OmniService]:
    """Logits of every recorded case, asked one after the other, and the service, which is closed."""
    options = EngineOptions(
        max_total_tokens=2048, steps=steps, loads_speech=False, expert_usage_interval_s=interval_s
    )
    service = open_service(artifact, options)
    try:
        found = {}
        for case in CASES:
            collector = submit(service, case)
            assert as_recorded(case, collector), case
            found[case] = logits_of(collector)
        if interval_s:  # together their batches differ, and so their last bits
            for case, collector in [(case, submit(service, case)) for case in CASES]:
                assert as_recorded(case, collector), case
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
    return found, service


@pytest.mark.parametrize(
    "way", ["host sampling", pytest.param("device sampling", marks=pytest.mark.exhaustive)]
)
def test_answers_are_the_same_to_the_bit_while_every_step_is_counted(
    eager_artifact: Path, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = WAYS[way]
    plain, service = answers(eager_artifact, steps, 0.0)
    assert service.load.experts_read == {}
    with caplog.at_level(logging.INFO, "mingc.engine"):
        counted, service = answers(eager_artifact, steps, EVERY_STEP_S)
    for case in CASES:
        assert np.array_equal(counted[case], plain[case]), case
    check_totals(service, caplog)


def check_totals(service: OmniService, caplog: pytest.LogCaptureFixture) -> None:
    """A step of one token reads as many experts as a token selects; steps of more read more, and no more than all."""
    totals = service.load.experts_read
    alone = sum(THINKER[f"{case}.greedy_ids"].shape[1] - 1 for case in CASES)
    num_steps, total = totals[1]
    assert num_steps >= alone and total == TOP_K * num_steps
    assert {*totals} > {1}
    num_experts = THINKER["image.router0.gate.logits"].shape[-1]
    for num_rows, (steps, experts) in totals.items():
        assert num_rows == 1 or TOP_K < experts / steps <= min(num_rows * TOP_K, num_experts)
    lines = [each.getMessage() for each in caplog.records if "experts a layer" in each.getMessage()]
    assert len(lines) == sum(steps for steps, _ in totals.values())
    assert "a decode step of 1 requests in a batch of 1 read 4.0 experts a layer, 4 to 4" in lines


def test_ranks_count_as_one(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Both ranks run the counted step, one of them in a process of its own."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    with caplog.at_level(logging.INFO, "mingc.engine"):
        _, service = answers(export_eager("--tp", 2), StepOptions(), EVERY_STEP_S)
    check_totals(service, caplog)


def test_a_step_is_counted_once_in_an_interval() -> None:
    usage = ExpertUsage(interval_s=10.0)
    assert [usage.take_turn(now) for now in (3.0, 3.5, 12.9, 13.0, 22.0, 40.0, 49.0, 50.0)] == [
        *(True, False, False, True),
        *(False, True, False, True),
    ]
    assert not any(ExpertUsage().take_turn(now) for now in (0.0, 1e9))


def test_totals_are_sums_by_rows_that_a_reader_may_keep() -> None:
    usage = ExpertUsage(interval_s=1.0)
    assert usage.add(4, [9, 10, 14]) == 11.0
    kept = usage.totals
    assert (usage.add(4, [8, 8, 8]), usage.add(2, [5, 6, 7])) == (8.0, 6.0)
    assert kept == {4: (1, 11.0)} and usage.totals == {4: (2, 19.0), 2: (1, 6.0)}


@pytest.mark.parametrize("interval_s", [0.0, 1e6])
def test_the_policy_sees_no_counted_step(
    eager_artifact: Path, interval_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is counted takes longer than a captured one, from which chunks get their share of time."""
    options = EngineOptions(
        max_total_tokens=2048,
        steps=StepOptions(is_static=True),
        loads_speech=False,
        expert_usage_interval_s=interval_s,
    )
    service = open_service(eager_artifact, options)
    try:
        assert service._chat is not None
        seen: list[int] = []
        policy = service._chat.loop.scheduler.prefill_policy

        def observe(self: Any, ms: float, *, prefill_ms: float, num_decoding: int) -> None:
            seen.append(num_decoding)

        monkeypatch.setattr(type(policy), "observe", observe)
        assert as_recorded("text", submit(service, "text"))
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
    num_decodes = THINKER["text.greedy_ids"].shape[1] - 1
    assert seen.count(1) == num_decodes - (1 if interval_s else 0)


def test_an_artifact_that_does_not_say_how_experts_are_selected_is_not_counted(
    eager_artifact: Path, tmp_path: Path
) -> None:
    artifact = copy_of(eager_artifact, tmp_path)
    edit_manifest(artifact, lambda document: document["parameters"]["thinker"].pop("router"))
    with pytest.raises(ConfigError, match="does not say how the routers of thinker select experts") as caught:
        open_service(artifact, EngineOptions(expert_usage_interval_s=5.0))
    assert caught.value.where == "--expert-usage-interval"


@pytest.mark.parametrize("interval_s", [-1.0, math.inf, math.nan, 1e300])
def test_intervals_that_cannot_be_are_refused(interval_s: float) -> None:
    with pytest.raises(ConfigError, match="--expert-usage-interval is"):
        EngineOptions(expert_usage_interval_s=interval_s)


def test_a_server_exports_what_its_steps_read(eager_artifact: Path) -> None:
    body = {"messages": [{"role": "user", "content": "Count."}], "max_tokens": 6, "ignore_eos": True}
    with serving(eager_artifact, "--expert-usage-interval", EVERY_STEP_S) as server:
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
        assert answer.json()["usage"]["completion_tokens"] == 6
        lines = httpx.get(f"{server.url}/metrics", trust_env=False).text.splitlines()
    assert 'mingc_thinker_counted_steps_total{batch="1"} 5.0' in lines, "the first token is the prefill's"
    assert f'mingc_thinker_experts_read_total{{batch="1"}} {5.0 * TOP_K}' in lines
