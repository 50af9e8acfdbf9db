"""Limits of what one API key has in flight: requests, tokens and seconds of speech. Counted until a request ends."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from mingc.errors import CapacityError, RequestError
from mingc.server.options import ServeOptions

# Before a text is tokenized and spoken, its length in UTF-8 tells how much it is, in English as well as in Chinese.
_BYTES_PER_TOKEN = 4
SECONDS_PER_BYTE = 0.08


@dataclass(frozen=True, slots=True)
class KeyUse:
    """What one request adds to its key's sums: `used`, by name of the limit; see `KeyLimits`.

    What has no limit is counted too: the sums of a key are dropped when it has no request any more.
    """

    limits: dict[str, int]
    used: Counter[str]
    own: Counter[str]

    def add_text(self, prompt: str | Sequence[int], max_tokens: int, *, is_spoken: bool = False) -> None:
        """Count the text or tokens of a prompt, and `max_tokens` of all its answers; nothing if it raises.

        Raises: see `add`.
        """
        num_tokens = len(prompt.encode()) // _BYTES_PER_TOKEN if isinstance(prompt, str) else len(prompt)
        amounts = {"--key-max-tokens": num_tokens + max_tokens}
        if is_spoken:
            amounts["--key-max-audio-seconds"] = round(max_tokens * _BYTES_PER_TOKEN * SECONDS_PER_BYTE)
        for name, amount in amounts.items():
            self._check(name, amount)
        for name, amount in amounts.items():
            self.add(name, amount)

    def add_speech(self, text: str) -> None:
        """Count the speech of a text. Raises: see `add`."""
        self.add("--key-max-audio-seconds", round(len(text.encode()) * SECONDS_PER_BYTE))

    def add(self, name: str, amount: int) -> None:
        """Count `amount` until the request ends.

        Raises: CapacityError (429) when the other requests of the key leave too little, RequestError when the limit is
            lower than `amount`.
        """
        self._check(name, amount)
        self.used[name] += amount
        self.own[name] += amount

    def _check(self, name: str, amount: int) -> None:
        limit = self.limits.get(name, math.inf)
        what = name.removeprefix("--key-max-").replace("-", " ")
        if amount > limit:
            raise RequestError(
                f"this request may need {amount} {what}; an API key may have {limit} in flight ({name})",
                fix="send less text or a smaller 'max_tokens'",
                code="key_limit_exceeded",
            )
        if self.used[name] + amount > limit:
            raise CapacityError(
                f"the requests of this API key have {self.used[name]} {what} in flight, this one may need {amount}, "
                f"and the limit is {limit} ({name}); try again when one of them has ended",
                status=429,
                code="rate_limit_exceeded",
            )


class KeyLimits:
    """What the requests of every key have in flight. Call it from the event loop only.

    The names of limits are those of their options. Tokens are those of a prompt, by the length of its text, and
    `max_tokens` of each answer. Seconds of speech are what a text, or an answer of `max_tokens`, takes to be spoken.
    """

    def __init__(self, options: ServeOptions) -> None:
        limits = {
            "--key-max-requests": options.key_max_requests,
            "--key-max-tokens": options.key_max_tokens,
            "--key-max-audio-seconds": options.key_max_audio_seconds,
        }
        self.limits = {name: limit for name, limit in limits.items() if limit is not None}
        self._used: dict[bytes, Counter[str]] = {}

    @contextmanager
    def admit(self, key: bytes | None) -> Iterator[KeyUse]:
        """Count a request of `key` (None: it needs none) until the block ends. Raises: CapacityError (429)."""
        used = Counter[str]() if key is None else self._used.setdefault(key, Counter())
        use = KeyUse({} if key is None else self.limits, used, Counter())
        try:
            use.add("--key-max-requests", 1)
            yield use
        finally:
            used.subtract(use.own)
            if key is not None and not any(used.values()):
                self._used.pop(key, None)
