"""Decode steps of every batch size compared with batch-1 steps of the same artifact; needs no reference.

Prompts are prefilled alone in both, so results differ only by rounding in the decode steps, which may route a token to
other experts. Then a batch-1 step with perturbed router inputs must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from conformance.reference_log import ReferenceLog
from conformance.thinker.prompts import beginning
from conformance.thinker.runner import Request, ThinkerRunner
from mingc.prompts.thinker_prompt import ThinkerPrompt

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_NAME = "decode steps"
_STEPS = 2  # consecutive steps per batch: the second reads the KV that the first wrote
_MIN_KEPT = 0.8  # fraction of requests routed in a batch as they are alone
# With more than two ranks the all-reduce may sum in another order for each batch size: with four CPU ranks the tiny
# thinker keeps 0.85 of the requests of batches, and 0.85 of the results of sequential ranks.
_MIN_KEPT_MULTI_RANK = 0.5
# Fraction kept or explained by rounding: perturbation explains 14 of 15 requests of the tiny thinker that differ, as
# the sequential ranks read other pages.
_MIN_EXPLAINED = 0.9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchRun:
    """Decode steps of n requests, in one batch and each alone.

    Attributes:
        requests: the n requests.
        together, single: (steps, n, V) float32 logits.
    """

    requests: Sequence[Request]
    together: Floats
    single: Floats


# Whether rounding explains the logits (steps, V) of a request.
ExplainedByRounding = Callable[[Request, Floats], bool]


def step_sizes(batches: Sequence[int]) -> list[int]:
    """Numbers of requests to run together: every batch size full, and with padding rows where possible."""
    sizes = []
    for below, size in zip(sorted(batches), sorted(batches)[1:], strict=False):
        sizes += [size, max(size - 1, below + 1)]
    return sizes


def plan_requests(prompts: Sequence[ThinkerPrompt], sizes: Sequence[int]) -> list[list[Request]]:
    """Make one batch of requests for each number in `sizes`.

    Requests are beginnings of recorded texts with the tokens that follow, another part of the text for every size.
    Copies of a text are rotated and have other lengths. Empty when no text prompt is long enough.
    """
    longest = (_STEPS + 1) * len(sizes)
    usable = [each for each in prompts if each.media_embeds is None and each.num_tokens > longest]
    if not usable:
        return []
    plan: list[list[Request]] = [[] for _ in sizes]
    for row in range(max(sizes, default=0)):
        prompt, turn = usable[row % len(usable)], row // len(usable)
        ids = np.roll(prompt.input_ids, -turn)[: prompt.num_tokens - turn % len(sizes)]
        first = len(ids) - _STEPS * sum(size > row for size in sizes)
        for requests, size in zip(plan, sizes, strict=True):
            if size > row:
                start = replace(beginning(prompt, first), input_ids=ids[:first])
                requests.append(Request(prompt=start, tokens=ids[first : first + _STEPS]))
                first += _STEPS
    return plan


def run_batches(run: ThinkerRunner, plan: Sequence[Sequence[Request]]) -> list[BatchRun]:
    """Run each batch of requests together, then each request alone."""
    return [
        BatchRun(
            requests=requests,
            together=run.force(requests),
            single=np.concatenate([run.force([each]) for each in requests], axis=1),
        )
        for requests in plan
    ]


def check_batches(
    batches: Sequence[BatchRun], explain: ExplainedByRounding | None, log: ReferenceLog, *, num_ranks: int
) -> None:
    """Compare every batch with the batch-1 steps of its requests. Without `explain`, rounding waives nothing."""
    num_off, num_unexplained, num_rows = 0, 0, sum(len(batch.requests) for batch in batches)
    min_kept = _MIN_KEPT if num_ranks <= 2 else _MIN_KEPT_MULTI_RANK
    for batch in batches:
        is_off = ~log.is_near(batch.together, batch.single).all(axis=0)
        num_off += int(is_off.sum())
        is_excluded = np.zeros_like(is_off)
        if (
            explain is not None and num_off <= (1 - min_kept) * num_rows
        ):  # more rows than rounding can explain
            for place in np.flatnonzero(is_off):
                is_explained = explain(batch.requests[int(place)], batch.together[:, place])
                num_unexplained += not is_explained
                # With more than two ranks the sequential ranks read other pages: not every row can be explained.
                is_excluded[place] = is_explained or num_ranks > 2
        how = f"batch of {len(batch.requests)} vs batch 1"
        if is_excluded.all():
            log.skip(f"{_NAME} ({how})", "rounding routed all of its rows to other experts")
            continue
        log.tensor(_NAME, batch.together[:, ~is_excluded], reference=batch.single[:, ~is_excluded], how=how)
    if explain is not None and batches:
        log.share(
            f"{_NAME} (batches: rows)",
            same=num_rows - num_off,
            total=num_rows,
            minimum=min_kept,
            note="rounding routed the others to other experts",
        )
        if num_ranks > 2:
            _check_explained(f"{_NAME} (batches: rows", num_rows - num_unexplained, num_rows, log)


def check_alone(
    batches: Sequence[BatchRun],
    alone: Sequence[Floats],
    explain: ExplainedByRounding,
    log: ReferenceLog,
    *,
    num_ranks: int,
) -> None:
    """Compare batch-1 steps of the rank group (CUDA graphs on CUDA) with `alone`, the steps of sequential ranks.

    `alone`: logits (steps, V) of every request, batch after batch.
    """
    if not batches:
        return
    places = [
        (request, batch.single[:, place]) for batch in batches for place, request in enumerate(batch.requests)
    ]
    found = np.stack([single for _, single in places])
    expected = np.stack(alone)
    if num_ranks <= 2:  # a sum of two has one order
        log.tensor(_NAME, found, reference=expected, how="sequential ranks")
        return
    is_near = log.is_near(found, expected)
    log.share(
        f"{_NAME} (sequential ranks: tokens)",
        same=int(is_near.sum()),
        total=is_near.size,
        minimum=_MIN_KEPT_MULTI_RANK,
        note="the all-reduce sums in another order",
    )
    if is_near.mean() >= _MIN_KEPT_MULTI_RANK:
        off = np.flatnonzero(~is_near.all(axis=1))
        is_explained = [explain(*places[index]) for index in off]
        num_unexplained = len(is_explained) - sum(is_explained)
        _check_explained(f"{_NAME} (sequential ranks: rows", len(places) - num_unexplained, len(places), log)


def _check_explained(name: str, same: int, total: int, log: ReferenceLog) -> None:
    log.share(
        f"{name}, or explained by rounding)",
        same=same,
        total=total,
        minimum=_MIN_EXPLAINED,
        note="with perturbed router inputs",
    )
