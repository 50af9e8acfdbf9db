"""Prefix cache through HTTP: first token of a long prompt that the server has seen, and of the second turn of a chat.

Every round sends new prompts: a long text with a question (cold), the same text with another
question (warm), then a chat of two turns, and its second turn behind another text of the same length (cold). Requests
come one at a time, and the tokens that the server prefills for each are read from its metrics. Every answer has all its
tokens (`ignore_eos`), so weights may be random. The answer of the first turn is sent back as text. With random weights
its tokens may differ, and are then prefilled again.

    python benchmarks/prefix_cache.py --artifact /tmp/chat --json benchmarks/results/prefix-cache-….json
    python benchmarks/prefix_cache.py --artifact artifacts/tiny --prompt-tokens 1024   # on a CPU
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shlex
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cpu_result
import harness
import httpx
import torch
from arguments import whole
from chat_clients import Seen, ask, body
from chat_http import Prompts
from clients import client_of
from serving import server

from mingc.artifacts.artifact import open_artifact

Figures = list[dict[str, Any]]
_QUESTION_WORDS = 8
_TURNS = 4  # answers of the first turn that fit beside the prompt; its text may have more tokens than it had
_METRIC = re.compile(r"^mingc_prefilled_tokens_total (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sample:
    """One request: times at its client, tokens that the server prefilled, and tokens that were new."""

    seen: Seen
    prefilled: int
    new: int


def text(num_words: int, index: int) -> str:
    """Random words; another `index` gives others."""
    content: str = body(num_words, 1, index)["messages"][0]["content"]
    return content


def prefilled(url: str) -> int:
    """Prompt tokens that the server has computed so far."""
    found = _METRIC.search(httpx.get(f"{url}/metrics").raise_for_status().text)
    if found is None:
        raise SystemExit("the server has no metric mingc_prefilled_tokens_total")
    return int(float(found[1]))


def send(url: str, messages: list[str], tokens: int) -> tuple[Seen, int]:
    """A conversation of turns of user and assistant: its answer, and the prompt tokens that the server computed."""
    roles = ("user", "assistant")
    turns = [{"role": roles[place % 2], "content": content} for place, content in enumerate(messages)]

    async def one() -> Seen:
        async with client_of(url) as client:
            return await ask(client, {**body(1, tokens), "messages": turns})

    before = prefilled(url)
    return asyncio.run(one()), prefilled(url) - before


def one_round(url: str, words: int, index: int, tokens: int) -> dict[str, Sample]:
    """All requests of a round, by name; `index` must be new."""
    long, other = text(words, 10 * index), text(words, 10 * index + 1)
    questions = [text(_QUESTION_WORDS, 10 * index + 2 + number) for number in range(3)]
    found: dict[str, Sample] = {}

    cold, computed = send(url, [f"{long} {questions[0]}"], 1)
    found["long prompt, cold"] = Sample(cold, computed, cold.num_tokens[0])
    warm, computed = send(url, [f"{long} {questions[1]}"], 1)
    found["long prompt, warm"] = Sample(warm, computed, warm.num_tokens[0] - cold.num_tokens[0])

    first, _ = send(url, [f"{questions[2]} {long}"], tokens)
    second, computed = send(url, [f"{questions[2]} {long}", first.text, questions[0]], 1)
    new = second.num_tokens[0] - sum(first.num_tokens)
    found["second turn, warm"] = Sample(second, computed, new)
    cold, computed = send(url, [f"{questions[2]} {other}", first.text, questions[0]], 1)
    found["second turn, cold"] = Sample(cold, computed, cold.num_tokens[0])
    return found


def figures_of(samples: dict[str, list[Sample]]) -> Figures:
    figures: Figures = []
    for name, each in samples.items():
        common = {
            "request": name,
            "prompt_tokens": round(harness.summary([s.seen.num_tokens[0] for s in each])["median"]),
        }
        figures += [
            {**common, "name": "ttft_ms", **harness.summary([s.seen.first_ms for s in each]), "unit": "ms"},
            {
                **common,
                "name": "prefilled_tokens",
                **harness.summary([s.prefilled for s in each]),
                "unit": "tokens",
            },
            {
                **common,
                "name": "cached_tokens",
                **harness.summary([s.seen.cached_tokens for s in each]),
                "unit": "tokens",
            },
        ]
    new = harness.summary([s.new for s in samples["second turn, warm"]])
    figures.append({"request": "second turn, warm", "name": "new_tokens", **new, "unit": "tokens"})
    for kind in ("long prompt", "second turn"):
        cold, warm = ([s.seen.first_ms for s in samples[f"{kind}, {when}"]] for when in ("cold", "warm"))
        ratio = round(harness.summary(warm)["median"] / harness.summary(cold)["median"], 4)
        figures.append(
            {"request": kind, "name": "ttft_ratio", "median": ratio, "unit": "warm / cold", "n": len(warm)}
        )
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument("--prompt-tokens", type=whole(32), default=8192, help="of the long text")
    parser.add_argument("--answer-tokens", type=whole(1), default=152, help="of the first turn's answer")
    parser.add_argument("--rounds", type=whole(1), default=10)
    parser.add_argument("--json", type=Path, help="write the result here; `-cpu-` in its name without a GPU")
    is_gpu = torch.cuda.is_available()
    given = harness.parse_args(parser) if is_gpu else cpu_result.parse_args(parser)
    if given.json and not is_gpu and "-cpu-" not in given.json.name:
        parser.error("--json: a result of a CPU has -cpu- in its name")
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        try:
            words = shlex.split(given.serve)
            with server(given.artifact, Path(scratch) / "caches", log, words) as (url, _, _):
                health = httpx.get(f"{url}/health").json()
                context = int(health["max_model_len"])
                prompts = Prompts.measure(url)
                if given.prompt_tokens + _TURNS * given.answer_tokens > context:
                    parser.error(
                        f"--prompt-tokens {given.prompt_tokens}: a context of {context} holds no two turns"
                    )
                count = prompts.words(given.prompt_tokens)
                one_round(url, count, 0, given.answer_tokens)  # a warm-up
                samples = defaultdict[str, list[Sample]](list)
                for number in range(given.rounds):
                    for name, sample in one_round(url, count, 1 + number, given.answer_tokens).items():
                        samples[name].append(sample)
        finally:
            if log.exists():
                print(log.read_text()[-2000:], file=sys.stderr)
    figures = figures_of(samples)
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    if given.json and not is_gpu:
        cpu_result.write(given.json, "prefix_cache", figures, health=health)
    elif given.json:
        value = harness.result("prefix_cache", harness.peak_rates(), figures, health=health)
        value["hardware"]["count"] = open_artifact(given.artifact).manifest.fingerprint.world_size
        harness.write(given.json, value)


if __name__ == "__main__":
    main()
