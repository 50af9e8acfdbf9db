"""The chat benchmark over HTTP with the tiny checkpoint: complete answers, all figures present."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from mingc_command import ENVIRONMENT, REPOSITORY

TOKENS = 12


@pytest.fixture(scope="module")
def figures(wide_thinker_artifact: Path) -> list[dict[str, str]]:
    words = ["--artifact", wide_thinker_artifact, "--concurrency", "1,3", "--rounds", "1", "--tokens", TOKENS]
    words += ["--prompt-tokens", 40, "--prompts", "100,200", "--prompt-rounds", "1", "--streams", "2"]
    words += ["--window", "1", "--client-processes", "2", "--serve", "--max-total-tokens 4096"]
    done = subprocess.run(
        [sys.executable, "benchmarks/chat_http.py", *map(str, words)],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [
        dict(word.split("=", 1) for word in line.split(" ") if "=" in word)
        for line in done.stdout.splitlines()
        if line.startswith(("name=", "concurrency=", "prompt_tokens="))
    ]


def test_every_answer_has_all_its_tokens(figures: list[dict[str, str]]) -> None:
    incomplete = [each for each in figures if each["name"] == "incomplete_answers"]
    assert [(each["concurrency"], each["median"]) for each in incomplete] == [("1", "0"), ("3", "0")]
    by_name = {each["name"]: each for each in figures}
    assert by_name["longest_answer"]["median"] == "16"
    assert by_name["max_total_tokens"]["median"] == "4096"
    assert 180 < int(by_name["longest_ttft_ms"]["prompt_tokens"]) <= 240


def test_prompts_are_timed_alone_and_with_concurrent_streams(figures: list[dict[str, str]]) -> None:
    firsts = [each for each in figures if each["name"] == "ttft_ms" and "streams" in each]
    assert [each["streams"] for each in firsts] == ["0", "2", "0", "2"]
    assert all(float(each["median"]) > 0 for each in firsts)
    lengths = [int(each["prompt_tokens"]) for each in firsts[::2]]
    assert 80 < lengths[0] <= 100 and 170 < lengths[1] <= 200
