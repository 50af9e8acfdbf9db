"""The capacity plan: figures are those of the result files, replicas are enough, wrong loads are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mingc_command import mingc_here

from mingc.errors import ConfigError
from mingc.plan import FIGURES, Load, plan

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def figure(file: str, name: str, **labels: Any) -> dict[str, Any]:
    result = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    (found,) = [row for row in result["figures"] if {"name": name, **labels}.items() <= row.items()]
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("gpu", FIGURES)
def test_the_figures_are_those_of_the_result_files(gpu: str) -> None:
    for thinker in FIGURES[gpu].thinkers:
        step = figure(thinker.file, "decode_step_ms", batch=32, prompt=1024)
        assert (step["median"], step["ranks"]) == (thinker.decode_step_ms, thinker.gpus)
        assert figure(thinker.file, "ttft_ms", prompt=1024)["median"] == thinker.prompt_ms
    speech = FIGURES[gpu].speech
    streams = {"concurrency": 32, "streamed": True}
    assert figure(speech.file, "audio_s_per_s", **streams)["median"] == speech.audio_s_per_s
    assert figure(speech.file, "first_audio_ms", **streams)["p95"] == speech.first_audio_p95_ms


def test_a_plan_by_hand() -> None:
    """5,000 listeners need 5,000 / (710.4 · 0.7) = 10.05 replicas; 200 answers 200 / (32 · 0.7) = 8.9.

    Between two tokens of an answer pass 18.87 ms and 32 · 43.13 / 300 = 4.60 ms: 42.6 tokens a second.
    """
    result = plan(Load(listeners=5000, chats=200))
    text, speech = result.deployments
    assert (text.replicas, speech.replicas, result.gpus) == (9, 11, 20)
    assert text.each_gets == "43 tokens/s"
    assert result.gpu_hours_per_1000_audio_hours == pytest.approx(1000 / 497.28, abs=0.01)
    assert result.gpu_hours_per_million_tokens == pytest.approx(1e6 / (32 / 0.02347 * 0.7) / 3600, rel=0.01)


def test_a_rate_that_batches_of_32_miss_takes_smaller_ones() -> None:
    """At 50 tokens a second 20 ms pass between tokens: 18.87 + n · 0.1438 ≤ 20, so n = 7."""
    (text,) = plan(Load(chats=70, token_rate=50.0, utilisation=1.0)).deployments
    assert (text.per_replica, text.replicas) == (7, 10)


def test_ranks_count_as_gpus() -> None:
    (text,) = plan(Load(chats=64, thinker="tp4", utilisation=1.0)).deployments
    assert (text.replicas, text.gpus) == (2, 8)


@pytest.mark.parametrize(
    "wrong, says",
    [
        ({}, "nothing to plan"),
        ({"listeners": -1}, "--listeners is -1"),
        ({"chats": 1, "utilisation": 0.0}, "--utilisation is 0.0"),
        ({"chats": 1, "token_rate": float("nan")}, "--token-rate is nan"),
        ({"chats": 1, "answer_tokens": 0}, "--answer-tokens is 0"),
        ({"chats": 1, "gpu": "h100"}, "--gpu h100: nothing was measured on it; measured: h200"),
        ({"chats": 1, "thinker": "tp8"}, "--thinker tp8 was not measured"),
    ],
)
def test_a_load_that_makes_no_sense_is_refused(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Load(**wrong)


def test_a_rate_that_no_replica_reaches_is_refused() -> None:
    with pytest.raises(ConfigError, match="one answer alone gets 53 tokens/s"):
        plan(Load(chats=1, token_rate=60.0))


def test_the_command_prints_what_it_assumes() -> None:
    done = mingc_here("plan", "--listeners", 5000, "--chats", 200, "--json")
    assert done.code == 0, done.stderr
    assert done.document["gpus"] == 20
    assert any("70% of the measured" in row["assumption"] for row in done.document["assumptions"])
    assert mingc_here("plan", "--listeners", 5000, "--gpu", "a100").code == 2
