"""How much of a prompt's chunk runs beside answers in one step, as plain numbers. Imports no torch, times nothing."""

from __future__ import annotations

from dataclasses import dataclass

# Of a decode step's time, what parts of a chunk may take beside it. Timed steps are of random tokens, which reach
# more experts than those of a text: real steps may take hardly more than half as long.
_SHARE_OF_STEP = 0.5
_UNTIMED_TOKENS = (
    64  # of a whole chunk, what runs beside answers in a step for each prompt where nothing was timed
)


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
    all; beside answers as many as take half of their decode step, and one at least. Of P prompts and N answers a step
    runs (P - 1) / (P - 1 + N) of the parts if these are more: answers yield to a queue of prompts, not to a single one.

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
            others = num_prompts - 1
            paced = _SHARE_OF_STEP * self.times.decode_ms(num_answers) / self.times.chunk_ms(num_tokens)
            share = max(paced, others / (others + num_answers))
        return max(1, min(self.num_parts, int(share * self.num_parts)))
