"""The measuring script of a backend's engines: its cases, processes and results, without a GPU or TensorRT."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import backend_engines as script
import pytest
from mingc_command import mingc_here
from part_driver import Driver

from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import (
    BackendRefusal,
    BackendTrial,
    EngineRecord,
    EngineTiming,
    GraphRecord,
    Parity,
)
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages import find
from mingc.export.synthetic.checkpoint import open_synthetic

STAGES = ("vision_encoder", "audio_encoder", "talker", "cfm", "audio_vae")


def test_cases_are_buckets_of_the_released_graphs_and_begin_with_every_graph(tmp_path: Path) -> None:
    options = StageOptions(static_buckets=True, batch_sizes=(1, 2, 4, 8))
    buckets = {}
    for name in STAGES:
        stage: Any = find(name)
        config = stage.config(open_synthetic(script.ROOT / "benchmarks" / "released"))
        for plan in stage.graphs(config, Shard(), options):
            buckets[f"{name}.{plan.spec.name}"] = plan.spec.bucket_sizes()
    assert {*script.SIZES[0]} == {*buckets}
    cases = script.cases_of(4, len(script.SIZES))
    assert len({each.name for each in cases}) == len(cases)
    for case in cases:
        if case.config == "released":
            assert case.sizes in buckets[case.graph], case.name
            assert case.layers == (2 if case.graph.startswith("cfm") else 4)
    assert [each.environment for each in cases if each.config == "tiny"] == [
        {},
        {"NVIDIA_TF32_OVERRIDE": "0"},
    ]
    (one,) = script.cases_of(4, 1, ("talker.step",))
    assert one.name == "released-bfloat16-talker.step-B1-4layers"


def test_transformers_are_cut_and_keep_their_widths(tmp_path: Path) -> None:
    root = script.write_configs(tmp_path / "cut", 3)
    assert script.write_configs(tmp_path / "cut", 3) == root and [*tmp_path.iterdir()] == [root]
    cut, whole = (open_synthetic(each) for each in (root, script.ROOT / "benchmarks" / "released"))
    stage: Any = find("talker")
    assert (stage.config(cut).llm.num_layers, stage.config(whole).llm.num_layers) == (3, 24)
    assert stage.config(cut).llm.hidden_size == stage.config(whole).llm.hidden_size == 896
    counts = {}
    for name in STAGES:
        other: Any = find(name)
        counts[name] = [len(other.weights(other.config(each), Shard())) for each in (cut, whole)]
    assert all(few < many for few, many in counts.values())


@pytest.fixture
def driver(tmp_path: Path) -> Any:
    words = ["--output", "/some/where", "--parts", "auto"]
    made = Driver(
        Path(script.__file__),
        tmp_path,
        tmp_path,
        600.0,
        lambda results: script.document(results, "abcdef0", words),
    )
    yield made
    made.stop_all()


def test_results_are_written_after_every_part_and_a_part_has_a_limit(driver: Any, tmp_path: Path) -> None:
    python = [sys.executable, "-c"]
    driver.keep(
        "machine", {"gpu": "NVIDIA H200, 580.1, 1 MHz", "versions": {"torch": "2.11.0", "cuda": "13.0"}}
    )
    answered = driver.finish(driver.start("auto-export", [*python, "print('{\"seconds\": 3}')"], 60.0))
    assert answered == {"exit": 0, "log": "", "document": {"seconds": 3}}
    crashed = driver.finish(
        driver.start("a", [*python, "import os, sys; print('x', file=sys.stderr); os.abort()"], 60.0)
    )
    assert crashed["exit"] == -6 and crashed["log"].startswith("x")
    writes = (
        'import pathlib, sys; pathlib.Path(sys.argv[1]).write_text(\'{"compile_s": 1.5, "bytes": 7}\')',
        str(tmp_path / "build-g.tensorrt.json"),
    )
    assert driver.finish(driver.start("build-g.tensorrt", [*python, *writes], 60.0)) == {
        "compile_s": 1.5,
        "bytes": 7,
    }
    assert json.loads((tmp_path / "results.json").read_text()) == driver.results
    sleep = "import time; time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {sleep!r}]); {sleep}"
    slow = driver.start("build-h.aoti", [*python, code], 0.0)
    late = driver.finish(slow)
    assert late["exit"] == "out of time" and slow.process.returncode == -9
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["command"] == "python benchmarks/backend_engines.py --output where --parts auto"
    assert written["commit"] == "abcdef0" and written["hardware"]["gpu"] == "NVIDIA H200"
    rows = {(each["name"], each["case"]): each for each in written["figures"]}
    assert rows["build_s", "g"]["median"] == 1.5 and rows["build_s", "h"]["refused"] == "out of time"
    assert rows["command", "auto-export"]["median"] == 0 and rows["command", "auto-export"]["seconds"] == 3


def test_an_infinite_error_is_null_in_files(driver: Any, tmp_path: Path) -> None:
    engines = {"tensorrt": {"error": float("inf"), "finite": False, "load_and_first_run_ms": 9.0}}
    driver.keep("measure-g", {"engines": engines, "limit": 0.03})

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    results, result = (
        json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        for name in ("results.json", "result.json")
    )
    assert results["measure-g"]["engines"]["tensorrt"]["error"] is None
    assert (result["figures"][0]["median"], result["figures"][0]["finite"]) == (None, False)


def test_a_measured_case_becomes_rows_of_the_result_file() -> None:
    ms = {"median": 1.0, "p95": 2.0, "min": 0.5, "n": 40}
    engines = {
        "torch": {"ms": ms},
        "tensorrt": {"ms": ms, "error": 0.01, "load_and_first_run_ms": 9.0, "within_limit": True},
        "aoti": {"refused": "ArtifactError: no"},
    }
    case = "released-bfloat16-talker.step-B1-4layers"
    rows = script.figures({f"measure-{case}": {"engines": engines, "limit": 0.03}})
    assert [(each["name"], each["backend"], each["median"]) for each in rows] == [
        ("latency_ms", "torch", 1.0),
        ("latency_ms", "tensorrt", 1.0),
        ("error", "tensorrt", 0.01),
        ("load_and_first_run_ms", "tensorrt", 9.0),
        ("latency_ms", "aoti", None),
    ]
    assert rows[2]["tolerance"] == 0.03 and {each["case"] for each in rows} == {case}


def test_times_of_auto_say_which_engine_was_kept() -> None:
    spec = GraphSpec(
        name="step",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("B", 4)),),
        outputs=(),
        dims=(Dim(name="B", minimum=1, maximum=2, buckets=(1, 2)),),
    )
    engines = tuple(
        EngineRecord(backend=backend, file="f", dims={"B": size}, compile_seconds=1.0)
        for backend, size in (("tensorrt", 1), ("aoti", 2))
    )
    timings = tuple(
        EngineTiming(backend=backend, dims={"B": size, "S": 3}, median_us=us, calls=5)
        for backend, size, us in (
            ("aoti", 1, 9.0),
            ("tensorrt", 1, 7.0),
            ("aoti", 2, 8.0),
            ("tensorrt", 2, 9.5),
        )
    )
    refused = (BackendRefusal(backend="onnx", reason="not on cuda"),)
    record = GraphRecord(
        spec=spec, engines=engines, golden="g", parity=Parity(compiled=0.0, eager=0.0),
        trial=BackendTrial(device="NVIDIA H200", timings=timings, refused=refused),
    )  # fmt: skip
    rows = script.trial_rows({"stages": {"talker": {"graphs": {"step": encode(record)}}}})
    assert [(each["backend"], each["median"], each.get("kept")) for each in rows] == [
        ("aoti", 9.0, False),
        ("tensorrt", 7.0, True),
        ("aoti", 8.0, True),
        ("tensorrt", 9.5, False),
        ("onnx", None, None),
    ]
    assert {each["case"] for each in rows} == {"talker.step"}


def test_the_options_of_its_exports_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An export is refused for want of a GPU or of the library, not for an unknown option."""
    monkeypatch.setattr(
        sys, "argv", ["backend_engines.py", "--output", str(tmp_path), "--folder", str(tmp_path)]
    )
    given = script.parse_args()
    monkeypatch.chdir(script.ROOT)
    words = script.export_words(given, tmp_path / "out", "auto")
    done = mingc_here(*words[words.index("export") :])
    assert done.code == 2 and "No such option" not in done.stderr
    assert "CUDA device" in done.stderr or "needs tensorrt-rtx" in done.stderr, done.stderr
