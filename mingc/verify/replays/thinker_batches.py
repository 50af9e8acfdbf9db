"""Decode steps of every batch size, held against the same artifact's steps of one request: no record is needed.

Both read the same pages, so only the roundings of the steps themselves differ. They may send a token to other experts.
Then steps of one request must give the same, when what a router reads is moved by no more than roundings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.replays.thinker_prompts import Prompt
from mingc.verify.replays.thinker_runner import ThinkerRunner

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_NAME = "decode steps"
_STEPS = 2  # that a size takes one after the other: the second reads what the first has written
_LEAST_KEPT = 0.8  # share of requests that a batch sends to the experts to which they go alone
# More than two ranks that meet add up in an order of their own, which may be another one for another size: with four on
# a CPU the tiny thinker keeps 0.85 of the requests of batches, and 0.85 of what the ranks give one after the other.
_LEAST_MET = 0.5
# With those to which roundings lead: of 15 such requests of the tiny thinker moves led to 14. Other pages are read.
_LEAST_LED = 0.9


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """The beginning of a text, and its next tokens (n,) as those of an answer."""

    beginning: Prompt
    tokens: Ints


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchRun:
    """Steps of n requests, together and each alone, over the same pages.

    Attributes:
        rows: (n,) the requests.
        done: (n,) how many of their tokens were decoded before.
        together, single: (steps, n, V) float32 logits.
    """

    rows: Ints
    done: Ints
    together: Floats
    single: Floats


# Whether roundings can lead a request (its number), after so many of its tokens, to the logits (steps, V) of a batch.
Explain = Callable[[int, int, Floats], bool]


def step_sizes(batches: Sequence[int]) -> list[int]:
    """How many requests run together: every batch size is run full, and with a row of padding where it has one."""
    sizes = []
    for below, size in zip(sorted(batches), sorted(batches)[1:], strict=False):
        sizes += [size, max(size - 1, below + 1)]
    return sizes


def plan_requests(prompts: Sequence[Prompt], sizes: Sequence[int]) -> list[Request]:
    """The most requests that a step holds, with the tokens of all steps that they are in.

    Recorded text, of which copies begin elsewhere and have other lengths. Empty when no prompt is a text that is long
    enough.
    """
    longest = (_STEPS + 1) * len(sizes)
    usable = [each for each in prompts if each.embeds is None and len(each.input_ids) > longest]
    if not usable:
        return []
    made = []
    for row in range(max(sizes, default=0)):
        prompt, turn = usable[row % len(usable)], row // len(usable)
        count = _STEPS * sum(size > row for size in sizes)
        ids = np.roll(prompt.input_ids, -turn)[: len(prompt.input_ids) - turn % len(sizes)]
        first = len(ids) - count
        made.append(
            Request(beginning=replace(prompt.beginning(first), input_ids=ids[:first]), tokens=ids[first:])
        )
    return made


def run_batches(run: ThinkerRunner, requests: Sequence[Request], sizes: Sequence[int]) -> list[BatchRun]:
    """Steps of as many requests as `sizes` say, in pages that hold nothing yet."""
    for row, request in enumerate(requests):
        run.prefill(request.beginning, row, run.max_chunk)
    done = np.zeros(len(requests), np.int64)
    made = []
    for size in sizes if requests else ():
        rows = np.arange(size)[::-1]  # no request has its own number in the batch
        # First together: what single steps write would hide that a batch does not write its own.
        together = _decode(run, requests, rows, done)
        single = np.concatenate([_decode(run, requests, rows[i : i + 1], done) for i in range(size)], axis=1)
        made.append(BatchRun(rows=rows, done=done[rows], together=together, single=single))
        done[rows] += _STEPS
    return made


def check_batches(
    batches: Sequence[BatchRun], explain: Explain | None, ledger: ComparisonLog, *, num_ranks: int
) -> None:
    """Hold every batch against its requests' single steps. Without `explain` roundings send nothing elsewhere."""
    num_off, num_lost, num_rows = 0, 0, sum(len(batch.rows) for batch in batches)
    least_kept = _LEAST_KEPT if num_ranks <= 2 else _LEAST_MET
    for batch in batches:
        is_off = ~ledger.is_near(batch.together, batch.single).all(axis=0)
        num_off += int(is_off.sum())
        is_left_out = np.zeros_like(is_off)
        if explain is not None and num_off <= (1 - least_kept) * num_rows:  # more are no rounding
            for place in np.flatnonzero(is_off):
                is_led = explain(int(batch.rows[place]), int(batch.done[place]), batch.together[:, place])
                num_lost += not is_led
                # Of more ranks a process of one has not the very pages: not all can be explained.
                is_left_out[place] = is_led or num_ranks > 2
        ledger.tensor(
            _NAME,
            batch.together[:, ~is_left_out],
            reference=batch.single[:, ~is_left_out],
            how=f"{len(batch.rows)} requests, each as it is alone",
        )
    if explain is not None and batches:
        ledger.share(
            f"{_NAME} (of several requests: rows)",
            same=num_rows - num_off,
            total=num_rows,
            minimum=least_kept,
            note="the others went to other experts by rounding",
        )
        if num_ranks > 2:
            _check_led(f"{_NAME} (of several requests: rows", num_rows - num_lost, num_rows, ledger)


def check_alone(
    batches: Sequence[BatchRun],
    alone: Sequence[Floats],
    explain: Explain,
    ledger: ComparisonLog,
    *,
    num_ranks: int,
) -> None:
    """Hold single steps of ranks that meet, captured on CUDA, against `alone`: all of each request's (n, V) logits."""
    if not batches:
        return
    places = [
        (int(row), int(done), batch.single[:, place])
        for batch in batches
        for place, (row, done) in enumerate(zip(batch.rows, batch.done, strict=True))
    ]
    found = np.stack([single for _, _, single in places])
    expected = np.stack([alone[row][done : done + _STEPS] for row, done, _ in places])
    if num_ranks <= 2:  # two numbers have one sum
        ledger.tensor(_NAME, found, reference=expected, how="graph by graph")
        return
    is_near = ledger.is_near(found, expected)
    ledger.share(
        f"{_NAME} (graph by graph: tokens)",
        same=int(is_near.sum()),
        total=is_near.size,
        minimum=_LEAST_MET,
        note="ranks that meet add up in another order",
    )
    if is_near.mean() >= _LEAST_MET:
        off = np.flatnonzero(~is_near.all(axis=1))
        is_led = [explain(*places[index]) for index in off]
        num_lost = len(is_led) - sum(is_led)
        _check_led(f"{_NAME} (graph by graph: rows", len(places) - num_lost, len(places), ledger)


def _check_led(name: str, same: int, total: int, ledger: ComparisonLog) -> None:
    ledger.share(
        f"{name}, or what roundings lead to)",
        same=same,
        total=total,
        minimum=_LEAST_LED,
        note="with moves of what routers read",
    )


def _decode(run: ThinkerRunner, requests: Sequence[Request], rows: Ints, done: Ints) -> Floats:
    """Logits (steps, n, V) of the next tokens of the requests `rows` (n,) in one batch; `done` says which are next."""
    logits = []
    for places in done[rows] + np.arange(_STEPS)[:, None]:
        ids = np.array([requests[row].tokens[place] for row, place in zip(rows, places, strict=True)])
        positions = np.array([len(requests[row].beginning.input_ids) for row in rows]) + places
        logits.append(run.decode(rows, ids, positions, positions + 1))
    return np.stack(logits)
