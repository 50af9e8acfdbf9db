"""Decode steps of every batch size compared with batch-1 steps of the same artifact; needs no reference.

Both read the same KV pages, so results differ only by rounding in the steps themselves, which may route a token to
other experts. Then a batch-1 step with perturbed router inputs must give the same result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.replays.thinker.prompts import Prompt
from mingc.verify.replays.thinker.runner import ThinkerRunner

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_NAME = "decode steps"
_STEPS = 2  # consecutive steps per batch size: the second reads the KV that the first wrote
_MIN_KEPT = 0.8  # fraction of requests routed in a batch as they are alone
# With more than two ranks the all-reduce may sum in another order for each batch size: with four CPU ranks the tiny
# thinker keeps 0.85 of the requests of batches, and 0.85 of the results of sequential ranks.
_MIN_KEPT_MULTI_RANK = 0.5
# Fraction kept or explained by rounding: perturbation explains 14 of 15 such requests of the tiny thinker, as the
# sequential ranks read other pages.
_MIN_EXPLAINED = 0.9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """The beginning of a recorded text as the prompt, and its next tokens (n,) as the answer."""

    beginning: Prompt
    tokens: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchRun:
    """Decode steps of n requests, in one batch and each alone, over the same pages.

    Attributes:
        rows: (n,) request numbers.
        done: (n,) tokens decoded before these steps.
        together, single: (steps, n, V) float32 logits.
    """

    rows: Ints
    done: Ints
    together: Floats
    single: Floats


# Whether rounding explains the logits (steps, V) of a batch: request number, tokens decoded before, logits.
ExplainedByRounding = Callable[[int, int, Floats], bool]


def step_sizes(batches: Sequence[int]) -> list[int]:
    """Numbers of requests to run together: every batch size full, and with padding rows where possible."""
    sizes = []
    for below, size in zip(sorted(batches), sorted(batches)[1:], strict=False):
        sizes += [size, max(size - 1, below + 1)]
    return sizes


def plan_requests(prompts: Sequence[Prompt], sizes: Sequence[int]) -> list[Request]:
    """Requests for the largest step, each with tokens for all steps it takes part in.

    Requests are recorded texts; copies of a text are rotated and have other lengths. Empty when no text prompt is long
    enough.
    """
    longest = (_STEPS + 1) * len(sizes)
    usable = [each for each in prompts if each.embeds is None and len(each.input_ids) > longest]
    if not usable:
        return []
    requests = []
    for row in range(max(sizes, default=0)):
        prompt, turn = usable[row % len(usable)], row // len(usable)
        count = _STEPS * sum(size > row for size in sizes)
        ids = np.roll(prompt.input_ids, -turn)[: len(prompt.input_ids) - turn % len(sizes)]
        first = len(ids) - count
        requests.append(
            Request(beginning=replace(prompt.beginning(first), input_ids=ids[:first]), tokens=ids[first:])
        )
    return requests


def run_batches(run: ThinkerRunner, requests: Sequence[Request], sizes: Sequence[int]) -> list[BatchRun]:
    """Run decode steps of each of `sizes` on empty pages."""
    for row, request in enumerate(requests):
        run.prefill(request.beginning, row, run.max_chunk)
    done = np.zeros(len(requests), np.int64)
    batches = []
    for size in sizes if requests else ():
        rows = np.arange(size)[::-1]  # reversed, so that a request's row differs from its number
        # The batch first: KV written by single steps would hide a batch that fails to write its own.
        together = _decode(run, requests, rows, done)
        single = np.concatenate([_decode(run, requests, rows[i : i + 1], done) for i in range(size)], axis=1)
        batches.append(BatchRun(rows=rows, done=done[rows], together=together, single=single))
        done[rows] += _STEPS
    return batches


def check_batches(
    batches: Sequence[BatchRun], explain: ExplainedByRounding | None, log: ComparisonLog, *, num_ranks: int
) -> None:
    """Compare every batch with the batch-1 steps of its requests. Without `explain`, rounding waives nothing."""
    num_off, num_unexplained, num_rows = 0, 0, sum(len(batch.rows) for batch in batches)
    min_kept = _MIN_KEPT if num_ranks <= 2 else _MIN_KEPT_MULTI_RANK
    for batch in batches:
        is_off = ~log.is_near(batch.together, batch.single).all(axis=0)
        num_off += int(is_off.sum())
        is_excluded = np.zeros_like(is_off)
        if (
            explain is not None and num_off <= (1 - min_kept) * num_rows
        ):  # more rows than rounding can explain
            for place in np.flatnonzero(is_off):
                is_explained = explain(
                    int(batch.rows[place]), int(batch.done[place]), batch.together[:, place]
                )
                num_unexplained += not is_explained
                # With more than two ranks the sequential ranks read other pages: not every row can be explained.
                is_excluded[place] = is_explained or num_ranks > 2
        log.tensor(
            _NAME,
            batch.together[:, ~is_excluded],
            reference=batch.single[:, ~is_excluded],
            how=f"batch of {len(batch.rows)} vs batch 1",
        )
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
    log: ComparisonLog,
    *,
    num_ranks: int,
) -> None:
    """Compare batch-1 steps of the rank group (CUDA graphs on CUDA) with `alone`, logits (n, V) of sequential ranks."""
    if not batches:
        return
    places = [
        (int(row), int(done), batch.single[:, place])
        for batch in batches
        for place, (row, done) in enumerate(zip(batch.rows, batch.done, strict=True))
    ]
    found = np.stack([single for _, _, single in places])
    expected = np.stack([alone[row][done : done + _STEPS] for row, done, _ in places])
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


def _check_explained(name: str, same: int, total: int, log: ComparisonLog) -> None:
    log.share(
        f"{name}, or explained by rounding)",
        same=same,
        total=total,
        minimum=_MIN_EXPLAINED,
        note="with perturbed router inputs",
    )


def _decode(run: ThinkerRunner, requests: Sequence[Request], rows: Ints, done: Ints) -> Floats:
    """Logits (steps, n, V) of the next tokens of requests `rows` (n,) in one batch; `done` counts decoded tokens."""
    logits = []
    for places in done[rows] + np.arange(_STEPS)[:, None]:
        ids = np.array([requests[row].tokens[place] for row, place in zip(rows, places, strict=True)])
        positions = np.array([len(requests[row].beginning.input_ids) for row in rows]) + places
        logits.append(run.decode(rows, ids, positions, positions + 1))
    return np.stack(logits)
