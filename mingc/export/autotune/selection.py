"""Choice of the fastest kernel configuration from timings that the caller makes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from mingc.kernels.triton.moe_config import MoeConfig, MoeProblem, default_config

MIN_GAIN = 0.03  # medians of one kernel differ by up to 1 % from run to run: noise must not change engines
_REPEATS = 3

TimeConfigs = Callable[[Sequence[MoeConfig]], Sequence[float]]
"""Microseconds of each configuration, timed in turns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The configuration selected for a problem, its microseconds, and the microseconds of the default."""

    problem: MoeProblem
    config: MoeConfig
    us: float
    default_us: float


def select_fastest(problem: MoeProblem, configs: Sequence[MoeConfig], time_us: TimeConfigs) -> Selection:
    """The fastest of `configs`; the first one, the default, unless another is faster by `MIN_GAIN`.

    All are timed once. Then the fastest one, and the fastest first and second GEMM combined, are timed against the
    default `_REPEATS` times and must be faster by `MIN_GAIN` each time.
    """
    default = configs[0]
    once = dict(zip(configs, time_us(configs), strict=True))
    finalists = _finalists(default, once)
    if not finalists:
        return Selection(problem=problem, config=default, us=once[default], default_us=once[default])
    rounds = [time_us((default, *finalists)) for _ in range(_REPEATS)]
    default_times, *others = zip(*rounds, strict=True)
    default_us = statistics.median(default_times)
    best, best_us = default, default_us
    for config, times in zip(finalists, others, strict=True):
        is_faster = all(us < (1 - MIN_GAIN) * base for us, base in zip(times, default_times, strict=True))
        if is_faster and statistics.median(times) < best_us:
            best, best_us = config, statistics.median(times)
    return Selection(problem=problem, config=best, us=best_us, default_us=default_us)


def group_by_default(problems: Iterable[MoeProblem]) -> list[tuple[MoeProblem, ...]]:
    """Problems that share kernel, sizes and default configuration and differ in tokens only, ordered by tokens."""
    ordered = sorted(problems, key=lambda problem: (problem.kernel, problem.tokens))
    groups = groupby(ordered, key=lambda problem: (replace(problem, tokens=0), default_config(problem)))
    return [tuple(members) for _, members in groups]


def _finalists(default: MoeConfig, once: dict[MoeConfig, float]) -> tuple[MoeConfig, ...]:
    """Configurations worth timing again: the fastest, and the fastest for each GEMM combined.

    Empty when all of them promise less than half of the gain required.
    """
    ups = [config for config in once if config == replace(default, up=config.up)]
    downs = [config for config in once if config == replace(default, down=config.down)]
    up, down = min(ups, key=once.__getitem__), min(downs, key=once.__getitem__)
    both = replace(default, up=up.up, down=down.down)
    saved = 2 * once[default] - once[up] - once[down]
    best = min(once, key=once.__getitem__)
    gains = {best: once[default] - once[best]} | {both: saved}
    required = MIN_GAIN / 2 * once[default]
    return tuple(config for config, gain in gains.items() if config != default and gain > required)
