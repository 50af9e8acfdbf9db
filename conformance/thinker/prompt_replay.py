"""thinker.safetensors: positions, prefill, KV pages, expert routing and greedy continuations of recorded prompts.

Prompts run through the thinker loop, worker and rank group of a server, with KV pages in reverse order.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.engines import Engines
from conformance.reference_log import ReferenceLog
from conformance.thinker.batches import (
    BatchRun,
    ExplainedByRounding,
    check_alone,
    check_batches,
    plan_requests,
    run_batches,
    step_sizes,
)
from conformance.thinker.prompts import read_prompts
from conformance.thinker.reference_routing import UNEVEN_CHUNK, ReferenceRoutedThinker, RoutingResult
from conformance.thinker.runner import Request, ThinkerRunner
from mingc.artifacts.parameters import ThinkerParameters
from mingc.prompts.thinker_prompt import ThinkerPrompt

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]
_KV = re.compile(r"^(?P<case>.+)\.kv\.layer(?P<layer>\d+)_(?P<what>keys_rotated|values)$")
_STEPS = "decode steps of several requests"


def replay_prompts(engines: Engines, log: ReferenceLog, _: Mapping[str, Any]) -> None:
    """Replay every case alone, in chunks and as a batch; in low precision also with reference routing."""
    parameters = engines.parameters_of("thinker", ThinkerParameters)
    prompts: dict[str, list[ThinkerPrompt]] = {}
    for case in log.cases("input_ids"):
        with log.case(case):
            prompts[case] = read_prompts(case, engines, log, parameters)
    if not prompts:
        return
    dim = engines.stage("thinker")["decode_attention"].spec.dim("B")
    most = max(dim.buckets, default=dim.maximum)
    for case, rows in [*prompts.items()]:
        if len(rows) > most:
            log.skip(
                case, f"records {len(rows)} requests in one step; the engines take {most} (--batch-sizes)"
            )
            del prompts[case]
    if not prompts:
        return
    sizes = step_sizes(dim.buckets)
    plan = plan_requests([prompt for rows in prompts.values() for prompt in rows], sizes)
    requests = [request for batch in plan for request in batch]
    if sizes and not requests:
        log.skip(_STEPS, "no recorded text prompt is long enough")
    routed: dict[str, RoutingResult] = {}
    alone: list[Floats] = []
    is_exact = log.is_exact and engines.artifact.manifest.stages["thinker"].quantization_error is None
    if not is_exact:
        # Before the rank group starts: these runs execute the ranks one after the other, without collectives.
        routed, alone = _replay_with_reference_routing(
            _routed_thinker(engines, parameters, log), prompts, requests, log
        )
    widest = max(*(len(batch) for batch in plan), *(len(rows) for rows in prompts.values()), 1)
    run = ThinkerRunner(engines, parameters, rows=widest, longest=_longest(log))
    batches: list[BatchRun] = []
    try:
        # First, on empty pages: a batch that fails to write its rows must not find them there.
        with log.case(_STEPS):
            batches = run_batches(run, plan)
        for case, rows in prompts.items():
            with log.case(case):
                if len(rows) == 1:
                    _replay_prompt(case, rows[0], run, log, routed.get(case))
                _replay_greedy(case, rows, run, log, routed.get(case))
    finally:
        run.close()
    with log.case(_STEPS):
        explain: ExplainedByRounding | None = None
        if not is_exact:
            explain = _rounding_explanation(engines, parameters, log)
            check_alone(batches, alone, explain, log, num_ranks=run.num_ranks)
        check_batches(batches, explain, log, num_ranks=run.num_ranks)


def _rounding_explanation(
    engines: Engines, parameters: ThinkerParameters, log: ReferenceLog
) -> ExplainedByRounding:
    """Return a function that tests whether rounding explains logits. Call it after the rank group has closed."""
    thinker = functools.cache(lambda: _routed_thinker(engines, parameters, log))

    def is_near(value: Floats, reference: Floats) -> bool:
        return bool(log.is_near(value, reference))

    return lambda request, logits: thinker().can_reach(request, logits, is_near)


def _routed_thinker(
    engines: Engines, parameters: ThinkerParameters, log: ReferenceLog
) -> ReferenceRoutedThinker:
    """Load the thinker of all ranks into this process, with observed routing."""
    devices = engines.rank_devices()
    return ReferenceRoutedThinker(
        engines.stage("thinker"),
        [(engines.rank_stage("thinker", rank), devices[rank]) for rank in range(1, len(devices))],
        parameters,
        quantization_error=engines.artifact.manifest.stages["thinker"].quantization_error,
        longest=_longest(log),
        device=engines.device,
    )


def _replay_with_reference_routing(
    thinker: ReferenceRoutedThinker,
    prompts: Mapping[str, Sequence[ThinkerPrompt]],
    requests: Sequence[Request],
    log: ReferenceLog,
) -> tuple[dict[str, RoutingResult], list[Floats]]:
    """Check every case, then run every request alone. Returns results by case, without cases that fail, and logits."""
    routed: dict[str, RoutingResult] = {}
    for case, rows in prompts.items():
        with log.case(case):
            routed[case] = thinker.check(case, rows, log)
    return routed, [thinker.run_alone(each) for each in requests]


def _longest(log: ReferenceLog) -> int:
    """Tokens of the longest prompt plus the longest continuation."""
    lengths: list[int] = [log.references[f"{case}.input_ids"].shape[1] for case in log.cases("input_ids")]
    steps: list[int] = [log.references[f"{case}.greedy_ids"].shape[1] for case in log.cases("greedy_ids")]
    return max(lengths) + max(steps, default=0)


def _replay_prompt(
    case: str, prompt: ThinkerPrompt, run: ThinkerRunner, log: ReferenceLog, routed: RoutingResult | None
) -> None:
    num_tokens = prompt.num_tokens
    waiver = routed.waiver if routed is not None else ""
    whole = run.prefill(prompt, run.max_chunk)
    log.tensor(f"{case}.logits_last", whole[-1][None], waiver=waiver)
    # With more than two ranks an all-reduce may sum in another order.
    free_running = routed.free_running if routed is not None and run.num_ranks <= 2 else {}
    if run.max_chunk in free_running:
        log.tensor(
            f"{case}.logits_last", whole[-1], reference=free_running[run.max_chunk], how="sequential ranks"
        )
    if num_tokens <= run.max_chunk:
        _check_experts(case, run.experts(num_tokens), log, waiver)
    for name in log.references:
        match = _KV.match(name)
        if match is None or match["case"] != case:
            continue
        kind = "k" if match["what"] == "keys_rotated" else "v"
        state = f"layers.{match['layer']}.attention.{kind}_pages"
        cached = run.cached(state, num_tokens)
        # This process is rank 0, which holds the first of the sharded heads.
        log.tensor(name, cached, reference=log.references[name][0, : len(cached)])
    uneven = run.prefill(prompt, UNEVEN_CHUNK)[-1][None]
    log.tensor(f"{case}.logits_last", uneven, how="in uneven chunks", waiver=waiver)
    if UNEVEN_CHUNK in free_running:
        how = "in uneven chunks, sequential ranks"
        log.tensor(f"{case}.logits_last", uneven[0], reference=free_running[UNEVEN_CHUNK], how=how)
    if f"{case}.logits" in log:
        single = np.stack(run.prefill(prompt, 1))[None]
        log.tensor(f"{case}.logits", single, how="token by token", waiver=waiver)


def _replay_greedy(
    case: str,
    prompts: Sequence[ThinkerPrompt],
    run: ThinkerRunner,
    log: ReferenceLog,
    routed: RoutingResult | None,
) -> None:
    waiver = routed.waiver if routed is not None else ""
    steps = log.references[f"{case}.greedy_ids"].shape[1] if f"{case}.greedy_ids" in log else 1
    ids, logits = run.greedy(prompts, steps)
    log.tensor(f"{case}.logits_last_valid", logits[:, 0], waiver=waiver)
    if f"{case}.greedy_ids" not in log:
        return
    recorded = log.references[f"{case}.greedy_ids"].astype(np.int64)
    same = ids == recorded
    # After a different token the logits belong to a different text: compare only up to it.
    until = steps if same.all() else 1 + int(same.all(axis=0).argmin())
    reference = log.references.get(f"{case}.greedy_logits")
    if reference is not None and not waiver and not log.is_exact:
        last, row = until - 1, ~same[:, until - 1]
        nearly = np.take_along_axis(reference[:, last], ids[:, last, None], axis=1)
        best = np.take_along_axis(reference[:, last], recorded[:, last, None], axis=1)
        if log.is_near(nearly, best)[row].all():
            waiver = "the recorded logits of both tokens are nearly equal"
    log.ids(f"{case}.greedy_ids", ids, waiver=waiver)
    if reference is not None:
        how = "" if same.all() else f"first {until} steps"
        name = f"{case}.greedy_logits"
        log.tensor(name, logits[:, :until], reference=reference[:, :until], how=how, waiver=waiver)


def _check_experts(case: str, found: tuple[Ints, Floats] | None, log: ReferenceLog, waiver: str) -> None:
    ids_name, weights_name = f"{case}.moe_topk_ids", f"{case}.moe_topk_weights"
    if ids_name not in log:
        return
    if found is None:
        log.skip(ids_name, "the prefill engine of this artifact does not return its routing")
        return
    ids, weights = _sorted_experts(log.references[ids_name][:, 0], log.references[weights_name][:, 0])
    found_ids, found_weights = _sorted_experts(*found)
    log.ids(ids_name, found_ids, reference=ids, how="as sets", waiver=waiver)
    if found_ids.shape == ids.shape and (found_ids == ids).all():
        log.tensor(weights_name, found_weights, reference=weights, how="by expert")


def _sorted_experts(ids: NDArray[np.generic], weights: NDArray[np.generic]) -> tuple[Ints, Floats]:
    """Sort each token's experts and their weights (…, k) by expert id."""
    order = np.argsort(ids, axis=-1)
    return (
        np.take_along_axis(ids, order, axis=-1).astype(np.int64),
        np.take_along_axis(weights, order, axis=-1).astype(np.float32),
    )
