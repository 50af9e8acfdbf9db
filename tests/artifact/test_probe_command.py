"""`mingc probe` on a real artifact: what it tells, and that it finds what became slower."""

from __future__ import annotations

import json
from pathlib import Path

from mingc_command import mingc

CHOSEN = ("--engine", "talker,cfm.sample,thinker.decode_attention", "--batch", "1,8", "--repetitions", 2)


def test_every_chosen_engine_has_figures_and_floors_and_finds_itself_slower(
    artifact: Path, tmp_path: Path
) -> None:
    done = mingc("probe", artifact, *CHOSEN, "--json")
    assert done.code == 0, done.stderr
    report = done.document
    assert set(report) == {
        *("artifact", "model", "dtype", "torch", "ceilings", "tolerance", "engines", "floors"),
        *("regressions", "only_here", "only_in_baseline", "patch_embed", "notes"),
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
    assert len(report["floors"]) == len(report["engines"])
    for row, floor in zip(report["engines"], report["floors"], strict=True):
        latency = row["latency"]
        assert 0 < latency["min_ms"] <= latency["median_ms"] <= latency["p99_ms"]
        assert not latency["is_captured"] and latency["repetitions"] == 2
        assert floor["flops"] > 0 and floor["weight_bytes"] > 0 and floor["uncounted"] == []
        assert floor["engine"].startswith(row["engine"])
    steps = [floor["flops"] for floor in report["floors"] if floor["engine"].startswith("talker.step")]
    assert steps[1] == 8 * steps[0]

    for row in report["engines"]:
        row["latency"]["median_ms"] = 1e-6 if row["engine"] == "cfm.sample" else 1e6
    gone = {**report["engines"][0], "engine": "talker.gone"}
    report["engines"] = [row for row in report["engines"] if row["engine"] != "talker.prefill"] + [gone]
    baseline = tmp_path / "baseline.json"
    baseline.write_text(json.dumps(report), encoding="utf-8")
    again = mingc("probe", artifact, *CHOSEN, "--baseline", baseline, "--json")
    assert again.code == 3, again.stderr
    compared = again.document
    assert {row["engine"] for row in compared["regressions"]} == {"cfm.sample B=1", "cfm.sample B=8"}
    assert all(name.startswith("talker.prefill") for name in compared["only_here"])
    assert [name.partition(" ")[0] for name in compared["only_in_baseline"]] == ["talker.gone"]


def test_engines_and_batches_that_are_not_there_are_told(artifact: Path) -> None:
    wrong = mingc("probe", artifact, "--engine", "talker,nosuch")
    assert wrong.code == 2 and "nosuch" in wrong.stderr and "cfm.sample" in wrong.stderr
    absent = mingc("probe", artifact, "--engine", "cfm", "--batch", "3")
    assert absent.code == 2 and "no engine for batch 3" in absent.stderr


def test_the_patch_embedding_is_a_linear_map(artifact: Path) -> None:
    words = ("--engine", "vision_encoder", "--repetitions", 1, "--compare", "patch-embed", "--json")
    done = mingc("probe", artifact, *words)
    assert done.code == 0, done.stderr
    rows = done.document["patch_embed"]
    assert [row["patches"] for row in rows] == [256, 1024, 4096]
    assert all(row["relative_difference"] < 1e-5 and row["conv3d_ms"] > 0 for row in rows)


def test_every_engine_of_the_thinker_is_timed_and_must_do_what_its_dims_say(
    wide_thinker_artifact: Path,
) -> None:
    """By hand: 64 wide, 4 query and 2 key heads of 128, 16 experts of 32 of which 4 and a shared one, float32."""
    done = mingc("probe", wide_thinker_artifact, "--engine", "thinker", "--repetitions", 1, "--json")
    assert done.code == 0, done.stderr
    report = done.document
    rows = {
        (row["engine"].removeprefix("thinker."), *row["sizes"].values()): (row, floor)
        for row, floor in zip(report["engines"], report["floors"], strict=True)
    }
    batches, chunks, tables, tokens = (1, 8, 32), (16, 32, 64), (4, 8, 16), (1, 8, 16, 32, 64)
    assert set(rows) == {
        *(("decode_attention", batch, pages) for batch in batches for pages in tables),
        *(("prefill_attention", count, pages) for count in chunks for pages in tables),
        *(("decode_experts", batch) for batch in batches),
        *(("prefill_experts", count) for count in chunks),
        *((name, count) for name in ("embed", "dense") for count in tokens),
        *(("head", batch) for batch in batches),
    }
    assert report["notes"] and not any(floor["uncounted"] for _, floor in rows.values())

    def floor(*key: object) -> dict[str, float]:
        return rows[key][1]

    projections = 64 * (4 + 2 * 2) * 128 + 4 * 128 * 64
    for batch in batches:
        row, attention = rows["decode_attention", batch, 8]
        assert (row["max_model_len"], row["layer_instances"]) == (8 * 16 - 1, 4)
        assert attention["flops"] == batch * (2 * projections + 4 * 4 * 128 * 8 * 16)
        assert attention["weight_bytes"] == 4 * (projections + 64 + 2 * 128)
        assert attention["state_bytes"] == batch * 4 * 2 * 2 * 128 * (8 * 16 + 1)
        assert floor("head", batch)["flops"] == batch * 2 * 64 * 576
    for count in tokens:
        assert floor("dense", count)["flops"] == count * 2 * 3 * 64 * 128
        assert floor("embed", count)["flops"] == 0
    expert, gate = 3 * 64 * 32, 64 * 16
    one, many = floor("decode_experts", 1), floor("decode_experts", 32)
    assert one["flops"] == 2 * (gate + 5 * expert + 4 * 64)
    assert one["weight_bytes"] == 4 * (gate + 16 + 5 * expert + 64)
    assert (many["flops"], many["weight_bytes"]) == (32 * one["flops"], 4 * (gate + 16 + 17 * expert + 64))
    assert floor("prefill_experts", 64)["flops"] == 64 * 2 * (3 * gate + 5 * expert + 4 * 64)
