"""The capacity plan: figures are those of the result files, replicas are enough, wrong loads are refused."""

from __future__ import annotations

import json
from dataclasses import asdict
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


def test_a_rate_that_is_just_reached_is_enough() -> None:
    """Of fp8 at batch 7, in the arithmetic of the plan."""
    rate = 1000 / (18.8681 + 7 * 43.1335 / 300)
    assert plan(Load(chats=7, token_rate=rate, utilisation=1.0)).deployments[0].per_replica == 7


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


def test_text_or_speech_alone() -> None:
    """Half of 710.4 audio seconds per second for 711 listeners: 2.002 replicas."""
    result = plan(Load(listeners=711, utilisation=0.5))
    (speech,) = result.deployments
    assert (speech.deployment, speech.replicas, speech.gpus, result.gpus) == ("speech", 3, 3, 3)
    assert (speech.load, speech.per_replica, speech.unit) == (711, 710.4, "audio s/s")
    assert speech.each_gets == "first audio 78 ms (p95)" and speech.source == FIGURES["h200"].speech.file
    assert result.gpu_hours_per_million_tokens is None and result.gpu == "h200"
    assert result.gpu_hours_per_1000_audio_hours == pytest.approx(1000 / 355.2, abs=0.005)
    result = plan(Load(chats=1, thinker="int4"))
    (text,) = result.deployments
    assert (text.deployment, text.replicas, text.load, text.unit) == ("text (int4)", 1, 1, "answers")
    assert result.gpu_hours_per_1000_audio_hours is None and result.gpu_hours_per_million_tokens is not None
    assert text.source == "thinker-int4-h200-2026-11-21.json"


def test_prompts_and_answers_cost_by_their_lengths() -> None:
    """TP 4: 10.1354 ms a step; a prompt of 4,096 tokens costs 90.96 ms, 32 of them in 100 steps 29.1 ms a step."""
    (long,) = plan(Load(chats=1, thinker="tp4", prompt_tokens=4096, answer_tokens=100)).deployments
    assert long.each_gets == f"{1000 / (10.1354 + 32 * 4 * 22.7407 / 100):.0f} tokens/s" == "25 tokens/s"
    (short,) = plan(Load(chats=1, thinker="tp4", prompt_tokens=1, answer_tokens=100)).deployments
    assert short.each_gets == f"{1000 / (10.1354 + 32 * 22.7407 / 1024 / 100):.0f} tokens/s" == "99 tokens/s"


def test_the_cost_of_tokens_counts_all_gpus_of_a_replica() -> None:
    result = plan(Load(chats=64, thinker="tp4", utilisation=1.0))
    token_s = (10.1354 + 32 * 22.7407 / 300) / 1000
    assert result.gpu_hours_per_million_tokens == pytest.approx(4e6 * token_s / 32 / 3600, rel=0.01)


def test_exact_multiples_need_no_replica_more() -> None:
    assert plan(Load(chats=64, utilisation=1.0)).deployments[0].replicas == 2
    assert plan(Load(chats=65, utilisation=1.0)).deployments[0].replicas == 3
    assert plan(Load(listeners=710, utilisation=1.0)).deployments[0].replicas == 1


def test_bounds_of_a_load_are_allowed() -> None:
    assert plan(Load(chats=1, prompt_tokens=1, answer_tokens=1, token_rate=1.0, utilisation=1.0)).gpus == 1
    for wrong, says in (
        ({"chats": -1}, "--chats is -1"), ({"chats": 1, "prompt_tokens": 0}, "--prompt-tokens is 0"),
        ({"chats": 1, "utilisation": 1.01}, "--utilisation is 1.01"), ({"chats": 1, "token_rate": 0.0}, "--token-rate"),
        ({"chats": 1, "token_rate": float("inf")}, "--token-rate is inf"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=says):
            Load(**wrong)  # type: ignore[arg-type]


def test_what_is_assumed_is_what_was_given() -> None:
    texts = " ".join(
        each.assumption
        for each in plan(Load(chats=1, utilisation=0.25, prompt_tokens=7, answer_tokens=9)).assumptions
    )
    for part in (
        "25% of the measured",
        "7 prompt and 9 answer tokens",
        "at most 32 answers",
        "random weights",
    ):
        assert part in texts


def test_the_command_passes_every_option_on() -> None:
    given = {"listeners": 900, "chats": 50, "prompt_tokens": 2048, "answer_tokens": 100, "token_rate": 15.0,
             "utilisation": 0.6, "gpu": "h200", "thinker": "tp2"}  # fmt: skip
    words = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", value)]
    done = mingc_here("plan", *words, "--json")
    expected = plan(Load(**given))  # type: ignore[arg-type]
    assert done.document["deployments"] == json.loads(
        json.dumps([asdict(each) for each in expected.deployments])
    )
    assert done.document["gpu_hours_per_million_tokens"] == expected.gpu_hours_per_million_tokens
    assert [row["assumption"] for row in done.document["assumptions"]] == [
        each.assumption for each in expected.assumptions
    ]
