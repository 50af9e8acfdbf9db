"""`mingc bench` against a served artifact: every path, with the server's own counts and stages."""

from __future__ import annotations

from pathlib import Path

from changed_artifact import terse_artifact
from mingc_command import mingc, serving

from mingc.bench.paths import PATHS
from mingc.bench.records import read

_LOADS = ("--concurrency", 1, "--rounds", 1, "--repeats", 1)
_SIZES = ("--tokens", 12, "--words", 4, "--picture", 64, "--clip", "500ms")


def test_every_path_of_a_served_artifact_is_measured(eager_artifact: Path, tmp_path: Path) -> None:
    artifact = terse_artifact(eager_artifact, tmp_path / "artifact")
    with serving(artifact, "--speech-lead", 0) as server:
        done = mingc("bench", server.url, *_LOADS, *_SIZES, "--output", tmp_path / "result.json")
    assert done.code in (0, 3), done.stderr  # 3: this machine may be busy
    file = read(tmp_path / "result.json")
    assert {each.trap for each in file.findings} <= {"client"}, done.stderr
    assert file.servers[server.url]["model"] == "ming-omni"
    assert [run.path for run in file.runs] == [each for each in PATHS if each != "picture"]
    assert "picture is left out" in done.stderr
    for run in file.runs:
        assert [each.error for each in run.samples] == [""]
        for each in run.samples:
            if run.path in ("text", "image", "clip", "spoken"):
                assert each.output_tokens == len(each.token_times) == 12
                assert each.stages.keys() >= {"preprocess", "queue", "prefill"}
            if run.path in ("speech", "speech-stream", "spoken"):
                assert each.audio_s > 0.3 and (each.header_rate, each.sample_rate) == (44_100, 44_100)
            if run.path == "spoken":
                assert abs(each.audio_s - (each.stated_audio_s or 0)) < 0.01
            if run.path == "realtime":
                assert each.audio_s > 0.3 and each.finish_reason in ("completed", "incomplete")
        if run.path != "transcription":  # its requests are counted by segment
            assert run.counters
