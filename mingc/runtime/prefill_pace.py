"""How much of a prompt's chunk runs beside answers in one step, as plain numbers. Imports no torch, times nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

# Of a decode step's time, what parts of a chunk may take beside it. Timed steps are of random tokens, which reach
# more experts than those of a text: real steps may take hardly more than half as long.
_SHARE_OF_STEP = 0.5
_UNTIMED_TOKENS = (
    64  # of a whole chunk, what runs beside answers in a step for each prompt where nothing was timed
)
_SHORT_QUEUE = 3  # prompts that wait, the one under way included


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Milliseconds of one call at each size it is compiled for, as (size, ms) by size, ascending.

    Attributes:
        chunks: whole chunks of prompts, sizes in tokens.
        decodes: decode steps, sizes in requests.
    """

    chunks: tuple[tuple[int, float], ...]
    decodes: tuple[tuple[int, float], ...]

    def chunk_ms(self, num_tokens: int) -> float:
        """Of the smallest chunk that holds so many tokens."""
        return next(ms for size, ms in self.chunks if size >= num_tokens)

    def decode_ms(self, num_requests: int) -> float:
        """Of the smallest step that holds so many requests."""
        return next(ms for size, ms in self.decodes if size >= num_requests)


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillPace:
    """Chooses how many parts of a chunk a step runs.

    A chunk is as long as can be: short ones cost nearly the same, as each reads most experts. But it runs in
    `num_parts`, each of some layers, and decode steps may come between them. Without running answers a step runs them
    all; beside answers as many as take half of their decode step, and one at least. Two or three prompts that wait get
    half a chunk a step, four and more a whole one: answers yield to a queue, which every step of theirs makes longer,
    but not to a single prompt.

    Without times a step beside answers runs parts of a chunk that amount to 64 of its tokens for each prompt.
    """

    num_parts: int
    times: StepTimes | None = None

    def parts(self, num_tokens: int, *, num_prompts: int, num_answers: int) -> int:
        """Parts of a chunk of `num_tokens` that may run now, 1 to `num_parts`; `num_prompts` counts its own."""
        if not num_answers:
            return self.num_parts
        if self.times is None:
            share = _UNTIMED_TOKENS * num_prompts / num_tokens
        else:
            share = _SHARE_OF_STEP * self.times.decode_ms(num_answers) / self.times.chunk_ms(num_tokens)
        parts = min(self.num_parts, max(1, int(share * self.num_parts)))
        if num_prompts == 1:
            return parts
        steps = 2 if num_prompts <= _SHORT_QUEUE else 1  # that a chunk takes
        return max(parts, math.ceil(self.num_parts / steps))
