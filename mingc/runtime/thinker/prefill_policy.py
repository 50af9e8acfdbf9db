"""How much of a prompt's chunk runs beside answers in one step, as plain numbers. Imports no torch, times nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Of a decode step's time, what parts of a chunk may take beside it. Timed steps are of random tokens, which reach
# more experts than those of a text: real steps may take hardly more than half as long. Served steps are real ones.
_SHARE_OF_TIMED = 0.5
_SHARE_OF_SERVED = 0.8
_WEIGHT_OF_LAST = 0.05  # of a served step in the means: some twenty steps count
_LEAST_FACTOR = 0.25  # a step that the host saw too late or too early is not believed beyond it
_UNTIMED_TOKENS = (
    64  # of a whole chunk, what runs beside answers in a step for each prompt where nothing was timed
)
_SHORT_QUEUE = 3  # prompts that wait, the one under way included


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLatencyModel:
    """Milliseconds of one call at each size it is compiled for, as (size, ms) by size, ascending.

    Attributes:
        chunks: whole chunks of prompts, and two of the longest where they may run together, sizes in tokens.
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

    def decode_size(self, num_requests: int) -> int:
        """The size of that step."""
        return next(size for size, _ in self.decodes if size >= num_requests)


@dataclass(kw_only=True, slots=True)
class ChunkedPrefillPolicy:
    """Chooses how many parts of a chunk a step runs.

    A chunk is as long as can be: short ones cost nearly the same, as each reads most experts. But it runs in
    `num_parts`, each of some layers, and decode steps may come between them. Without running answers a step runs them
    all; beside answers as many as hardly make their decode step twice as long, and one at least. Two or three prompts
    that wait get half a chunk a step, four and more a whole one: answers yield to a queue, which every step of theirs
    makes longer, but not to a single prompt.

    Without times a step beside answers runs parts of a chunk that amount to 64 of its tokens for each prompt.

    Attributes:
        served: mean milliseconds of decode steps, by size.
        chunk_factor: what parts of chunks take when served, in the time that their size took when it was timed.
    """

    num_parts: int
    times: StepLatencyModel | None = None
    served: dict[int, float] = field(default_factory=dict, init=False)
    chunk_factor: float = field(default=1.0, init=False)

    def timed_ms(self, num_tokens: int, num_parts: int) -> float:
        """What so many parts of a chunk took when they were timed; 0 when they were not."""
        return 0.0 if self.times is None else self.times.chunk_ms(num_tokens) * num_parts / self.num_parts

    def see(self, ms: float, *, parts_ms: float, num_answers: int) -> None:
        """The device took `ms` for parts of a chunk that took `parts_ms` when timed, a decode step, or both."""
        if self.times is None:
            return
        size = self.times.decode_size(num_answers) if num_answers else 0
        if num_answers and not parts_ms:
            timed = self.times.decode_ms(num_answers)
            mean = self.served.get(size, min(ms, timed))  # the first may be late
            self.served[size] = mean + _WEIGHT_OF_LAST * (min(ms, timed / _LEAST_FACTOR) - mean)
        elif parts_ms and (not num_answers or size in self.served):
            factor = (ms - self.served.get(size, 0.0)) / parts_ms
            factor = min(max(factor, _LEAST_FACTOR), 1 / _LEAST_FACTOR)
            self.chunk_factor += _WEIGHT_OF_LAST * (factor - self.chunk_factor)

    def parts(self, num_tokens: int, *, num_prompts: int, num_answers: int) -> int:
        """Parts of a chunk of `num_tokens` that may run now, 1 to `num_parts`; `num_prompts` counts its own."""
        if not num_answers:
            return self.num_parts
        if self.times is None:
            share = _UNTIMED_TOKENS * num_prompts / num_tokens
        else:
            share = self._beside_ms(self.times, num_answers) / self.times.chunk_ms(num_tokens)
        parts = min(self.num_parts, max(1, int(share * self.num_parts)))
        if num_prompts == 1:
            return parts
        steps = 2 if num_prompts <= _SHORT_QUEUE else 1  # that a chunk takes
        return max(parts, math.ceil(self.num_parts / steps))

    def _beside_ms(self, times: StepLatencyModel, num_answers: int) -> float:
        """What parts of a chunk may take beside a decode step of so many answers, as they were timed."""
        served = self.served.get(times.decode_size(num_answers))
        if served is None:
            return _SHARE_OF_TIMED * times.decode_ms(num_answers)
        return _SHARE_OF_SERVED * served / self.chunk_factor
