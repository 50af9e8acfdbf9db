"""`scripts/demo.py` with a backend that compiles nothing: a person sees what happens, an answer, and what to do."""

from __future__ import annotations

import subprocess
import sys
import wave
from pathlib import Path

import pytest
from eager_export import copy_of
from mingc_command import ENVIRONMENT, REPOSITORY

from mingc.artifacts.artifact import open_artifact


def demo(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/demo.py", *map(str, words)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.timeout(900)
@pytest.mark.parametrize("exports", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_the_demo_answers_and_says_what_it_does(
    exports: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    output = tmp_path / "deep" / "demo"
    if not exports:  # as after an earlier run
        copy_of(request.getfixturevalue("eager_artifact"), output)
        (output / "artifact" / "manifest.json").touch()
    first = demo("--output", output, "--backend", "eager")
    assert first.returncode == 0, first.stderr
    lines = first.stderr.splitlines()
    assert "about" in lines[0] and "minutes" in lines[0] and "random" in lines[1]
    assert all(line.startswith("demo: ") for line in lines), "nothing else is written"
    assert len(lines) + len(first.stdout.splitlines()) < 45
    artifact = open_artifact(output / "artifact").manifest
    assert {"thinker", "talker", "cfm", "audio_vae"} <= artifact.stages.keys()
    with wave.open(str(output / "reply.wav")) as file:
        assert (file.getnchannels(), file.getsampwidth()) == (1, 2)
        assert len(file.readframes(-1)) > 2 * file.getframerate() * 0.3
    transcript = (output / "transcript.txt").read_text(encoding="utf-8")
    assert "voice say?" in transcript.splitlines()[0] and transcript.splitlines()[-1].strip()
    assert f"mingc serve {output / 'artifact'}" in first.stdout.partition("Next:")[2]
    assert not any(ord(character) < 32 for line in first.stdout.splitlines() for character in line)
    assert ("compiling" in first.stderr) == exports


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    done = demo("--output", tmp_path, "--checkpoint", tmp_path / "nowhere")
    assert done.returncode == 1 and f"no checkpoint in {tmp_path / 'nowhere'}" in done.stderr


def test_an_export_that_fails_says_why(tmp_path: Path) -> None:
    done = demo("--output", tmp_path, "--backend", "nosuch")
    assert done.returncode == 2 and "--backend nosuch" in done.stderr and "Traceback" not in done.stderr
