"""The speech benchmark over HTTP at tiny dims: it exports its artifact, serves it and counts the received audio."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mingc_command import CACHE, REPOSITORY

PATCHES = 8


@pytest.fixture(scope="module")
def made(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """The artifact that the benchmark has made, and its figures. Graphs are those of `artifact`: none is compiled."""
    folder = tmp_path_factory.mktemp("speech-http") / "artifact"
    words = ["--artifact", folder, "--tiny", "--target", "cpu", "--dtype", "float32", "--cache", CACHE]
    words += ["--batch-sizes", "1,2,4,8", "--jobs", "2", "--concurrency", "1,2", "--rounds", "1"]
    words += ["--patches", PATCHES, "--segments", "2"]
    done = subprocess.run(
        [sys.executable, "benchmarks/speech_http.py", *map(str, words)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    figures = [line for line in done.stdout.splitlines() if line.startswith(("name=", "concurrency="))]
    return folder, [dict(word.split("=", 1) for word in line.split(" ") if "=" in word) for line in figures]


def test_every_answer_is_complete(made: tuple[Path, list[dict[str, str]]]) -> None:
    figures = made[1]
    incomplete = [each for each in figures if each["name"] == "incomplete_answers"]
    assert [(each["concurrency"], each["streamed"]) for each in incomplete] == [
        ("1", "True"), ("1", "False"), ("2", "True"), ("2", "False"),
    ]  # fmt: skip
    assert {each["median"] for each in incomplete} == {"0"}
    by_name = {each["name"]: each["median"] for each in figures}
    assert float(by_name["audio_s_per_s"]) > 0 and float(by_name["first_audio_ms"]) > 0
    assert by_name["long_text_whole_patches"] == "1.0"
    assert by_name["compiler_cache_files"] == "0"


def test_its_artifact_has_random_weights_and_the_chosen_batch_sizes(
    made: tuple[Path, list[dict[str, str]]],
) -> None:
    manifest = json.loads((made[0] / "manifest.json").read_text(encoding="utf-8"))
    assert set(manifest["stages"]) == {"talker", "cfm", "audio_vae"}
    assert any("weights are random" in note for note in manifest["notes"])
    dims = manifest["stages"]["cfm"]["graphs"]["sample"]["spec"]["dims"]
    assert [dim["buckets"] for dim in dims if dim["name"] == "B"] == [[1, 2, 4, 8]]
