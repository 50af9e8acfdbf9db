"""Which cut of the experts' kernels is taken, by timings that someone else makes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mingc.kernels.triton.moe_config import Cut, Shape, rule

LEAST_GAIN = 0.03  # medians of one kernel differ by up to 1 % from run to run: noise must not change engines
_REPEATS = 3

TimeCuts = Callable[[Sequence[Cut]], Sequence[float]]
"""Microseconds of each cut, taken by turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The cut taken for a shape, its microseconds and those of the rule's cut, which it may be."""

    shape: Shape
    cut: Cut
    us: float
    default_us: float


def choose(shape: Shape, cuts: Sequence[Cut], time_us: TimeCuts) -> Choice:
    """The fastest of `cuts`, the first of which is the default; another one only when it is clearly faster.

    All are timed once. Then the fastest one, and the fastest first and second product together, are timed against the
    default again and again, and must be faster by `LEAST_GAIN` each time.
    """
    default = cuts[0]
    once = dict(zip(cuts, time_us(cuts), strict=True))
    finalists = _finalists(default, once)
    if not finalists:
        return Choice(shape=shape, cut=default, us=once[default], default_us=once[default])
    rounds = [time_us((default, *finalists)) for _ in range(_REPEATS)]
    default_times, *others = zip(*rounds, strict=True)
    default_us = statistics.median(default_times)
    best, best_us = default, default_us
    for cut, times in zip(finalists, others, strict=True):
        is_faster = all(us < (1 - LEAST_GAIN) * than for us, than in zip(times, default_times, strict=True))
        if is_faster and statistics.median(times) < best_us:
            best, best_us = cut, statistics.median(times)
    return Choice(shape=shape, cut=best, us=best_us, default_us=default_us)


def families(shapes: Iterable[Shape]) -> list[tuple[Shape, ...]]:
    """Shapes of one kernel that differ in their tokens only and that the rule cuts alike, by tokens."""
    ordered = sorted(shapes, key=lambda shape: (shape.kernel, shape.tokens))
    alike = groupby(ordered, key=lambda shape: (replace(shape, tokens=0), rule(shape)))
    return [tuple(members) for _, members in alike]


def _finalists(default: Cut, once: dict[Cut, float]) -> tuple[Cut, ...]:
    """What is worth timing again: the fastest, and what was fastest for each product put together.

    Nothing when all of it promises less than half of what is asked for.
    """
    ups = [cut for cut in once if cut == replace(default, up=cut.up)]
    downs = [cut for cut in once if cut == replace(default, down=cut.down)]
    up, down = min(ups, key=once.__getitem__), min(downs, key=once.__getitem__)
    both = replace(default, up=up.up, down=down.down)
    saved = 2 * once[default] - once[up] - once[down]
    best = min(once, key=once.__getitem__)
    gains = {best: once[default] - once[best]} | {both: saved}
    least = LEAST_GAIN / 2 * once[default]
    return tuple(cut for cut, gain in gains.items() if cut != default and gain > least)
