"""`mingc bench` as a command: the report, the scores of a data set, and the verdicts against a baseline."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from mingc_command import mingc_here
from stand_in_server import stand_in, wav

from mingc.bench.records import Run, read, write


def test_a_data_set_is_sent_and_scored(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(clip := wav(bytes(32_000), 16_000))
    right = f"A clip of {len(clip)} bytes was heard here."
    items = [
        {"clip": "a.wav", "expected": right},
        {"clip": "a.wav", "expected": right.replace("heard", "seen")},
    ]
    data = tmp_path / "clips.jsonl"
    data.write_text("\n".join(map(json.dumps, items)), encoding="utf-8")
    output, page = tmp_path / "result.json", tmp_path / "result.html"
    with stand_in() as (url, server):
        done = mingc_here(
            "bench",
            url,
            "--data",
            data,
            "--concurrency",
            2,
            "--repeats",
            1,
            "--output",
            output,
            "--html",
            page,
        )
        assert len(server.bodies) >= 2
    file = read(output)
    (scores,) = file.scores.values()
    assert scores == {"word or character error rate, %": 100 / 8 / 2, "answers": 2.0, "failed": 0.0}
    assert [run.path for run in file.runs] == ["transcription"]
    assert "| clips.jsonl | word or character error rate, % | 6.25 |" in done.stdout, done.stderr
    assert "clips.jsonl" in page.read_text(encoding="utf-8")


def _faster(run: Run) -> Run:
    """The run of a server that is a hundred times as fast."""
    samples = [
        msgspec.structs.replace(
            sample, scheduled=0.0, sent=0.0, ended=(sample.ended - sample.sent) / 100,
            token_times=tuple((time - sample.sent) / 100 for time in sample.token_times),
        )
        for sample in run.samples
    ]  # fmt: skip
    return msgspec.structs.replace(run, samples=tuple(samples), wall_s=run.wall_s / 100)


def test_a_server_that_is_worse_than_its_baseline_ends_with_3(tmp_path: Path) -> None:
    output, faster = tmp_path / "now.json", tmp_path / "faster.json"
    with stand_in() as (url, server):
        words = ["bench", url, "--path", "text", "--tokens", 4, "--words", 20, "--concurrency", 2]
        mingc_here(*words, "--repeats", 2, "--output", output)
        file = read(output)
        write(faster, msgspec.structs.replace(file, runs=tuple(map(_faster, file.runs))))
        worse = mingc_here(*words, "--repeats", 2, "--baseline", faster)
        sent = len(server.bodies)
        other = mingc_here(*words[:-1], 3, "--baseline", faster)
        nowhere = mingc_here(*words, "--html", tmp_path / "none" / "page.html")
        assert len(server.bodies) == sent, "refused before anything is sent"
    assert worse.code == 3 and "| text c=2 | first token, median, ms | worse |" in worse.stdout
    assert (other.code, nowhere.code) == (2, 2)
    assert "--baseline" in other.stderr and "text c=2" in other.stderr and "--html" in nowhere.stderr
