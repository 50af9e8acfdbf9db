"""How long a chunk of a prompt may be beside answers that run, as plain numbers. Imports no torch and times nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# Of the rate at which a prompt is read when nothing else runs, what a single one gets beside answers at least.
_LEAST_SHARE = 1 / 16
_UNTIMED_CHUNK = 64  # tokens beside answers, for each prompt, where nothing was timed


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTimes:
    """Milliseconds of one call at each size it is compiled for, as (size, ms) by size, ascending.

    Attributes:
        chunks: chunks of prompts, sizes in tokens.
        decodes: decode steps, sizes in requests.
    """

    chunks: tuple[tuple[int, float], ...]
    decodes: tuple[tuple[int, float], ...]

    def decode_ms(self, num_requests: int) -> float:
        """Of the smallest step that holds so many requests."""
        return next(ms for size, ms in self.decodes if size >= num_requests)


class PrefillPace:
    """Chooses the chunk of a step.

    Without running answers a chunk is as long as can be. Beside them it is the longest that takes no longer than
    their decode step: the time between two tokens then at most doubles. Where chunks cost nearly the same, however
    short (each reads most experts), such a chunk may read next to nothing. So prompts have a claim, a share of the
    rate at which the machine reads prompts alone: a single prompt to a sixteenth, P prompts beside N answers to
    (P - 1) / (P - 1 + N) if that is more. The chunk is then the shortest that keeps it, or, where none does, the one
    that comes nearest.

    Without times a chunk beside answers has at most 64 tokens for each prompt.

    Args:
        sizes: lengths that chunks are compiled for; shorter ones are padded to the next.
        times: of all of `sizes`.
    """

    def __init__(self, sizes: Sequence[int], times: StepTimes | None = None) -> None:
        assert times is None or {size for size, _ in times.chunks} >= {*sizes}, "every chunk was timed"
        self._sizes = sorted(sizes)
        self._times = times

    def longest(self, num_prompts: int, num_answers: int) -> int:
        """Tokens of the longest chunk that may run now, with `num_prompts` (at least 1) to be read."""
        if not num_answers:
            return self._sizes[-1]
        if self._times is None:
            fitting = [size for size in self._sizes if size <= _UNTIMED_CHUNK * num_prompts]
            return max(fitting, default=self._sizes[0])
        step_ms = self._times.decode_ms(num_answers)
        chunk_ms = {size: ms for size, ms in self._times.chunks if size in self._sizes}
        alone = max(size / ms for size, ms in chunk_ms.items())
        rates = {size: size / (ms + step_ms) for size, ms in chunk_ms.items()}
        others = num_prompts - 1
        claim = alone * max(_LEAST_SHARE, others / (others + num_answers))
        kept = [size for size in self._sizes if rates[size] >= claim]
        least = kept[0] if kept else max(self._sizes, key=lambda size: rates[size])
        return max([least, *(size for size in self._sizes if chunk_ms[size] <= step_ms)])
