"""Probe without engines: choice of engines, inputs, roofline bounds, baselines, the patch embedding."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from manifest_edit import edit_manifest
from probe_rows import latency
from safetensors.torch import save_file

from mingc.artifacts.manifest import EngineCost
from mingc.artifacts.spec import Dim, DType, GraphSpec, TensorSpec
from mingc.console.report import to_json
from mingc.errors import ArtifactError, ConfigError
from mingc.kernels.sample_tokens import NUM_COLUMNS, sample_tokens
from mingc.probe import prober
from mingc.probe.baseline import check_common, compare, differences, read_baseline
from mingc.probe.cold_start import ColdStart
from mingc.probe.inputs import ProbeCase, room
from mingc.probe.patch_embed import compare_patch_embed
from mingc.probe.prober import ProbeOptions, pairs, probe
from mingc.probe.report import (
    CacheRate,
    EngineFigures,
    FirstRequest,
    PeakRates,
    ProbeReport,
    StartPhase,
    Transfer,
    above_the_roof,
    roofline_bound,
)
from mingc.probe.stopwatch import Stopwatch, percentile
from mingc.runtime.engines import backends
from mingc.runtime.thinker.device_sampler import needs_sampling

PEAK_RATES = PeakRates(device="cpu", copy_tb_s=2.0, matmul_tflop_s=100.0, matmul_dtype="float32")
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


PARAMETERS = {"page_size": PAGE_SIZE}


def figures(median: float, engine: str = "cfm.sample", context: int | None = None) -> EngineFigures:
    return EngineFigures(
        engine=engine,
        sizes={"B": 2},
        context_tokens=context,
        layer_instances=1,
        latency=latency(median, median),
    )


def report(*rows: EngineFigures) -> ProbeReport:
    return ProbeReport(
        artifact="here",
        model="tiny",
        dtype="float32",
        torch="2.13.0",
        peak_rates=PEAK_RATES,
        tolerance=None,
        engines=rows,
        roofline_bounds=(),
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
        ({"tolerance": float("nan")}, "--tolerance nan"),
        ({"tolerance": float("inf")}, "--tolerance inf"),
        ({"engines": ("cfm", "talker.step"), "compare": "patch-embed"}, "--compare patch-embed"),
    ],
)
def test_invalid_options_are_refused(options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ProbeOptions(**options)


@pytest.mark.parametrize("engines", [None, ("vision_encoder",), ("cfm", "vision_encoder.encode")])
def test_the_patch_embedding_is_compared_when_its_stage_is_timed(engines: tuple[str, ...] | None) -> None:
    assert ProbeOptions(engines=engines, compare="patch-embed").compare == "patch-embed"


def test_engines_are_chosen_by_stage_graph_and_batch() -> None:
    options = ProbeOptions(engines=("talker", "cfm.sample"), batch_sizes=(1, 4))
    assert options.choose("talker.step", {"B": 4})
    assert not options.choose("talker.step", {"B": 2})
    assert options.choose("talker.prefill", {"T": 2}), "graphs without a batch dim ignore --batch"
    assert options.choose("cfm.sample", {"B": 1}) and not options.choose("cfm.speaker", {"N": 1})


def test_a_missing_engine_is_refused_with_the_names_of_all(
    artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingc.probe.prober.check_fingerprint", lambda recorded, here: None)
    with pytest.raises(ConfigError) as caught:
        probe(artifact_path, ProbeOptions(engines=("cfm",)))
    assert caught.value.where == "--engine"
    assert caught.value.fix == "it has audio_encoder, audio_encoder.encode"


@pytest.fixture
def probed(artifact_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact of one engine at N 1, 2 and 8, on whatever machine; timing it would fail the test."""
    monkeypatch.setattr("mingc.probe.prober.check_fingerprint", lambda recorded, here: None)
    for name in ("_Run", "measure_cold_start", "measure_transfers"):
        monkeypatch.setattr(
            f"mingc.probe.prober.{name}", lambda *given: pytest.fail("something was measured")
        )

    def add_graph(manifest: dict[str, Any]) -> None:
        whole = manifest["stages"]["audio_encoder"]["graphs"]
        graph = whole["encode"]
        graph["spec"]["dims"][1]["buckets"] = [16]
        manifest["parameters"]["audio_encoder"]["max_frames"] = 64  # what the bucket holds
        whole["other"] = {**graph, "spec": {**graph["spec"], "name": "other"}, "golden": graph["golden"]}
        whole["other"]["engines"] = [{**graph["engines"][0], "dims": {"N": 4, "T4": 16}}]

    edit_manifest(artifact_path, add_graph)
    return artifact_path


def test_bytes_of_a_text_and_places_in_a_picture_are_in_their_ranges() -> None:
    spec = GraphSpec(
        name="begin",
        inputs=(tensor("positions", "int64", "N", 3), tensor("ids", "int64", "B", 5)),
        outputs=(),
        dims=(
            Dim(name="B", minimum=1, maximum=8),
            Dim(name="N", minimum=32, maximum=4096, multiple=32),
        ),
    )
    case = ProbeCase(
        stage="image_dit",
        spec=spec,
        sizes={"B": 2, "N": 64},
        context=0,
        parameters={"max_positions": [9, 7, 8]},
    )
    made = case.make(torch.device("cpu"))
    assert made["positions"].shape == (64, 3) and 0 <= made["positions"].min() <= made["positions"].max() < 7
    assert made["ids"].shape == (2, 5) and 3 <= made["ids"].min() <= made["ids"].max() < 259


@pytest.mark.parametrize(
    "engines, batches, says",
    [
        (("audio_encoder.encode",), (4,), "no engine for batch 4 of audio_encoder.encode"),
        (
            ("audio_encoder.encode", "audio_encoder.other"),
            (1,),
            "no engine for batch 1 of audio_encoder.other",
        ),
        (None, (3, 4), "no engine for batch 3"),
    ],
)
def test_a_batch_size_that_a_chosen_engine_lacks_is_refused(
    probed: Path, engines: tuple[str, ...] | None, batches: tuple[int, ...], says: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        probe(probed, ProbeOptions(engines=engines, batch_sizes=batches))
    assert caught.value.message == says and caught.value.where == "--batch"


def test_nothing_is_timed_for_a_baseline_or_a_comparison_without_a_counterpart(probed: Path) -> None:
    with pytest.raises(ConfigError, match="none of the engines"):
        probe(probed, ProbeOptions(), baseline=report(figures(1.0)))
    with pytest.raises(ConfigError, match="no vision encoder"):
        probe(probed, ProbeOptions(compare="patch-embed"))


def test_every_request_has_its_own_slot_and_a_context() -> None:
    case = ProbeCase(stage="talker", spec=STEP, sizes={"B": 4}, context=30, parameters=PARAMETERS)
    made = case.make(torch.device("cpu"))
    assert made["slots"].tolist() == [1, 2, 3, 4]
    assert made["lengths"].tolist() == [30] * 4
    assert made["k_slots.0"].shape == (5, SLOT_TOKENS, 2, 4)
    assert made["k_slots.0"].abs().min() > 0, "zeros would take less power than numbers"
    assert case.io_bytes() == 4 * (8 * 4 + 8 + 8 + 8 * 4)


def test_every_request_has_its_own_pages() -> None:
    case = ProbeCase(
        stage="thinker", spec=DECODE, sizes={"B": 4, "P": PAGES}, context=50, parameters=PARAMETERS
    )
    made = case.make(torch.device("cpu"))
    assert made["lengths"].tolist() == [51] * 4, "lengths of paged requests include the new token"
    used = made["page_table"][:, :4]
    assert made["page_table"].dtype == torch.int32
    assert sorted(used.flatten().tolist()) == list(range(1, 17))
    assert not made["page_table"][:, 4:].any()
    assert made["k_pages.0"].shape[0] == 17 * PAGE_SIZE


def test_the_room_of_a_request_is_its_slot_or_its_pages() -> None:
    assert room(STEP, {"B": 1}, PAGE_SIZE) == SLOT_TOKENS
    assert room(DECODE, {"B": 4, "P": PAGES}, PAGE_SIZE) == PAGES * PAGE_SIZE
    assert room(GraphSpec(name="sample", inputs=(), outputs=()), {}, PAGE_SIZE) == float("inf")


def test_an_unknown_integer_input_is_refused_by_name() -> None:
    spec = GraphSpec(name="odd", inputs=(tensor("colours", "int64", 3),), outputs=())
    case = ProbeCase(stage="cfm", spec=spec, sizes={}, context=0, parameters=PARAMETERS)
    with pytest.raises(ArtifactError, match="colours"):
        case.make(torch.device("cpu"))


def test_roofline_bounds_grow_with_the_context() -> None:
    cost = EngineCost(
        dims={"B": 2},
        flops=10**11,
        weight_bytes=10**9,
        state_bytes=10**6,
        context_flops=10**9,
        context_bytes=10**7,
    )
    bound = roofline_bound(figures(4.0, context=100), cost, io_bytes=0, peak_rates=PEAK_RATES)
    assert bound.compute_bound_ms == pytest.approx(2.0)
    assert bound.memory_bound_ms == pytest.approx(1.0005)
    assert bound.roofline == pytest.approx(0.5)


def test_reused_weights_count_again_beyond_the_cache_size() -> None:
    cost = EngineCost(dims={}, flops=0, weight_bytes=100, reuse_bytes=900, state_bytes=0)

    def read(cache_bytes: int | None) -> int:
        peak_rates = replace(PEAK_RATES, cache_bytes=cache_bytes)
        return roofline_bound(figures(1.0), cost, io_bytes=0, peak_rates=peak_rates).weight_bytes

    assert read(None) == 100 and read(100) == 100
    assert read(25) == 100 + 900 * 3 // 4


def test_peak_rates_are_of_the_fastest_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A median of calls beside other work made engines faster than their bound."""
    cached = [[3.0, 2.0], [5.0, 1.0]] * 6  # sum and product with a vector, for each size
    samples = iter([[10.0, 2.0, 30.0], [9.0, 8.0, 0.5], [7.0, 100.0, 4.0], *cached])
    monkeypatch.setattr(Stopwatch, "samples_ms", lambda *_: next(samples))
    rates = Stopwatch(torch.device("cpu")).peak_rates(torch.float32)
    num_bytes = 4 * 2**26
    assert rates.copy_tb_s == pytest.approx(2 * num_bytes / 2.0 / 1e9, abs=1e-3)
    assert rates.read_tb_s == rates.memory_tb_s == pytest.approx(num_bytes / 0.5 / 1e9, abs=1e-3)
    assert rates.matmul_tflop_s == pytest.approx(2 * 1024**3 / 4.0 / 1e9, abs=1e-3)
    assert [each.num_bytes for each in rates.cache_rates] == [4**power << 10 for power in range(3, 9)]
    assert rates.cache_rates[-1].read_tb_s == pytest.approx(2**26 / 1.0 / 1e9, abs=1e-4)
    slower = replace(rates, copy_tb_s=9.0, read_tb_s=0.1, matmul_tflop_s=0.2)
    slower = replace(slower, cache_rates=tuple(replace(each, read_tb_s=0.05) for each in rates.cache_rates))
    fast_caches = tuple(replace(each, read_tb_s=max(each.read_tb_s, 0.05)) for each in rates.cache_rates)
    assert rates.faster(slower) == replace(rates, copy_tb_s=9.0, cache_rates=fast_caches)


def test_rates_of_a_slow_machine_are_not_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounded to a place after the point, a slow rate was 0 and the bounds divided by it; a fast one keeps digits."""
    monkeypatch.setattr(Stopwatch, "samples_ms", lambda *_: [12_345.678])
    rates = Stopwatch(torch.device("cpu")).peak_rates(torch.float32)
    assert rates.matmul_tflop_s == pytest.approx(2 * 1024**3 / 12_345.678 / 1e9, rel=5e-4)
    assert rates.read_tb_s == pytest.approx(4 * 2**26 / 12_345.678 / 1e9, rel=5e-4)
    assert rates.cache_rates[0].read_tb_s == pytest.approx(65_536 / 12_345.678 / 1e9, rel=5e-4)
    cost = EngineCost(dims={}, flops=10**6, weight_bytes=10**6, state_bytes=0)
    assert roofline_bound(figures(1.0), cost, io_bytes=0, peak_rates=rates).compute_bound_ms > 0


def test_the_memory_bound_takes_the_faster_of_copying_and_reading() -> None:
    cost = EngineCost(dims={}, flops=0, weight_bytes=6_000_000_000, state_bytes=0)
    for read, expected in ((0.0, 3.0), (1.0, 3.0), (3.0, 2.0)):
        rates = replace(PEAK_RATES, read_tb_s=read)
        assert roofline_bound(figures(4.0), cost, 0, rates).memory_bound_ms == pytest.approx(expected)


def test_of_two_measurements_of_a_machine_each_rate_is_the_higher_one() -> None:
    def rates(copy: float, read: float, matmul: float, *caches: float) -> PeakRates:
        return replace(
            PEAK_RATES,
            copy_tb_s=copy,
            read_tb_s=read,
            matmul_tflop_s=matmul,
            cache_rates=tuple(
                CacheRate(num_bytes=size, read_tb_s=rate) for size, rate in enumerate(caches, 1)
            ),
        )

    first, second = rates(1.0, 5.0, 3.0, 7.0, 2.0), rates(2.0, 4.0, 6.0, 6.0, 3.0)
    assert first.faster(second) == second.faster(first) == rates(2.0, 5.0, 6.0, 7.0, 3.0)


def test_the_memory_roof_is_of_a_cache_that_holds_the_bytes() -> None:
    """Memory 2 TB/s; the smallest size has the time of the call in its rate."""
    sizes = ((64, 3.0), (256, 9.0), (1024, 5.0))
    caches = tuple(CacheRate(num_bytes=size << 10, read_tb_s=rate) for size, rate in sizes)
    rates = replace(PEAK_RATES, cache_rates=caches)
    found = [rates.rate_of(size << 10) for size in (1, 64, 255, 256, 1000, 1024, 9999)]
    assert found == [9.0, 9.0, 9.0, 9.0, 9.0, 5.0, 5.0]
    assert PEAK_RATES.rate_of(1) == 2.0 and replace(rates, read_tb_s=7.0).rate_of(1 << 30) == 7.0
    cost = EngineCost(dims={}, flops=0, weight_bytes=512 << 10, state_bytes=256 << 10)
    bound = roofline_bound(figures(1.0), cost, 256 << 10, rates)
    assert bound.memory_roof_tb_s == 5.0
    assert bound.memory_bound_ms == pytest.approx((1 << 20) / 5e12 * 1e3)


def test_the_place_of_an_engine_under_the_roof() -> None:
    """2 GFLOP and 4 GB in 8 ms."""
    cost = EngineCost(dims={}, flops=2 * 10**9, weight_bytes=3 * 10**9, state_bytes=5 * 10**8)
    bound = roofline_bound(figures(8.0), cost, 5 * 10**8, PEAK_RATES)
    assert bound.intensity == pytest.approx(0.5)
    assert bound.achieved_tflop_s == pytest.approx(0.25)
    assert bound.achieved_tb_s == pytest.approx(0.5)
    assert bound.roofline == pytest.approx(0.25), "as the memory rate is 2 TB/s"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model": "other"}, "model tiny and other"),
        ({"dtype": "bfloat16"}, "dtype float32 and bfloat16"),
        ({"device": "cuda"}, "device cpu and cuda"),
        ({"buckets": [3]}, "none of the engines to be timed"),
    ],
)
def test_only_artifacts_that_differ_in_their_engines_are_timed_in_turns(
    change: dict[str, Any], says: str, probed: Path, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    shutil.copytree(probed, other)

    def apply(document: dict[str, Any]) -> None:
        if "model" in change:
            document["model"] = change["model"]
        elif "buckets" in change:
            for graph in document["stages"]["audio_encoder"]["graphs"].values():
                for dim in graph["spec"]["dims"]:
                    if dim["name"] == "N":
                        dim["buckets"] = change["buckets"]
                for engine in graph["engines"]:
                    engine["dims"] = {**engine["dims"], "N": 3} if engine["dims"] else None
        else:
            document["fingerprint"] |= change

    edit_manifest(other, apply)
    with pytest.raises(ConfigError, match=says) as caught:
        probe(probed, ProbeOptions(beside=other))
    assert caught.value.where == "--beside"


@pytest.fixture
def both(probed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Artifacts of the same graphs, with engines of aoti and of onnx."""

    def change(document: dict[str, Any]) -> None:
        for graph in document["stages"]["audio_encoder"]["graphs"].values():
            graph["engines"] = [{**each, "backend": "onnx"} for each in graph["engines"]]

    other = tmp_path / "other"
    shutil.copytree(probed, other)
    edit_manifest(other, change)

    class Run:
        """Takes 1 ms for an engine of aoti and 3 ms for one of another backend."""

        def __init__(self, artifact: object, options: object, progress: Callable[[str], None]) -> None:
            self.notes, self.peak_rates = [], PEAK_RATES

        def measure_peak_rates(self) -> PeakRates:
            return PEAK_RATES

        def load(self, artifact: object, stage: str) -> object:
            return artifact

        def time(self, artifact: object, target: Any, loaded: object) -> Any:
            assert loaded is artifact
            backend = target.engine.backend
            found = figures(1.0 if backend == "aoti" else 3.0)
            return replace(found, engine=target.name, sizes=target.sizes, backend=backend), None

    monkeypatch.setattr(prober, "_Run", Run)
    return probed, other


@pytest.mark.parametrize(
    "is_itself, other_backend, ratio, noted", [(False, "onnx", 3.0, False), (True, "aoti", 1.0, True)]
)
def test_engines_beside_are_timed_too(
    is_itself: bool, other_backend: str, ratio: float, noted: bool, both: tuple[Path, Path]
) -> None:
    first, other = both
    options = ProbeOptions(beside=first if is_itself else other, has_cold_start=False, has_transfers=False)
    made = probe(first, options)
    assert len(made.beside) == 4 and {each.ratio for each in made.beside} == {ratio}
    found = {(each.backend, each.other_backend) for each in made.beside}
    assert found == {("aoti", other_backend)}
    assert [note for note in made.notes if note.startswith("--beside")] == noted * [
        "--beside: 4 of 4 pairs have engines of aoti on both sides, audio_encoder.encode N=1 T4=16 the first; "
        "export one of the artifacts with another --backend"
    ]


def test_engines_beside_that_cannot_be_loaded_are_refused(
    both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = both
    alone: dict[str, Any] = {"beside": other, "has_cold_start": False, "has_transfers": False}
    absent = ("is not installed", "pip install it")
    monkeypatch.setattr(
        backends, "unavailable", lambda backend, device: absent if backend == "onnx" else None
    )
    with pytest.raises(ArtifactError, match="need backend onnx: is not installed") as caught:
        probe(first, ProbeOptions(**alone))
    assert (caught.value.where, caught.value.fix) == ("--beside", "pip install it")


def test_engines_of_two_artifacts_are_paired_by_title() -> None:
    here = [replace(figures(2.0), backend="aoti"), figures(1.0, "talker.step"), figures(1.0, context=3)]
    there = [figures(9.0, context=4), replace(figures(5.0), backend="onnx")]
    (pair,) = pairs(here, there)
    assert (pair.engine, pair.backend, pair.other_backend) == ("cfm.sample B=2", "aoti", "onnx")
    assert (pair.median_ms, pair.other_median_ms, pair.ratio) == (2.0, 5.0, 2.5)


def test_an_engine_above_its_roof_is_noted() -> None:
    cost = EngineCost(dims={}, flops=0, weight_bytes=6_000_000_000, state_bytes=0)
    below, above = (roofline_bound(figures(each), cost, 0, PEAK_RATES) for each in (4.0, 2.8))
    assert above_the_roof([below]) is None
    assert (
        "fault of the roof: 1 engine(s) were faster" in (note := above_the_roof([below, above]) or "")
        and " by 7 %" in note
    )


def test_only_a_slowdown_beyond_the_tolerance_is_a_regression() -> None:
    before = [figures(1.0), figures(1.0, "talker.step"), figures(1.0, "gone")]
    after = [figures(1.09), figures(1.2, "talker.step"), figures(9.0, "new")]
    found = compare(before, after, tolerance=0.1)
    assert [(each.engine, each.baseline_ms, each.min_ms) for each in found.regressions] == [
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


@pytest.mark.parametrize("text", ["", "[]", json.dumps({"engines": []}), "[" * 100_000])
def test_a_file_that_is_no_report_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a baseline"):
        read_baseline(path)


@pytest.mark.parametrize(
    "rows, says",
    [
        ((), "no engine"),
        ((figures(1.0), figures(2.0)), "twice"),
        ((figures(0.0),), "0.0 ms"),
        ((figures(-1.0),), "-1.0 ms"),
        ((figures(float("nan")),), "found nan"),
        ((figures(float("inf")),), "found inf"),
    ],
)
def test_a_baseline_without_comparable_engines_is_refused(
    tmp_path: Path, rows: tuple[EngineFigures, ...], says: str
) -> None:
    path = tmp_path / "baseline.json"
    path.write_text(to_json(report(*rows)), encoding="utf-8")
    with pytest.raises(ConfigError, match="is not a baseline") as caught:
        read_baseline(path)
    assert says in caught.value.message


def test_a_baseline_without_a_common_engine_is_refused_with_what_it_has() -> None:
    check_common([figures(1.0)], ["cfm.sample B=2", "other"])
    with pytest.raises(ConfigError, match=r"cfm\.sample B=2 \+256") as caught:
        check_common([figures(1.0, context=256)], ["cfm.sample B=2 +1024"])
    assert caught.value.where == "--baseline"


def test_changed_conditions_of_the_baseline_are_noted() -> None:
    here = report(figures(1.0))
    assert not differences(here, here)
    other = replace(
        here,
        model="large",
        dtype="bfloat16",
        torch="2.12.0",
        peak_rates=replace(PEAK_RATES, device="Other CPU"),
    )
    other = replace(other, ready_s=9.5, engines=(replace(figures(1.0), backend="onnx"),))
    here = replace(here, ready_s=4.5, engines=(replace(figures(1.0), backend="aoti"),))
    progress = differences(other, here)
    assert len(progress) == 6
    for word in ("large", "bfloat16", "2.12.0", "Other CPU", "baseline: 9.5, of this run: 4.5", "onnx"):
        assert any(word in note for note in progress)


def test_percentiles_are_samples() -> None:
    samples = [float(value) for value in range(1, 101)]
    assert percentile(samples, 0.95) == 95.0
    assert percentile(samples, 0.99) == 99.0
    assert percentile(samples[:10], 0.95) == 10.0, "of few samples the slowest one"
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([7.0, 8.0], 0.0) == 7.0


def test_a_stopwatch_on_a_cpu_times_the_requested_calls_and_no_enqueueing() -> None:
    calls: list[int] = []
    stopwatch = Stopwatch(torch.device("cpu"))
    assert len(stopwatch.samples_ms(lambda: calls.append(1), 5)) == 5
    assert len(calls) > 5, "the first calls are not timed"
    assert stopwatch.enqueue_ms(lambda: None, 3) is None


def test_segment_inputs_follow_their_shape() -> None:
    tokens = TensorSpec(name="segment", dtype="int64", shape=("T",))
    patches = TensorSpec(name="segment", dtype="int32", shape=("M", "G", 2))
    for spec, expected in ((tokens, torch.zeros(6)), (patches, torch.tensor([0, 6]).expand(3, 2, 2))):
        case = ProbeCase(
            stage="any",
            spec=GraphSpec(name="any", inputs=(spec,), outputs=(), dims=()),
            sizes={"T": 6, "M": 3, "G": 2},
            context=0,
            parameters={},
        )
        assert case.make(torch.device("cpu"))["segment"].tolist() == expected.tolist()


def test_sampling_is_timed_with_rules_that_every_row_needs() -> None:
    """Random rules would fail rows, which take less time."""
    inputs = tuple(
        TensorSpec(name=name, dtype=dtype, shape=("B", width))
        for name, dtype, width in (
            ("logits", "float32", 500),
            ("sampling", "float32", NUM_COLUMNS),
            ("seen", "bool", 500),
        )
    )
    spec = GraphSpec(name="sample", inputs=inputs, outputs=(), dims=())
    case = ProbeCase(stage="thinker", spec=spec, sizes={"B": 16}, context=0, parameters={})
    made = case.make(torch.device("cpu"))
    tokens = sample_tokens(made["logits"], made["sampling"], made["seen"])
    assert needs_sampling(made["sampling"].double().numpy()) and tokens.min() >= 0
    assert len(tokens.unique()) > 8, "sampled, not the likeliest"


def test_a_missing_parameter_of_an_input_is_named() -> None:
    ids = TensorSpec(name="input_ids", dtype="int64", shape=("T",))
    spec = GraphSpec(name="embed", inputs=(ids,), outputs=(), dims=())
    case = ProbeCase(stage="other", spec=spec, sizes={"T": 6}, context=0, parameters={"vocab_size": "9"})
    with pytest.raises(ArtifactError, match=r"probe needs the parameter vocab_size of other .* found '9'"):
        case.make(torch.device("cpu"))


class SlowStopwatch(Stopwatch):
    """Reports `ms_per_patch` for convolutions instead of measuring, and counts calls."""

    def __init__(self, ms_per_patch: float) -> None:
        super().__init__(torch.device("cpu"))
        self.ms_per_patch = ms_per_patch
        self.counts: list[int] = []

    def samples_ms(self, run: Callable[[], object], count: int, *, cold: bool = False) -> list[float]:
        made = run()
        assert isinstance(made, torch.Tensor)
        self.counts.append(count)
        return [self.ms_per_patch * len(made) if made.ndim == 5 else 0.1] * count


@pytest.mark.parametrize(
    "ms_per_patch, sizes, repetitions",
    [(0.001, [256, 1024, 4096], [10, 10, 10]), (1.0, [256, 1024], [10, 4]), (4.0, [256], [4])],
)
def test_the_patch_embedding_leaves_out_sizes_that_take_too_long(
    ms_per_patch: float,
    sizes: list[int],
    repetitions: list[int],
    tmp_path: Path,
) -> None:
    save_file(
        {"patch_embed.weight": torch.randn(4, 3 * 2 * 2 * 2), "patch_embed.bias": torch.zeros(4)},
        tmp_path / "weights.safetensors",
    )
    vision = SimpleNamespace(in_channels=3, temporal_patch_size=2, patch_size=2)
    artifact: Any = SimpleNamespace(
        manifest=SimpleNamespace(
            parameters_of=lambda stage, kind: vision,
            fingerprint=SimpleNamespace(device="cpu"),
            stages={"vision_encoder": SimpleNamespace(weights=[["weights.safetensors"]], is_sharded=False)},
        ),
        region=lambda name: tmp_path / name,
    )
    notes: list[str] = []
    steps: list[str] = []
    stopwatch = SlowStopwatch(ms_per_patch)
    rows = compare_patch_embed(artifact, stopwatch, steps.append, notes)
    assert [row.patches for row in rows] == sizes
    assert steps == [f"patch embedding of {size} patches" for size in sizes]
    assert stopwatch.counts[1::4] == repetitions, "timed calls of the convolution"
    assert len(notes) == (len(sizes) < 3)
    assert all(row.relative_difference < 1e-5 for row in rows)
    for row in rows:
        assert (row.conv3d_ms, row.linear_ms) == (ms_per_patch * row.patches, 0.1)
        assert row.ratio == pytest.approx(10 * ms_per_patch * row.patches), "times that the convolution takes"


@pytest.mark.parametrize(("median", "is_slower"), [(1.1, False), (1.1001, True), (0.5, False)])
def test_the_fastest_call_may_exceed_the_baseline_by_the_tolerance(median: float, is_slower: bool) -> None:
    found = compare(
        [figures(1.0), figures(9.0, "gone")], [figures(median), figures(9.0, "new")], tolerance=0.1
    )
    assert [each.engine for each in found.regressions] == ["cfm.sample B=2"] * is_slower
    assert found.only_here == ("new B=2",) and found.only_in_baseline == ("gone B=2",)
    for each in found.regressions:
        assert (each.baseline_ms, each.min_ms) == (1.0, median)
        assert each.slower_by == each.median_slower_by == pytest.approx(0.1001)


def test_a_busy_machine_is_no_regression() -> None:
    """It slows down most calls, but not the fastest one."""
    quiet = figures(1.0)
    busy = replace(quiet, latency=replace(quiet.latency, median_ms=2.0, p95_ms=9.0, p99_ms=9.0))
    assert not compare([quiet], [busy], tolerance=0.1).regressions


class Scripted:
    """A stopwatch whose calls give samples 1, 2, … ms; it keeps what it was asked for."""

    def __init__(self, first_ms: float = 1.0) -> None:
        self.first_ms = first_ms
        self.asked: list[tuple[int, bool]] = []

    def samples_ms(self, run: Callable[[], object], count: int, *, cold: bool = False) -> list[float]:
        run()
        self.asked.append((count, cold))
        return [self.first_ms + index for index in range(count)][::-1]

    def enqueue_ms(self, run: Callable[[], object], count: int) -> float | None:
        return 0.25


class Pool:
    """CUDA graphs of functions: replays count, or nothing can be captured."""

    def __init__(self, *, fails: bool) -> None:
        self.fails = fails
        self.replays = 0

    def capture(self, run: Callable[[], object], name: str) -> tuple[Any, object]:
        if self.fails:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

        def replay() -> None:
            self.replays += 1

        return SimpleNamespace(replay=replay), None


def a_run(device: str, repetitions: int | None, first_ms: float = 1.0) -> tuple[Any, Scripted]:
    run = object.__new__(prober._Run)
    stopwatch = Scripted(first_ms)
    run._options = ProbeOptions(repetitions=repetitions)
    run._device, run._stopwatch, run.notes = torch.device(device), stopwatch, []
    return run, stopwatch


@pytest.mark.parametrize(
    ("device", "first_ms", "repetitions"),
    [
        ("cpu", 0.01, 10),
        ("cpu", 100.0, 10),
        ("cpu", 150.0, 6),
        ("cpu", 900.0, 3),
        ("cpu", 5000.0, 3),
        ("cuda", 1.0, 200),
    ],
)
def test_calls_are_repeated_as_often_as_a_second_allows(
    device: str, first_ms: float, repetitions: int
) -> None:
    run, _ = a_run(device, None, first_ms)
    assert run._latency(lambda: (), "x", None).repetitions == repetitions


def test_a_latency_is_of_the_samples_of_cold_calls() -> None:
    run, stopwatch = a_run("cpu", 100)
    latency = run._latency(lambda: (), "x", None)
    assert (latency.median_ms, latency.p95_ms, latency.p99_ms, latency.min_ms) == (50.5, 95.0, 99.0, 1.0)
    assert (latency.repetitions, latency.is_captured, latency.enqueue_ms) == (100, False, 0.25)
    assert (latency.warm_ms, latency.uncaptured_ms) == (None, None) and stopwatch.asked == [(100, True)]


@pytest.mark.parametrize("fails", [False, True])
def test_on_a_gpu_a_graph_is_replayed_where_one_can_be_captured(fails: bool) -> None:
    run, stopwatch = a_run("cuda", 4)
    pool = Pool(fails=fails)
    latency = run._latency(lambda: (), "x", pool)
    assert latency.is_captured is not fails and latency.uncaptured_ms == 1.0
    assert (latency.median_ms, latency.warm_ms) == (2.5, None if fails else 1.0)
    assert stopwatch.asked == [(10, True), *[(4, False)] * (not fails), (4, True)]
    assert pool.replays == (0 if fails else 2)
    assert (
        run.notes == ["x runs without a CUDA graph: operation not permitted when stream is capturing"] * fails
    )


@pytest.mark.parametrize(
    ("sizes", "room_", "context", "held", "says"),
    [
        ({"B": 4}, 40, 30, 30, "talker.step B=4 +30"),
        ({"B": 4}, 40, 39, 39, "talker.step B=4 +39"),
        ({"B": 4}, 40, 256, 39, "talker.step B=4 +39"),
        ({"T": 16}, 40, 256, 24, "talker.step T=16 +24"),
        ({"B": 2}, float("inf"), 256, 256, "talker.step B=2"),
    ],
)
def test_the_context_is_what_fits_beside_the_new_tokens(
    sizes: dict[str, int], room_: float, context: int, held: int, says: str
) -> None:
    engine: Any = None
    target = prober._Target(stage="talker", spec=STEP, engine=engine, sizes=sizes, room=room_)
    assert (target.held(context), target.title(context)) == (held, says)


def test_a_probe_puts_its_parts_together(probed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures of every chosen engine, bounds where a cost is known, notes on what explains them, the baseline."""
    slow = replace(PEAK_RATES, copy_tb_s=1.0, matmul_tflop_s=50.0)
    cost = EngineCost(dims={}, flops=10**9, weight_bytes=0, state_bytes=0, uncounted=("magic",))

    class Run:
        def __init__(self, artifact: object, options: object, progress: Callable[[str], None]) -> None:
            self.notes, self.peak_rates = ["how times are taken"], slow

        def measure_peak_rates(self) -> PeakRates:
            return PEAK_RATES

        def load(self, artifact: object, stage: str) -> object:
            return stage

        def time(self, artifact: object, target: Any, loaded: object) -> Any:
            assert loaded == target.stage
            found = replace(figures(0.001), engine=target.name, sizes=target.sizes)
            return found, (cost, 0) if target.sizes["N"] == 1 else None

    monkeypatch.setattr(prober, "_Run", Run)
    steps: list[str] = []
    alone: dict[str, Any] = {"has_cold_start": False, "has_transfers": False}
    made = probe(probed, ProbeOptions(engines=("audio_encoder.encode",), **alone), steps.append)
    assert [each.engine for each in made.engines] == ["audio_encoder.encode"] * 3 and steps == ["peak rates"]
    assert (made.peak_rates.copy_tb_s, made.peak_rates.matmul_tflop_s) == (2.0, 100.0)
    (bound,) = made.roofline_bounds
    assert bound.roofline == pytest.approx(10.0), "1 GFLOP at 100 TFLOP/s takes 0.01 ms"
    assert made.notes[0] == "how times are taken" and "900 %" in made.notes[1] and "magic" in made.notes[2]
    assert (made.regressions, made.tolerance) == ((), None)
    before = replace(
        made,
        torch="2.0",
        engines=tuple(
            replace(each, latency=replace(each.latency, min_ms=0.0008)) for each in made.engines[:2]
        ),
    )
    options = ProbeOptions(engines=("audio_encoder.encode",), batch_sizes=(1, 8), **alone)
    again = probe(probed, options, baseline=before)
    assert len(again.engines) == 2 and len(again.regressions) == 1 and again.tolerance == 0.1
    assert again.only_in_baseline == () and len(again.only_here) == 1
    assert again.notes[-1].startswith("torch of the baseline: 2.0")


@pytest.mark.parametrize("is_chosen", [True, False])
def test_a_probe_reports_what_its_other_measurements_give(
    is_chosen: bool, both: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, other = both
    phases = tuple(
        StartPhase(phase=name, seconds=1.5, until_s=until) for name, until in (("a", 1.5), ("b", 3.0))
    )
    start = ColdStart(
        phases=phases,
        first_requests=(FirstRequest(request="chat", first_ms=2.0, second_ms=1.0),),
        notes=("of the start",),
    )
    moved = Transfer(transfer="host to device", num_bytes=1, ms=1.0, gb_s=1e-6)
    asked: list[object] = []

    def measure(path: Path, progress: object) -> ColdStart:
        asked.append(path)
        return start

    monkeypatch.setattr(prober, "measure_cold_start", measure)
    monkeypatch.setattr(prober, "measure_transfers", lambda progress: asked.append("transfers") or (moved,))
    options = ProbeOptions(
        beside=other,
        has_cold_start=is_chosen,
        has_transfers=is_chosen,
    )
    made = probe(first, options, command="mingc probe")
    assert asked == ([first, "transfers"] if is_chosen else [])
    assert (made.cold_start, made.ready_s) == ((phases, 3.0) if is_chosen else ((), None))
    assert made.first_requests == (start.first_requests if is_chosen else ())
    assert made.transfers == ((moved,) if is_chosen else ())
    assert ("of the start" in made.notes) == is_chosen
    assert (made.artifact, made.beside_artifact, made.command) == (str(first), str(other), "mingc probe")
    assert [each.backend for each in made.engines] == ["aoti"] * 4
    assert [each.backend for each in made.beside_engines] == ["onnx"] * 4
    assert [each.title for each in made.engines] == [each.title for each in made.beside_engines]
    assert made.model == "tiny" and made.dtype == "float32" and made.torch == torch.__version__
    assert (made.tolerance, made.regressions, made.only_here, made.only_in_baseline) == (None, (), (), ())
    assert len(made.artifact_sha256) == 64 and made.patch_embed == ()


def test_only_a_few_engines_of_a_list_are_named() -> None:
    titles = [f"cfm.sample N={size}" for size in range(1, 9)]
    for count in range(1, 9):
        with pytest.raises(ConfigError, match="it has other") as caught:
            check_common([figures(1.0, "other")], titles[:count])
        listed = [title for title in titles[:count] if title in caught.value.message]
        assert listed == titles[: min(count, 4)]
        assert ("…" in caught.value.message) == (count > 4)
