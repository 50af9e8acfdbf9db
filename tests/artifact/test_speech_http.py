"""The speech benchmark over HTTP at tiny dims: it serves an artifact and counts the received audio."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import speech_http
from mingc_command import ENVIRONMENT, REPOSITORY

from mingc.commands.export import command as export_command

PATCHES = 8


@pytest.fixture(scope="module")
def figures(eager_artifact: Path) -> list[dict[str, str]]:
    words = ["--artifact", eager_artifact, "--concurrency", "1,2", "--rounds", "1"]
    words += ["--patches", PATCHES, "--segments", "2"]
    done = subprocess.run(
        [sys.executable, "benchmarks/speech_http.py", *map(str, words)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith(("name=", "concurrency="))]
    return [dict(word.split("=", 1) for word in line.split(" ") if "=" in word) for line in lines]


def test_every_answer_is_complete(figures: list[dict[str, str]]) -> None:
    incomplete = [each for each in figures if each["name"] == "incomplete_answers"]
    assert [(each["concurrency"], each["streamed"]) for each in incomplete] == [
        ("1", "True"), ("1", "False"), ("2", "True"), ("2", "False"),
    ]  # fmt: skip
    assert {each["median"] for each in incomplete} == {"0"}
    by_name = {each["name"]: each["median"] for each in figures}
    assert float(by_name["audio_s_per_s"]) > 0 and float(by_name["first_audio_ms"]) > 0
    assert by_name["long_text_whole_patches"] == "1.0"
    assert by_name["compiler_cache_files"] == "0"


def test_its_artifact_is_asked_for_with_random_weights_and_the_chosen_batch_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command is parsed as `mingc export` parses it; nothing is exported."""
    commands: list[list[str]] = []
    monkeypatch.setattr(
        speech_http, "subprocess", SimpleNamespace(run=lambda words, **_: commands.append([*map(str, words)]))
    )
    given = SimpleNamespace(
        tiny=True, batch_sizes=(1, 8), target="cpu", dtype="float32", jobs=3, cache=tmp_path
    )
    speech_http.make_artifact(tmp_path / "made", cast(argparse.Namespace, given))
    (words,) = commands
    assert words[:4] == [sys.executable, "-m", "mingc", "export"]
    asked = export_command.make_context("export", words[4:]).params
    assert asked["synthetic"] and asked["stages"] == "talker,cfm,audio_vae"
    assert asked["batch_sizes"] == "1,8"
    assert (asked["output"], asked["jobs"], asked["cache"]) == (f"{tmp_path}/made", "3", f"{tmp_path}")
