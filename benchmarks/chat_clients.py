"""Clients that measure a chat server: arrival times of each request's tokens. Needs no torch."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import time
from dataclasses import dataclass, field
from typing import Any

import httpx
from clients import client_of

from mingc.export.assets.byte_tokenizer import word

_IDS = range(1_000, 150_000)
_DATA = "data: "


@dataclass(slots=True)
class Seen:
    """Arrivals of one answer, in times of `time.perf_counter`, which all processes of a machine share.

    Attributes:
        arrivals: of each token.
        num_tokens: (prompt, answer) as the server counts them; zeros when the client hung up before the end.
        cached_tokens: prompt tokens that the server found in its prefix cache.
        text: the answer.
    """

    sent_at: float
    arrivals: list[float] = field(default_factory=list)
    num_tokens: tuple[int, int] = (0, 0)
    cached_tokens: int = 0
    text: str = ""

    @property
    def first_ms(self) -> float:
        return 1e3 * (self.arrivals[0] - self.sent_at)

    def gaps(self) -> list[tuple[float, float]]:
        """Beginning and end of the time between two tokens."""
        return list(itertools.pairwise(self.arrivals))


def body(num_words: int, tokens: int, index: int = 0) -> dict[str, Any]:
    """A request of `num_words` random words for an answer of exactly `tokens` tokens; `index` makes it another.

    With the tokenizer of random weights each word is a token from anywhere in the vocabulary: a text of few different
    tokens would go to few of the experts.
    """
    words = map(word, random.Random(index).choices(_IDS, k=num_words))
    return {
        "messages": [{"role": "user", "content": "".join(f" {each}" for each in words)}],
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def ask(client: httpx.AsyncClient, request: dict[str, Any] | bytes, until: float | None = None) -> Seen:
    """Send one request and record arrivals of tokens; disconnect at the first one after time `until`.

    Its time begins with the serialised body, which for a clip takes the client milliseconds to write.
    """
    content = request if isinstance(request, bytes) else json.dumps(request).encode()
    headers = {"content-type": "application/json"}
    seen = Seen(time.perf_counter())
    async with client.stream("POST", "/v1/chat/completions", content=content, headers=headers) as response:
        if response.status_code != 200:
            raise SystemExit(f"status {response.status_code}: {(await response.aread())[:500]!r}")
        async for line in response.aiter_lines():
            now = time.perf_counter()
            if not line.startswith(_DATA + "{"):
                continue
            event = json.loads(line[len(_DATA) :])
            if "error" in event:
                raise SystemExit(f"the stream ended with {event['error']}")
            if usage := event.get("usage"):
                seen.num_tokens = usage["prompt_tokens"], usage["completion_tokens"]
                seen.cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
            delta = event["choices"][0]["delta"] if event["choices"] else {}
            seen.text += delta.get("content") or ""
            if "content" in delta and "role" not in delta:
                seen.arrivals.append(now)
                if until is not None and now > until:
                    break
    return seen


def chat(
    url: str, indexes: range, num_words: int, tokens: int, rounds: int, until: float | None = None
) -> list[Seen]:
    """Run the clients `indexes`, each with `rounds` sequential requests."""

    async def one(client: httpx.AsyncClient, index: int) -> list[Seen]:
        return [
            await ask(client, body(num_words, tokens, 1000 * turn + index), until) for turn in range(rounds)
        ]

    async def all_of_them() -> list[list[Seen]]:
        async with client_of(url) as client:
            return await asyncio.gather(*(one(client, index) for index in indexes))

    return [seen for each in asyncio.run(all_of_them()) for seen in each]
