"""Probe without engines: what is chosen, valid inputs, floors, baselines."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mingc.artifacts.manifest import EngineWork, ModelParameters
from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.errors import BundleError, ConfigError
from mingc.report import to_json
from mingc.runtime.probe import ProbeOptions, probe
from mingc.runtime.probe_baseline import compare, read_baseline
from mingc.runtime.probe_inputs import ProbeCase, room
from mingc.runtime.probe_report import Ceilings, EngineFigures, Latency, ProbeReport, floor_of
from mingc.runtime.timing import Stopwatch, percentile

CEILINGS = Ceilings(device="cpu", copy_tb_s=2.0, matmul_tflop_s=100.0, matmul_dtype="float32")
SLOT_TOKENS, PAGES, PAGE_SIZE = 40, 8, 16


def tensor(name: str, dtype: DType, *shape: int | str) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


STEP = GraphSpec(
    name="step",
    inputs=(
        tensor("embeds", "float32", "B", 8),
        tensor("slots", "int64", "B"),
        tensor("lengths", "int64", "B"),
    ),
    outputs=(tensor("hidden", "float32", "B", 8),),
    state=(tensor("k_slots.0", "float32", "S", SLOT_TOKENS, 2, 4),),
    dims=(Dim(name="B", minimum=1, maximum=4, buckets=(1, 4)), Dim(name="S", minimum=2, maximum=99)),
)
DECODE = GraphSpec(
    name="decode",
    inputs=(tensor("lengths", "int64", "B"), tensor("page_table", "int32", "B", "P")),
    outputs=(tensor("logits", "float32", "B", 8),),
    state=(tensor("k_pages.0", "float32", "KV", 2, 4),),
    dims=(
        Dim(name="B", minimum=1, maximum=4, buckets=(4,)),
        Dim(name="P", minimum=1, maximum=PAGES, buckets=(PAGES,)),
        Dim(name="KV", minimum=32, maximum=1 << 20, multiple=PAGE_SIZE),
    ),
)


@pytest.fixture
def parameters(monkeypatch: pytest.MonkeyPatch) -> ModelParameters:
    monkeypatch.setattr("mingc.runtime.probe_inputs.page_size", lambda parameters: PAGE_SIZE)
    return ModelParameters()


def figures(median: float, engine: str = "cfm.sample", context: int | None = None) -> EngineFigures:
    latency = Latency(
        median_ms=median,
        p95_ms=median,
        p99_ms=median,
        min_ms=median,
        repetitions=3,
        is_captured=False,
        warm_ms=None,
        uncaptured_ms=None,
        enqueue_ms=None,
    )
    return EngineFigures(engine=engine, sizes={"B": 2}, context_tokens=context, instances=1, latency=latency)


def report(*rows: EngineFigures) -> ProbeReport:
    return ProbeReport(
        artifact="here",
        model="tiny",
        dtype="float32",
        torch="2.13.0",
        ceilings=CEILINGS,
        tolerance=None,
        engines=rows,
        floors=(),
        regressions=(),
        only_here=(),
        only_in_baseline=(),
    )


@pytest.mark.parametrize(
    "options, word",
    [
        ({"context": -1}, "--context"),
        ({"repetitions": 0}, "--repetitions"),
        ({"tolerance": -0.1}, "--tolerance"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ProbeOptions(**options)


def test_engines_are_chosen_by_stage_graph_and_batch() -> None:
    options = ProbeOptions(engines=("talker", "cfm.sample"), batch_sizes=(1, 4))
    assert options.choose("talker.step", {"B": 4})
    assert not options.choose("talker.step", {"B": 2})
    assert options.choose("talker.prefill", {"T": 2}), "a graph without a batch has no batch to miss"
    assert options.choose("cfm.sample", {"B": 1}) and not options.choose("cfm.speaker", {"N": 1})


def test_an_engine_that_is_not_there_is_refused_with_those_that_are(
    bundle_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingc.runtime.probe.check_fingerprint", lambda recorded, here: None)
    with pytest.raises(ConfigError) as caught:
        probe(bundle_path, ProbeOptions(engines=("cfm",)))
    assert caught.value.where == "--engine"
    assert caught.value.fix == "it has audio_encoder, audio_encoder.encode"


def test_every_request_has_a_slot_of_its_own_and_a_context(parameters: ModelParameters) -> None:
    case = ProbeCase(stage="talker", spec=STEP, sizes={"B": 4}, context=30, parameters=parameters)
    made = case.make(torch.device("cpu"))
    assert made["slots"].tolist() == [1, 2, 3, 4]
    assert made["lengths"].tolist() == [30] * 4
    assert made["k_slots.0"].shape == (5, SLOT_TOKENS, 2, 4)
    assert made["k_slots.0"].abs().min() > 0, "zeros would take less power than numbers"
    assert case.border_bytes() == 4 * (8 * 4 + 8 + 8 + 8 * 4)


def test_every_request_has_pages_of_its_own(parameters: ModelParameters) -> None:
    case = ProbeCase(
        stage="thinker", spec=DECODE, sizes={"B": 4, "P": PAGES}, context=50, parameters=parameters
    )
    made = case.make(torch.device("cpu"))
    assert made["lengths"].tolist() == [51] * 4, "of paged requests the new token counts"
    used = made["page_table"][:, :4]
    assert made["page_table"].dtype == torch.int32
    assert sorted(used.flatten().tolist()) == list(range(1, 17))
    assert not made["page_table"][:, 4:].any()
    assert made["k_pages.0"].shape[0] == 17 * PAGE_SIZE


def test_the_room_of_a_request_is_its_slot_or_its_pages() -> None:
    assert room(STEP, {"B": 1}, PAGE_SIZE) == SLOT_TOKENS
    assert room(DECODE, {"B": 4, "P": PAGES}, PAGE_SIZE) == PAGES * PAGE_SIZE
    assert room(GraphSpec(name="sample", inputs=(), outputs=()), {}, PAGE_SIZE) == float("inf")


def test_an_input_that_nobody_explained_is_refused_by_name(parameters: ModelParameters) -> None:
    spec = GraphSpec(name="odd", inputs=(tensor("colours", "int64", 3),), outputs=())
    case = ProbeCase(stage="cfm", spec=spec, sizes={}, context=0, parameters=parameters)
    with pytest.raises(BundleError, match="colours"):
        case.make(torch.device("cpu"))


def test_floors_grow_with_the_context() -> None:
    work = EngineWork(
        dims={"B": 2},
        flops=10**11,
        weight_bytes=10**9,
        state_bytes=10**6,
        context_flops=10**9,
        context_bytes=10**7,
    )
    floor = floor_of(figures(4.0, context=100), work, border_bytes=0, ceilings=CEILINGS)
    assert floor.flops_floor_ms == pytest.approx(2.0)
    assert floor.bytes_floor_ms == pytest.approx(1.0005)
    assert floor.roofline == pytest.approx(0.5)


def test_weights_used_again_are_read_again_as_far_as_the_cache_does_not_hold_them() -> None:
    work = EngineWork(dims={}, flops=0, weight_bytes=100, reuse_bytes=900, state_bytes=0)

    def read(cache_bytes: int | None) -> int:
        ceilings = replace(CEILINGS, cache_bytes=cache_bytes)
        return floor_of(figures(1.0), work, border_bytes=0, ceilings=ceilings).weight_bytes

    assert read(None) == 100 and read(100) == 100
    assert read(25) == 100 + 900 * 3 // 4


def test_only_what_is_slower_than_the_tolerance_allows_is_a_regression() -> None:
    before = [figures(1.0), figures(1.0, "talker.step"), figures(1.0, "gone")]
    after = [figures(1.09), figures(1.2, "talker.step"), figures(9.0, "new")]
    found = compare(before, after, tolerance=0.1)
    assert [(each.engine, each.baseline_ms, each.median_ms) for each in found.regressions] == [
        ("talker.step B=2", 1.0, 1.2)
    ]
    assert found.regressions[0].slower_by == pytest.approx(0.2)
    assert found.only_here == ("new B=2",) and found.only_in_baseline == ("gone B=2",)


def test_figures_at_another_context_are_not_compared() -> None:
    found = compare([figures(1.0, context=256)], [figures(9.0, context=1024)], tolerance=0.1)
    assert not found.regressions and found.only_here == ("cfm.sample B=2 +1024",)


def test_a_report_reads_back_as_a_baseline(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(to_json(report(figures(1.5))), encoding="utf-8")
    assert read_baseline(path) == report(figures(1.5))


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"engines": []})])
def test_what_is_no_report_is_no_baseline(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is no baseline"):
        read_baseline(path)


def test_percentiles_are_samples() -> None:
    samples = [float(value) for value in range(1, 101)]
    assert percentile(samples, 0.95) == 95.0
    assert percentile(samples, 0.99) == 99.0
    assert percentile([7.0], 0.99) == 7.0


def test_a_stopwatch_calls_as_often_as_asked_and_knows_no_enqueueing_on_a_cpu() -> None:
    calls: list[int] = []
    watch = Stopwatch(torch.device("cpu"))
    assert len(watch.samples_ms(lambda: calls.append(1), 5)) == 5
    assert len(calls) > 5, "the first calls are not timed"
    assert watch.enqueue_ms(lambda: None, 3) is None
