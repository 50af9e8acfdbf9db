"""Chat through HTTP: a server over an artifact with a thinker, and clients on loopback.

Measures the phases of a cold start; tokens a second and the time between tokens at several concurrencies; the time to
the first token of long prompts, alone and while other answers are streamed; the time between those answers' tokens
before and while the prompts are prefilled; one request that all but fills the context. Every answer has all its tokens
(`ignore_eos`), so weights may be random.

    python benchmarks/chat_http.py --artifact /tmp/chat --json benchmarks/results/chat-http-….json
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
import httpx
from arguments import seconds, whole, wholes
from chat_clients import Seen, ask, body, chat
from clients import Clients, client_of
from serving import server

from mingc.artifacts.artifact import open_artifact
from mingc.probe.stopwatch import percentile

Figures = list[dict[str, Any]]
_CALM_S = 1.5  # how long streams run alone before the prompts come
_SETTLE_S = 0.3  # not counted: the first part after the last stream's first token
_COUNTED = (4, 24)  # words of the prompts that are used to count tokens a word
_NEARLY = 0.96  # random words differ in tokens
_LONG_ANSWER = 16  # tokens of the answer that all but fills the context


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prompts of a wanted number of tokens, by what the server counts in two of them."""

    overhead: float
    per_word: float

    @classmethod
    def measure(cls, url: str) -> Prompts:
        few, many = (asyncio.run(alone(url, words, 1)).num_tokens[0] for words in _COUNTED)
        per_word = (many - few) / (_COUNTED[1] - _COUNTED[0])
        return cls(few - _COUNTED[0] * per_word, per_word)

    def words(self, tokens: int) -> int:
        """Words of a prompt of nearly, and at most, `tokens` tokens; at least one."""
        return max(1, int(_NEARLY * (tokens - self.overhead) / self.per_word))


async def alone(url: str, words: int, tokens: int) -> Seen:
    async with client_of(url) as client:
        return await ask(client, body(words, tokens))


def summary(samples: list[float]) -> dict[str, float]:
    return {**harness.summary(samples), "p99": round(percentile(samples, 0.99), 4)}


def gaps_ms(seen: list[Seen]) -> list[float]:
    return [1e3 * (end - start) for each in seen for start, end in each.gaps()]


def cold_start(url: str, phases: dict[str, float]) -> Figures:
    """Phases of the server's start, then the first token of the first answer."""
    first = round(asyncio.run(alone(url, 1, 1)).first_ms / 1e3, 3)
    seconds = {**phases, "first token": first, "start to first token": round(phases["whole"] + first, 3)}
    return [
        {"name": "cold_start_s", "phase": phase, "median": passed, "unit": "s", "n": 1}
        for phase, passed in seconds.items()
    ]


def throughput(seen: list[Seen], concurrency: int, tokens: int) -> Figures:
    first, last = min(each.sent_at for each in seen), max(each.arrivals[-1] for each in seen)
    count = sum(len(each.arrivals) for each in seen)
    short = sum(len(each.arrivals) != tokens or each.num_tokens[1] != tokens for each in seen)
    common = {"concurrency": concurrency, "prompt_tokens": seen[0].num_tokens[0], "tokens": tokens}
    return [
        {
            **common,
            "name": "tok_per_s",
            "median": round(count / (last - first), 1),
            "unit": "tokens/s",
            "n": len(seen),
        },
        {**common, "name": "ttft_ms", **summary([each.first_ms for each in seen]), "unit": "ms"},
        {**common, "name": "inter_token_ms", **summary(gaps_ms(seen) or [0.0]), "unit": "ms"},
        {**common, "name": "incomplete_answers", "median": short, "unit": "answers", "n": len(seen)},
    ]


def prompts_alone(url: str, words: int, count: int) -> Figures:
    """Time to the first token of a prompt that runs alone."""
    seen = [asyncio.run(alone(url, words, 1)) for _ in range(count)]
    common = {"prompt_tokens": seen[0].num_tokens[0], "streams": 0}
    return [{**common, "name": "ttft_ms", **summary([each.first_ms for each in seen]), "unit": "ms"}]


async def prompts_until(url: str, words: int, until: float) -> list[Seen]:
    """Send prompts one after the other until the time `until`; at least one."""
    seen: list[Seen] = []
    async with client_of(url) as client:
        while not seen or time.perf_counter() < until:
            seen.append(await ask(client, body(words, 1, len(seen))))
            await asyncio.sleep(0.05)
    return [each for each in seen if each.arrivals[0] < until] or seen[:1]


def prompts_beside_streams(
    clients: Clients, url: str, words: int, streams: int, window_s: float, stream_tokens: int
) -> Figures:
    """Run streams alone, then beside prompts that come one after the other; times of both."""
    begun = time.perf_counter()
    until = begun + _CALM_S + window_s
    running = clients.begin(chat, url, streams, 1, stream_tokens, 1, until)
    time.sleep(_CALM_S)
    prompts = asyncio.run(prompts_until(url, words, until))
    others = [each for future in running for each in future.result()]
    calm_from = max(each.arrivals[0] for each in others) + _SETTLE_S
    calm_to, end = prompts[0].sent_at, min(each.arrivals[-1] for each in others)
    calm = [gap for each in others for gap in each.gaps() if calm_from <= gap[0] and gap[1] <= calm_to]
    busy = [
        gap
        for each in others
        for gap in each.gaps()
        if any(gap[1] > prompt.sent_at and gap[0] < prompt.arrivals[0] for prompt in prompts)
    ]
    late = sum(each.arrivals[0] > end for each in prompts)
    common = {"prompt_tokens": prompts[0].num_tokens[0], "streams": streams}
    first_ms = [each.first_ms for each in prompts]
    figures: Figures = [
        {**common, "name": "ttft_ms", **summary(first_ms), "unit": "ms"},
        {
            **common,
            "name": "prompts_beside_fewer_streams",
            "median": late,
            "unit": f"of {len(prompts)} prompts",
        },
    ]
    rows = [
        summary([1e3 * (last - first) for first, last in each]) if each else None for each in (calm, busy)
    ]
    for when, row in zip(("before the prompts", "during the prompts"), rows, strict=True):
        if row is not None:
            figures.append({**common, "name": "inter_token_ms", "when": when, **row, "unit": "ms"})
    if rows[0] and rows[1]:
        ratio = round(rows[1]["p99"] / rows[0]["p99"], 3)
        figures.append(
            {**common, "name": "inter_token_p99_ratio", "median": ratio, "unit": "during / before"}
        )
    return figures


def longest(url: str, prompts: Prompts, context: int) -> Figures:
    """One request whose prompt and answer all but fill the context."""
    seen = asyncio.run(alone(url, prompts.words(context - _LONG_ANSWER), _LONG_ANSWER))
    prompt, answer = seen.num_tokens
    return [
        {"name": "longest_ttft_ms", "prompt_tokens": prompt, "median": round(seen.first_ms, 2), "unit": "ms"},
        {"name": "longest_answer", "median": answer, "unit": f"of {_LONG_ANSWER} tokens"},
    ]


def fitting(option: str, tokens: int, room: int, notes: list[str]) -> int:
    """Tokens of a prompt, cut to the context; a note says so."""
    if tokens > room:
        notes.append(f"{option} {tokens}: shortened to {room}, the context holds no more beside the answer")
    return min(tokens, room)


def note_incomplete(figures: Figures, notes: list[str]) -> None:
    """A note for every load with answers that had not all their tokens."""
    for each in figures:
        if each["name"] == "incomplete_answers" and each["median"]:
            where = f"of {each['n']} at concurrency {each['concurrency']}"
            notes.append(f"{each['median']} answers {where} had not {each['tokens']} tokens")
        if each["name"] == "longest_answer" and each["median"] != _LONG_ANSWER:
            notes.append(f"the longest request was answered with {each['median']} {each['unit']}")


def measure(
    url: str, health: dict[str, Any], clients: Clients, given: argparse.Namespace, notes: list[str]
) -> Figures:
    """All loads. `notes` gets a line for each load that was not measured as asked."""
    figures: Figures = []
    context, max_total_tokens = int(health["max_model_len"]), int(health["max_total_tokens"])
    if given.tokens >= context:
        raise SystemExit(f"--tokens {given.tokens}: a context of {context} tokens has no room for a prompt")
    asked = fitting("--prompt-tokens", given.prompt_tokens, context - given.tokens, notes)
    # Streams must not run out of tokens, and leave pages to the prompts.
    room = (max_total_tokens - context) // given.streams - asked
    if room < 1:
        raise SystemExit(
            f"KV pages for {max_total_tokens} tokens hold no {given.streams} streams beside a long prompt"
        )
    figures.append({"name": "max_total_tokens", "median": max_total_tokens, "unit": "tokens"})
    prompts = Prompts.measure(url)
    short = prompts.words(asked)
    for concurrency in given.concurrency:
        clients.load(chat, url, concurrency, short, 4, 1)
        seen = clients.load(chat, url, concurrency, short, given.tokens, given.rounds)
        figures += throughput(seen, concurrency, given.tokens)
    stream_tokens = min(given.stream_tokens, context - asked, room)
    wanted = [fitting("--prompts", each, context - _LONG_ANSWER, notes) for each in given.prompts]
    for tokens in dict.fromkeys(wanted):
        words = prompts.words(tokens)
        figures += prompts_alone(url, words, given.prompt_rounds)
        figures += prompts_beside_streams(clients, url, words, given.streams, given.window, stream_tokens)
    figures += longest(url, prompts, context)
    note_incomplete(figures, notes)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--artifact", type=Path, required=True)
    parser.add_argument("--serve", default="", help="further words of `mingc serve`")
    parser.add_argument("--concurrency", type=wholes(1, 256), default="1,16,32")
    parser.add_argument("--rounds", type=whole(1), default=3, help="requests of each client")
    parser.add_argument("--prompt-tokens", type=whole(1), default=128, help="of those requests")
    parser.add_argument("--tokens", type=whole(1), default=152, help="tokens of each answer")
    parser.add_argument("--prompts", type=wholes(1), default="1024,8192", help="tokens of the long prompts")
    parser.add_argument("--prompt-rounds", type=whole(1), default=5, help="long prompts sent alone")
    parser.add_argument(
        "--streams", type=whole(1), default=16, help="answers streamed beside the long prompts"
    )
    parser.add_argument(
        "--stream-tokens", type=whole(1), default=2000, help="the most that each of these may have"
    )
    parser.add_argument("--window", type=seconds, default=4.0, help="seconds of long prompts beside streams")
    parser.add_argument("--client-processes", type=whole(1, 64), default=4)
    parser.add_argument("--json", type=Path, help="write the result here; needs a GPU")
    given = harness.parse_args(parser)
    clients, notes = Clients(given.client_processes), list[str]()
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch) / "server.log"
        try:
            words = ["--no-prefix-cache", *shlex.split(given.serve)]  # prompts are sent several times
            with server(given.artifact, Path(scratch) / "caches", log, words) as (url, phases, _):
                figures = cold_start(url, phases)
                health = httpx.get(f"{url}/health").json()
                figures += measure(url, health, clients, given, notes)
        finally:
            clients.close()
            if log.exists():
                print(log.read_text()[-2000:], file=sys.stderr)
    for figure in figures:
        print(" ".join(f"{key}={value}" for key, value in figure.items()))
    for note in notes:
        print(f"NOT AS ASKED: {note}", file=sys.stderr)
    if given.json:
        value = harness.result("chat_http", harness.peak_rates(), figures, health=health, notes=notes)
        value["hardware"]["count"] = open_artifact(given.artifact).manifest.fingerprint.world_size
        harness.write(given.json, value)


if __name__ == "__main__":
    main()
