"""thinker.safetensors: positions, prefill, KV pages, router choices and greedy continuations of recorded prompts.

Prompts run through the same worker and rank group as a server's, with pages that are not in order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import ThinkerParameters
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.replays.thinker_batches import (
    BatchRun,
    Explain,
    Request,
    check_alone,
    check_batches,
    plan_requests,
    run_batches,
    step_sizes,
)
from mingc.verify.replays.thinker_prompts import Prompt, read_prompts
from mingc.verify.replays.thinker_runner import ThinkerRunner
from mingc.verify.replays.thinker_teacher_forced import UNEVEN_CHUNK, FollowedCase, FollowedThinker
from mingc.verify.stages import Engines

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_KV = re.compile(r"^(?P<case>.+)\.kv\.layer(?P<layer>\d+)_(?P<what>keys_rotated|values)$")
_STEPS = "decode steps of several requests"


def replay(engines: Engines, ledger: ComparisonLog) -> None:
    """Every case alone, in chunks, and rows of a batch together; of half precision also followed runs."""
    parameters = engines.parameters.thinker
    assert parameters is not None
    prompts: dict[str, list[Prompt]] = {}
    for case in ledger.cases("input_ids"):
        with ledger.case(case):
            prompts[case] = read_prompts(case, engines, ledger, parameters)
    if not prompts:
        return
    sizes = step_sizes(engines.stage("thinker")["decode_attention"].spec.dim("B").buckets)
    requests = plan_requests([prompt for rows in prompts.values() for prompt in rows], sizes)
    if sizes and not requests:
        ledger.skip(_STEPS, "no recorded prompt is of text and long enough")
    followed: dict[str, FollowedCase] = {}
    alone: list[Floats] = []
    is_exact = ledger.is_exact and engines.artifact.manifest.stages["thinker"].quantization_error is None
    if not is_exact:
        # Before the ranks meet: here they run one after the other.
        followed, alone = _follow(_make_followed(engines, parameters, ledger), prompts, requests, ledger)
    widest = max(len(requests), *(len(rows) for rows in prompts.values()), 1)
    run = ThinkerRunner(engines, parameters, rows=widest, longest=_longest(ledger))
    batches: list[BatchRun] = []
    try:
        # Before anything else is in the pages: a step that does not write its row must not find it there.
        with ledger.case(_STEPS):
            batches = run_batches(run, requests, sizes)
        for case, rows in prompts.items():
            with ledger.case(case):
                if len(rows) == 1:
                    _replay_prompt(case, rows[0], run, ledger, followed.get(case))
                _replay_greedy(case, rows, run, ledger, followed.get(case))
    finally:
        run.close()
    with ledger.case(_STEPS):
        explain: Explain | None = None
        if not is_exact:
            explain = _explaining(engines, parameters, requests, ledger)
            check_alone(batches, alone, explain, ledger, num_ranks=run.num_ranks)
        check_batches(batches, explain, ledger, num_ranks=run.num_ranks)


def _explaining(
    engines: Engines, parameters: ThinkerParameters, requests: Sequence[Request], ledger: ComparisonLog
) -> Explain:
    """What looks whether roundings can lead to a batch's logits. To be called when the ranks have parted."""
    make = functools.cache(lambda: _make_followed(engines, parameters, ledger))

    def is_near(value: Floats, reference: Floats) -> bool:
        return bool(ledger.is_near(value, reference))

    return lambda row, done, logits: make().can_give(requests[row], done, logits, is_near)


def _make_followed(engines: Engines, parameters: ThinkerParameters, ledger: ComparisonLog) -> FollowedThinker:
    devices = engines.rank_devices()
    return FollowedThinker(
        engines.stage("thinker"),
        [(engines.share("thinker", rank), devices[rank]) for rank in range(1, len(devices))],
        parameters,
        quantization_error=engines.artifact.manifest.stages["thinker"].quantization_error,
        longest=_longest(ledger),
        device=engines.device,
    )


def _follow(
    thinker: FollowedThinker,
    prompts: Mapping[str, Sequence[Prompt]],
    requests: Sequence[Request],
    ledger: ComparisonLog,
) -> tuple[dict[str, FollowedCase], list[Floats]]:
    """Followed runs of all cases, by case, those that fail missing; and each of `requests` alone."""
    followed: dict[str, FollowedCase] = {}
    for case, rows in prompts.items():
        with ledger.case(case):
            followed[case] = thinker.check(case, rows, ledger)
    return followed, [thinker.run_alone(each) for each in requests]


def _longest(ledger: ComparisonLog) -> int:
    """Tokens of the longest prompt and the longest answer."""
    lengths: list[int] = [
        ledger.references[f"{case}.input_ids"].shape[1] for case in ledger.cases("input_ids")
    ]
    steps: list[int] = [
        ledger.references[f"{case}.greedy_ids"].shape[1] for case in ledger.cases("greedy_ids")
    ]
    return max(lengths) + max(steps, default=0)


def _replay_prompt(
    case: str, prompt: Prompt, run: ThinkerRunner, ledger: ComparisonLog, followed: FollowedCase | None
) -> None:
    num_tokens = len(prompt.input_ids)
    excuse = followed.excuse if followed is not None else ""
    whole = run.prefill(prompt, 0, run.max_chunk)
    ledger.tensor(f"{case}.logits_last", whole[-1][None], excuse=excuse)
    # More than two ranks that meet may add up in another order.
    free = followed.free if followed is not None and run.num_ranks <= 2 else {}
    if run.max_chunk in free:
        ledger.tensor(f"{case}.logits_last", whole[-1], reference=free[run.max_chunk], how="graph by graph")
    if num_tokens <= run.max_chunk:
        _check_experts(case, run.experts(num_tokens), ledger, excuse)
    for name in ledger.references:
        match = _KV.match(name)
        if match is None or match["case"] != case:
            continue
        kind = "k" if match["what"] == "keys_rotated" else "v"
        state = f"layers.{match['layer']}.attention.{kind}_pages"
        held = run.cached(state, num_tokens)
        # Rank 0 is this process: of sharded heads it has the first ones.
        ledger.tensor(name, held, reference=ledger.references[name][0, : len(held)])
    uneven = run.prefill(prompt, 0, UNEVEN_CHUNK)[-1][None]
    ledger.tensor(f"{case}.logits_last", uneven, how="in uneven chunks", excuse=excuse)
    if UNEVEN_CHUNK in free:
        how = "in uneven chunks, graph by graph"
        ledger.tensor(f"{case}.logits_last", uneven[0], reference=free[UNEVEN_CHUNK], how=how)
    if f"{case}.logits" in ledger:
        single = np.stack(run.prefill(prompt, 0, 1))[None]
        ledger.tensor(f"{case}.logits", single, how="token by token", excuse=excuse)


def _replay_greedy(
    case: str,
    prompts: Sequence[Prompt],
    run: ThinkerRunner,
    ledger: ComparisonLog,
    followed: FollowedCase | None,
) -> None:
    excuse = followed.excuse if followed is not None else ""
    steps = ledger.references[f"{case}.greedy_ids"].shape[1] if f"{case}.greedy_ids" in ledger else 1
    ids, logits = run.greedy(prompts, steps)
    ledger.tensor(f"{case}.logits_last_valid", logits[:, 0], excuse=excuse)
    if f"{case}.greedy_ids" not in ledger:
        return
    recorded = ledger.references[f"{case}.greedy_ids"].astype(np.int64)
    same = ids == recorded
    # After another token the logits are of another text: compare the steps before it.
    until = steps if same.all() else 1 + int(same.all(axis=0).argmin())
    reference = ledger.references.get(f"{case}.greedy_logits")
    if reference is not None and not excuse and not ledger.is_exact:
        last, row = until - 1, ~same[:, until - 1]
        nearly = np.take_along_axis(reference[:, last], ids[:, last, None], axis=1)
        best = np.take_along_axis(reference[:, last], recorded[:, last, None], axis=1)
        if ledger.is_near(nearly, best)[row].all():
            excuse = "the recorded logits of both tokens are nearly equal"
    ledger.ids(f"{case}.greedy_ids", ids, excuse=excuse)
    if reference is not None:
        how = "" if same.all() else f"first {until} steps"
        name = f"{case}.greedy_logits"
        ledger.tensor(name, logits[:, :until], reference=reference[:, :until], how=how, excuse=excuse)


def _check_experts(case: str, found: tuple[Ints, Floats] | None, ledger: ComparisonLog, excuse: str) -> None:
    ids_name, weights_name = f"{case}.moe_topk_ids", f"{case}.moe_topk_weights"
    if ids_name not in ledger:
        return
    if found is None:
        ledger.skip(ids_name, "the prefill engine of this artifact does not give out its router's choices")
        return
    ids, weights = _sorted_experts(ledger.references[ids_name][:, 0], ledger.references[weights_name][:, 0])
    found_ids, found_weights = _sorted_experts(*found)
    ledger.ids(ids_name, found_ids, reference=ids, how="as sets", excuse=excuse)
    if found_ids.shape == ids.shape and (found_ids == ids).all():
        ledger.tensor(weights_name, found_weights, reference=weights, how="by expert")


def _sorted_experts(ids: NDArray[np.generic], weights: NDArray[np.generic]) -> tuple[Ints, Floats]:
    """Each token's experts and their weights (…, k), by id."""
    order = np.argsort(ids, axis=-1)
    return (
        np.take_along_axis(ids, order, axis=-1).astype(np.int64),
        np.take_along_axis(weights, order, axis=-1).astype(np.float32),
    )
