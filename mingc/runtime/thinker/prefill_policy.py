"""Chunked prefill policy: how much of a prefill chunk runs beside decoding requests in one step. Imports no torch."""

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
    `num_layer_groups`, each of some layers, and decode steps may come between them. Without running answers a step runs
    them all; beside answers as many as hardly make their decode step twice as long, and one at least. Two or three
    prompts that wait get half a chunk a step, four and more a whole one: answers yield to a queue, which every step of theirs
    makes longer, but not to a single prompt.

    Without latency_model a step beside answers runs parts of a chunk that amount to 64 of its tokens for each prompt.

    Attributes:
        served: mean milliseconds of decode steps, by size.
        chunk_factor: what parts of chunks take when served, in the time that their size took when it was timed.
    """

    num_layer_groups: int
    latency_model: StepLatencyModel | None = None
    served: dict[int, float] = field(default_factory=dict, init=False)
    chunk_factor: float = field(default=1.0, init=False)

    def timed_ms(self, num_tokens: int, num_layer_groups: int) -> float:
        """What so many parts of a chunk took when they were timed; 0 when they were not."""
        return (
            0.0
            if self.latency_model is None
            else self.latency_model.chunk_ms(num_tokens) * num_layer_groups / self.num_layer_groups
        )

    def observe(self, ms: float, *, prefill_ms: float, num_decoding: int) -> None:
        """The device took `ms` for parts of a chunk that took `prefill_ms` when timed, a decode step, or both."""
        if self.latency_model is None:
            return
        size = self.latency_model.decode_size(num_decoding) if num_decoding else 0
        if num_decoding and not prefill_ms:
            timed = self.latency_model.decode_ms(num_decoding)
            mean = self.served.get(size, min(ms, timed))  # the first may be late
            self.served[size] = mean + _WEIGHT_OF_LAST * (min(ms, timed / _LEAST_FACTOR) - mean)
        elif prefill_ms and (not num_decoding or size in self.served):
            factor = (ms - self.served.get(size, 0.0)) / prefill_ms
            factor = min(max(factor, _LEAST_FACTOR), 1 / _LEAST_FACTOR)
            self.chunk_factor += _WEIGHT_OF_LAST * (factor - self.chunk_factor)

    def layer_groups(self, num_tokens: int, *, num_prompts: int, num_decoding: int) -> int:
        """Parts of a chunk of `num_tokens` that may run now, 1 to `num_layer_groups`; `num_prompts` counts its own."""
        if not num_decoding:
            return self.num_layer_groups
        if self.latency_model is None:
            share = _UNTIMED_TOKENS * num_prompts / num_tokens
        else:
            share = self._beside_ms(self.latency_model, num_decoding) / self.latency_model.chunk_ms(
                num_tokens
            )
        parts = min(self.num_layer_groups, max(1, int(share * self.num_layer_groups)))
        if num_prompts == 1:
            return parts
        steps = 2 if num_prompts <= _SHORT_QUEUE else 1  # that a chunk takes
        return max(parts, math.ceil(self.num_layer_groups / steps))

    def _beside_ms(self, latency_model: StepLatencyModel, num_decoding: int) -> float:
        """What parts of a chunk may take beside a decode step of so many answers, as they were timed."""
        served = self.served.get(latency_model.decode_size(num_decoding))
        if served is None:
            return _SHARE_OF_TIMED * latency_model.decode_ms(num_decoding)
        return _SHARE_OF_SERVED * served / self.chunk_factor
