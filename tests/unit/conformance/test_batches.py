"""Batches of the thinker's replay: planned requests, and rows that rounding must explain."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.reference_log import ReferenceLog
from conformance.thinker.batches import (
    BatchRun,
    check_alone,
    check_batches,
    plan_requests,
    step_sizes,
)
from conformance.thinker.runner import Request
from mingc.prompts.thinker_prompt import ThinkerPrompt


def prompt(length: int) -> ThinkerPrompt:
    return ThinkerPrompt(
        input_ids=np.arange(length),
        positions=np.tile(np.arange(length), (3, 1)),
        rope_delta=0,
        embed_kind=np.zeros(length, np.int64),
    )


def make_log() -> ReferenceLog:
    return ReferenceLog("thinker.safetensors", {}, tolerance=0.1, is_exact=False)


def outcomes(log: ReferenceLog) -> list[str]:
    return [each.outcome for each in log.comparisons]


@pytest.mark.parametrize(
    "batches, sizes", [((1,), []), ((1, 2, 4), [2, 2, 4, 3]), ((1, 8, 32), [8, 7, 32, 31])]
)
def test_every_batch_size_runs_full_and_with_padding(batches: tuple[int, ...], sizes: list[int]) -> None:
    assert step_sizes(batches) == sizes


def test_requests_differ_and_have_tokens_for_all_their_steps() -> None:
    sizes = step_sizes((1, 2, 4))
    plan = plan_requests([prompt(20), prompt(12)], sizes)  # the second is too short
    assert [len(batch) for batch in plan] == sizes
    requests = [each for batch in plan for each in batch]
    beginnings = {tuple(each.prompt.input_ids) for each in requests}
    assert len(beginnings) == sum(sizes) and len({len(each) for each in beginnings}) > 1
    for each in requests:
        assert len(each.tokens) == 2
        assert each.prompt.positions.shape == (3, each.prompt.num_tokens)
    assert not plan_requests([prompt(12)], sizes)


def batch(rows: int, *, off: int = 0) -> BatchRun:
    """Two steps of `rows` requests, the first `off` of which have wrong logits."""
    single = np.random.default_rng(0).normal(size=(2, rows, 50)).astype(np.float32)
    together = single.copy()
    together[:, :off] = np.roll(single, 1, axis=-1)[:, :off]
    requests = [Request(prompt=prompt(4), tokens=np.array([row, 0])) for row in range(rows)]
    return BatchRun(requests=requests, together=together, single=single)


@pytest.mark.parametrize(
    "num_ranks, off, is_reachable, expected",
    [
        (1, 0, False, ["pass", "pass"]),
        (1, 1, True, ["pass", "pass"]),
        (1, 1, False, ["FAIL", "pass"]),
        (1, 4, True, ["FAIL", "FAIL"]),  # more rows than rounding can explain
        (4, 4, True, ["pass", "pass", "pass"]),  # the all-reduce sums in another order
        (4, 1, False, ["pass", "pass", "pass"]),  # one of ten need not be explained
        (4, 2, False, ["pass", "pass", "FAIL"]),
        (4, 6, True, ["FAIL", "FAIL", "pass"]),
    ],
)
def test_a_wrong_row_must_be_explained_by_rounding(
    num_ranks: int, off: int, is_reachable: bool, expected: list[str]
) -> None:
    log = make_log()
    asked = []

    def explain(request: Request, logits: NDArray[np.float32]) -> bool:
        asked.append((int(request.tokens[0]), logits.shape))
        return is_reachable

    check_batches([batch(10, off=off)], explain, log, num_ranks=num_ranks)
    assert outcomes(log) == expected
    is_asked = expected[1] == "pass"
    assert asked == [(row, (2, 50)) for row in range(off if is_asked else 0)]


def test_a_batch_without_a_comparable_row_has_not_passed() -> None:
    log = make_log()
    check_batches([batch(2, off=2), batch(18)], lambda request, logits: True, log, num_ranks=1)
    assert outcomes(log) == ["not checked", "pass", "pass"]


def test_in_float32_rounding_explains_nothing() -> None:
    log = make_log()
    check_batches([batch(10, off=1)], None, log, num_ranks=1)
    assert outcomes(log) == ["FAIL"]


@pytest.mark.parametrize(
    "num_ranks, off, is_reachable, expected",
    [
        (2, 1, True, ["FAIL"]),
        (4, 0, False, ["pass", "pass"]),
        (4, 4, True, ["pass", "pass"]),
        (4, 1, False, ["pass", "pass"]),
        (4, 2, False, ["pass", "FAIL"]),
        (4, 6, True, ["FAIL"]),  # more rows than rounding can explain
    ],
)
def test_a_rank_group_may_differ_from_sequential_ranks_by_summation_order(
    num_ranks: int, off: int, is_reachable: bool, expected: list[str]
) -> None:
    log, run = make_log(), batch(10, off=off)
    alone = [run.together[:, place] for place in range(10)]
    asked = []

    def explain(request: Request, logits: NDArray[np.float32]) -> bool:
        asked.append(int(request.tokens[0]))
        return is_reachable

    check_alone([run], alone, explain, log, num_ranks=num_ranks)
    assert outcomes(log) == expected
    assert asked == list(range(off if len(expected) == 2 else 0))
