"""`mingc probe` on a real artifact: figures, roofline bounds, and regressions against a baseline."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
from changed_artifact import terse_artifact
from fake_service import INFO, SPEECH_ONLY, TEXT_ONLY, FakeService
from mingc_command import ENVIRONMENT, PARTLY, mingc, mingc_here

from mingc.probe import patch_embed, trace
from mingc.probe.prober import ProbeOptions
from mingc.runtime.request import ServiceInfo

CHOSEN = ("--engine", "talker,cfm.sample,thinker.decode_attention", "--batch", "1,8", "--repetitions", 2)
ALONE = ("--no-cold-start", "--no-transfers")


def test_chosen_engines_have_figures_and_bounds_and_a_slowdown_is_found(
    compiled_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(PARTLY))
    done = mingc_here("probe", compiled_artifact, *CHOSEN, *ALONE, "--json")
    assert done.code == 0, done.stderr
    report = done.document
    assert set(report) == {
        *(
            "summary",
            "artifact",
            "model",
            "dtype",
            "torch",
            "peak_rates",
            "tolerance",
            "engines",
            "roofline_bounds",
        ),
        *(
            "regressions",
            "only_here",
            "only_in_baseline",
            "patch_embed",
            "notes",
            "artifact_sha256",
            "command",
        ),
        *("environment", "ready_s", "cold_start", "first_requests", "transfers"),
        *("beside_artifact", "beside", "beside_engines"),
    }
    names = {(row["engine"], row["sizes"].get("B")) for row in report["engines"]}
    assert names == {
        *(
            (name, size)
            for name in ("talker.step", "cfm.sample", "thinker.decode_attention")
            for size in (1, 8)
        ),
        ("talker.prefill", None),
    }
    assert len(report["roofline_bounds"]) == len(report["engines"])
    for row, bound in zip(report["engines"], report["roofline_bounds"], strict=True):
        latency = row["latency"]
        assert 0 < latency["min_ms"] <= latency["median_ms"] <= latency["p99_ms"]
        assert not latency["is_captured"] and latency["repetitions"] == 2
        assert bound["flops"] > 0 and bound["weight_bytes"] > 0 and bound["uncounted"] == []
        assert bound["engine"].startswith(row["engine"])
    steps = [
        bound["flops"] for bound in report["roofline_bounds"] if bound["engine"].startswith("talker.step")
    ]
    assert steps[1] == 8 * steps[0]

    for row in report["engines"]:
        row["latency"]["min_ms"] = 1e-6 if row["engine"] == "cfm.sample" else 1e6
    gone = {**report["engines"][0], "engine": "talker.gone"}
    report["engines"] = [row for row in report["engines"] if row["engine"] != "talker.prefill"] + [gone]
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(report), encoding="utf-8")
    again = mingc_here("probe", compiled_artifact, *CHOSEN, *ALONE, "--baseline", baseline, "--json")
    assert again.code == 3, again.stderr
    compared = again.document
    assert {row["engine"] for row in compared["regressions"]} == {"cfm.sample B=1", "cfm.sample B=8"}
    assert all(name.startswith("talker.prefill") for name in compared["only_here"])
    assert [name.partition(" ")[0] for name in compared["only_in_baseline"]] == ["talker.gone"]


def test_a_trace_has_the_engines_of_one_request(eager_artifact: Path, tmp_path: Path) -> None:
    """As often as a token and a patch need each; the decode step has four layers of attention, three of experts."""
    path = tmp_path / "trace.json"
    words = ("--engine", "audio_vae.stream", "--batch", 1, "--repetitions", 1, *ALONE, "--trace", path)
    done = mingc("probe", terse_artifact(eager_artifact, tmp_path / "artifact"), *words)
    assert done.code == 0, done.stderr
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    ranges = [each for each in events if each.get("cat") == "user_annotation" and each["ph"] == "X"]
    assert all(each["dur"] > 0 for each in ranges)
    calls = Counter(each["name"].partition(" ")[0] for each in ranges)
    tokens = calls["thinker.head"]
    assert 1 < tokens <= 16 and calls["thinker.embed"] == tokens
    assert calls["thinker.prefill_attention"] == 4 and calls["thinker.decode_attention"] == 4 * (tokens - 1)
    assert calls["thinker.decode_experts"] == 3 * (tokens - 1)
    patches = calls["cfm.sample"]
    assert calls["audio_vae.stream"] == patches > 1 and 0 < calls["talker.step"] <= patches
    # Named as in the report: with the sizes of the call.
    names = {each["name"] for each in ranges}
    assert {
        "cfm.sample B=1",
        "audio_vae.stream B=1",
        "thinker.head B=1",
        "thinker.decode_experts B=1",
    } <= names
    assert any(re.fullmatch(r"thinker\.decode_attention B=1 P=[2-9]\d*", each) for each in names)
    prompts = {each.rpartition("=")[2] for each in names if each.startswith("thinker.embed N=")}
    assert "1" in prompts and max(map(int, prompts)) > 8, "of the prompt, and of a token"
    threads = {each["name"].partition(".")[0]: each["tid"] for each in ranges}
    assert threads["thinker"] != threads["talker"]
    wrong = mingc_here("probe", eager_artifact, "--trace", tmp_path)
    assert wrong.code == 2 and "--trace" in wrong.stderr and "is a folder" in wrong.stderr


@pytest.mark.parametrize("info", [INFO, TEXT_ONLY, SPEECH_ONLY])
def test_a_trace_is_of_the_second_request_and_of_what_the_artifact_answers(
    info: ServiceInfo, eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = list[FakeService]()

    def opened(*_: object) -> FakeService:
        services.append(FakeService(info))
        return services[-1]

    monkeypatch.setattr(trace, "open_service", opened)
    trace.write_trace(eager_artifact, tmp_path / "trace.json", lambda _: None)
    (service,) = services
    asked = service.chats if info.has_text else service.speeches
    assert [each.request_id for each in asked] == ["warm-up", "traced"]
    assert len(service.chats) + len(service.speeches) == 2
    assert all((each.speech is not None) == info.has_speech for each in asked)
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]


def test_missing_engines_and_batch_sizes_are_refused(eager_artifact: Path) -> None:
    wrong = mingc_here("probe", eager_artifact, "--engine", "talker,nosuch")
    assert wrong.code == 2 and "nosuch" in wrong.stderr and "cfm.sample" in wrong.stderr
    absent = mingc_here("probe", eager_artifact, "--engine", "cfm", "--batch", "3")
    assert absent.code == 2 and "no engine for batch 3" in absent.stderr


def test_the_patch_embedding_equals_a_linear_layer(
    eager_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose = ProbeOptions.choose
    monkeypatch.setattr(ProbeOptions, "choose", lambda *which: which[2]["M"] <= 64 and choose(*which))
    monkeypatch.setattr(patch_embed, "_BUDGET_MS", 0.0)  # each form is timed once
    words = ("--engine", "vision_encoder", "--repetitions", 1, "--compare", "patch-embed", *ALONE, "--json")
    done = mingc_here("probe", eager_artifact, *words)
    assert done.code == 0, done.stderr
    rows = done.document["patch_embed"]
    assert [row["patches"] for row in rows] == [256, 1024, 4096]
    assert all(row["relative_difference"] < 1e-5 and row["conv3d_ms"] > 0 for row in rows)


def test_every_engine_of_the_thinker_is_timed_with_the_cost_of_its_dims(
    wide_thinker_artifact: Path,
) -> None:
    """By hand: hidden size 64, 4 query and 2 KV heads of 128, 16 experts of 32, 4 and a shared one in use, float32."""
    done = mingc_here(
        "probe", wide_thinker_artifact, "--engine", "thinker", "--repetitions", 1, *ALONE, "--json"
    )
    assert done.code == 0, done.stderr
    report = done.document
    rows = {
        (
            row["engine"].removeprefix("thinker."),
            *(row["sizes"][dim] for dim in sorted(row["sizes"], key="P".__eq__)),  # pages last
        ): (row, bound)
        for row, bound in zip(report["engines"], report["roofline_bounds"], strict=True)
    }
    batches, chunks, tables, tokens = (1, 8, 32), (16, 32, 64), (4, 8, 16), (1, 8, 16, 32, 64)
    assert set(rows) == {
        *(("decode_attention", batch, pages) for batch in batches for pages in tables),
        *(("prefill_attention", count, pages) for count in chunks for pages in tables),
        *(("decode_experts", batch) for batch in batches),
        *(("prefill_experts", count) for count in chunks),
        *((name, count) for name in ("embed", "dense") for count in tokens),
        *(("head", batch) for batch in (*batches, 2)),  # a chunk may hold the ends of two prompts
    }
    assert report["notes"] and not any(bound["uncounted"] for _, bound in rows.values())

    def bound(*key: object) -> dict[str, float]:
        return rows[key][1]

    projections = 64 * (4 + 2 * 2) * 128 + 4 * 128 * 64
    for batch in batches:
        row, attention = rows["decode_attention", batch, 8]
        assert (row["context_tokens"], row["layer_instances"]) == (8 * 16 - 1, 4)
        assert attention["flops"] == batch * (2 * projections + 4 * 4 * 128 * 8 * 16)
        assert attention["weight_bytes"] == 4 * (projections + 64 + 2 * 128)
        assert attention["state_bytes"] == batch * 4 * 2 * 2 * 128 * (8 * 16 + 1)
        assert bound("head", batch)["flops"] == batch * 2 * 64 * 576
    for count in tokens:
        assert bound("dense", count)["flops"] == count * 2 * 3 * 64 * 128
        assert bound("embed", count)["flops"] == 0
    expert, gate = 3 * 64 * 32, 64 * 16
    one, many = bound("decode_experts", 1), bound("decode_experts", 32)
    assert one["flops"] == 2 * (gate + 5 * expert + 4 * 64)
    assert one["weight_bytes"] == 4 * (gate + 16 + 5 * expert + 64)
    assert (many["flops"], many["weight_bytes"]) == (32 * one["flops"], 4 * (gate + 16 + 17 * expert + 64))
    assert bound("prefill_experts", 64)["flops"] == 64 * 2 * (3 * gate + 5 * expert + 4 * 64)


def test_a_probe_of_everything_beside_another_artifact(
    eager_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside itself: each engine has a counterpart. The server of the cold start is the real one."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])
    monkeypatch.setattr("mingc.probe.transfers.NUM_BYTES", 1 << 22)
    words = (
        "--engine",
        "talker.step,cfm.sample",
        "--batch",
        1,
        "--repetitions",
        1,
        "--beside",
        eager_artifact,
    )
    html = tmp_path / "probe.html"
    done = mingc_here("probe", eager_artifact, *words, "--html", html, "--json")
    assert done.code == 0, done.stderr
    report = done.document
    assert report["command"].startswith(
        f"mingc probe {eager_artifact} --engine talker.step,cfm.sample --batch 1"
    )
    assert report["artifact_sha256"] == json.loads((eager_artifact / "manifest.json").read_text())["sha256"]
    assert report["environment"]["torch"] == report["torch"] == torch.__version__

    phases = {row["phase"]: row["seconds"] for row in report["cold_start"]}
    assert [*phases][:4] == [
        "start the interpreter, read options",
        "import",
        "check the artifact",
        "compare hashes",
    ]
    assert [*phases][-2:] == ["collect garbage", "other"] and len(phases) == 16
    assert {"load engines", "weights to the device (CPU: map)", "prepare encoders (CUDA: capture)"} <= {
        *phases
    }
    assert "start the device" not in phases, "a CPU is there already"
    assert all(seconds >= 0 for seconds in phases.values()) and phases["import"] > 0.1
    assert (
        report["ready_s"]
        == report["cold_start"][-1]["until_s"]
        == pytest.approx(sum(phases.values()), abs=0.02)
    )
    assert {row["request"] for row in report["first_requests"]} == {"chat, 2 tokens", "speech, 6 characters"}

    rates = {row["transfer"]: row for row in report["transfers"]}
    assert len(rates) == 8 and rates["host memory, read"]["gb_s"] > 0
    has_gpu = torch.cuda.is_available()
    assert has_gpu or {row["not_run"] for name, row in rates.items() if "host memory" not in name} == {
        "no CUDA device"
    }

    engines = [row["engine"] for row in report["engines"]]
    assert engines == ["cfm.sample", "talker.step"] or engines == ["talker.step", "cfm.sample"]
    assert {row["backend"] for row in report["engines"]} == {"eager"}
    assert [row["engine"] for row in report["beside_engines"]] == engines
    assert report["beside_artifact"] == str(eager_artifact)
    for pair, here, there in zip(report["beside"], report["engines"], report["beside_engines"], strict=True):
        assert pair["engine"].startswith(here["engine"])
        assert (pair["backend"], pair["other_backend"]) == ("eager", "eager")
        assert pair["min_ms"] == here["latency"]["min_ms"]
        assert pair["other_min_ms"] == there["latency"]["min_ms"]
        assert pair["ratio"] == pytest.approx(pair["other_min_ms"] / pair["min_ms"])
    for bound in report["roofline_bounds"]:
        assert 0 < bound["roofline"] <= 1, "no engine is above its roof"
    shown = html.read_text(encoding="utf-8")
    assert report["artifact_sha256"] in shown
    fastest = [row["latency"]["min_ms"] for row in (*report["engines"], *report["beside_engines"])]
    assert all(repr(each) in shown for each in fastest)
