"""thinker.safetensors: positions, prefill, KV pages, router choices and greedy continuations of recorded prompts.

Prompts run through the same worker and rank group as a server's, with pages that are not in order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.model import ThinkerParameters
from mingc.runtime.golden.engines import Engines, to_numpy
from mingc.runtime.golden.ledger import Ledger
from mingc.runtime.golden.thinker_followed import UNEVEN_CHUNK, FollowedCase, FollowedThinker
from mingc.runtime.golden.thinker_prompts import Prompt, read_prompts
from mingc.runtime.rank_group import RankGroup
from mingc.runtime.stages import LoadedStage
from mingc.runtime.thinker import ThinkerWorker
from mingc.runtime.thinker_start import make_worker
from mingc.runtime.thinker_step import DecodeStep

Ints = NDArray[np.int64]
_KV = re.compile(r"^(?P<case>.+)\.kv\.layer(?P<layer>\d+)_(?P<what>keys_rotated|values)$")


class _Replay:
    """The ranks' workers and the pages of the prompts that run in them."""

    def __init__(self, engines: Engines, ledger: Ledger, parameters: ThinkerParameters) -> None:
        self._parameters = parameters
        shapes = [ledger.references[f"{case}.input_ids"].shape for case in ledger.cases("input_ids")]
        self._pages_each = -(-_longest(ledger) // parameters.page_size)
        num_pages = 1 + max(rows for rows, _ in shapes) * self._pages_each

        def start(stage: LoadedStage) -> ThinkerWorker:
            self._worker = make_worker(
                stage, engines.bundle.manifest, num_pages=num_pages, device=engines.device
            )
            return self._worker

        self.num_ranks = engines.world_size
        self._group: RankGroup | None = None
        if engines.world_size > 1:
            self._group = RankGroup(
                engines.bundle.root,
                engines.rank_devices(),
                lambda: engines.stage("thinker"),
                start,
                num_pages=num_pages,
                on_death=lambda error: None,  # the next step raises it
            )
        else:
            start(engines.stage("thinker"))
        self._runner: ThinkerWorker | RankGroup = self._group or self._worker
        self.max_chunk = self._worker.max_chunk

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def pages(self, row: int) -> Ints:
        """The pages of a prompt, last page first, so that rows in memory are not in token order."""
        first = 1 + row * self._pages_each
        return np.arange(first, first + self._pages_each)[::-1].copy()

    def prefill(self, prompt: Prompt, row: int, chunk: int) -> list[NDArray[np.float32]]:
        """Logits (V,) of the last token of every chunk of at most `chunk` tokens."""
        return [
            to_numpy(self._runner.prefill(step))[0].astype(np.float32)
            for step in prompt.chunks(chunk, self.pages(row))
        ]

    def greedy(self, prompts: Sequence[Prompt], steps: int) -> tuple[Ints, NDArray[np.float32]]:
        """Continue all prompts together: ids (B, steps) and logits (B, steps, V)."""
        logits = [
            np.stack([self.prefill(prompt, row, self.max_chunk)[-1] for row, prompt in enumerate(prompts)])
        ]
        ids = [logits[0].argmax(axis=1)]
        lengths = np.array([len(prompt.input_ids) for prompt in prompts])
        deltas = np.array([prompt.rope_delta for prompt in prompts])
        pages = np.stack([self.pages(row) for row in range(len(prompts))])
        for _ in range(steps - 1):
            step = DecodeStep(input_ids=ids[-1], positions=lengths + deltas, lengths=lengths + 1, pages=pages)
            logits.append(to_numpy(self._runner.decode(step))[: len(prompts)].astype(np.float32))
            ids.append(logits[-1].argmax(axis=1))
            lengths = lengths + 1
        return np.stack(ids, axis=1), np.stack(logits, axis=1)

    def cached(self, name: str, num_tokens: int) -> NDArray[np.generic]:
        """(heads, num_tokens, head_dim) of the first prompt in token order, from the state `name`."""
        size = self._parameters.page_size
        rows = (self.pages(0)[:, None] * size + np.arange(size)).reshape(-1)[:num_tokens]
        held: NDArray[np.generic] = to_numpy(self._worker.state[name])[rows].swapaxes(0, 1)
        return held

    def experts(self, num_tokens: int) -> tuple[Ints, NDArray[np.float32]] | None:
        """Experts and their weights (layers, tokens, k) of the last chunk, each token's sorted by id."""
        routes = self._worker.routes
        if not routes:
            return None
        ids, weights = (torch.stack([each[index][:num_tokens] for each in routes]) for index in (0, 1))
        return _sorted_experts(to_numpy(ids), to_numpy(weights).astype(np.float32))


def replay(engines: Engines, ledger: Ledger) -> None:
    """Every case alone, in chunks, and rows of a batch together; of half precision also followed runs."""
    parameters = engines.parameters.thinker
    assert parameters is not None
    prompts: dict[str, list[Prompt]] = {}
    for case in ledger.cases("input_ids"):
        with ledger.case(case):
            prompts[case] = read_prompts(case, engines, ledger, parameters)
    followed: dict[str, FollowedCase] = {}
    if not ledger.is_exact:
        # Before the ranks meet: here they run one after the other.
        followed = _follow(engines, prompts, ledger, parameters)
    run = _Replay(engines, ledger, parameters)
    try:
        for case, rows in prompts.items():
            with ledger.case(case):
                if len(rows) == 1:
                    _replay_prompt(case, rows[0], run, ledger, followed.get(case))
                _replay_greedy(case, rows, run, ledger, followed.get(case))
    finally:
        run.close()


def _follow(
    engines: Engines, prompts: Mapping[str, Sequence[Prompt]], ledger: Ledger, parameters: ThinkerParameters
) -> dict[str, FollowedCase]:
    """Followed runs of all cases, by case; those that fail are missing."""
    devices = engines.rank_devices()
    thinker = FollowedThinker(
        engines.stage("thinker"),
        [(engines.share("thinker", rank), devices[rank]) for rank in range(1, len(devices))],
        parameters,
        longest=_longest(ledger),
        device=engines.device,
    )
    followed: dict[str, FollowedCase] = {}
    for case, rows in prompts.items():
        with ledger.case(case):
            followed[case] = thinker.check(case, rows, ledger)
    return followed


def _longest(ledger: Ledger) -> int:
    """Tokens of the longest prompt and the longest answer."""
    lengths: list[int] = [
        ledger.references[f"{case}.input_ids"].shape[1] for case in ledger.cases("input_ids")
    ]
    steps: list[int] = [
        ledger.references[f"{case}.greedy_ids"].shape[1] for case in ledger.cases("greedy_ids")
    ]
    return max(lengths) + max(steps, default=0)


def _replay_prompt(
    case: str, prompt: Prompt, run: _Replay, ledger: Ledger, followed: FollowedCase | None
) -> None:
    num_tokens = len(prompt.input_ids)
    excuse = followed.excuse if followed is not None else ""
    whole = run.prefill(prompt, 0, run.max_chunk)
    ledger.tensor(f"{case}.logits_last", whole[-1][None], excuse=excuse)
    if followed is not None and followed.logits_last is not None and run.num_ranks == 1:
        # Ranks that meet may add up in another order.
        ledger.tensor(f"{case}.logits_last", whole[-1], reference=followed.logits_last, how="graph by graph")
    if num_tokens <= run.max_chunk:
        _check_experts(case, run.experts(num_tokens), ledger)
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
    if f"{case}.logits" in ledger:
        single = np.stack(run.prefill(prompt, 0, 1))[None]
        ledger.tensor(f"{case}.logits", single, how="token by token", excuse=excuse)


def _replay_greedy(
    case: str, prompts: Sequence[Prompt], run: _Replay, ledger: Ledger, followed: FollowedCase | None
) -> None:
    excuse = followed.excuse if followed is not None else ""
    steps = ledger.references[f"{case}.greedy_ids"].shape[1] if f"{case}.greedy_ids" in ledger else 1
    ids, logits = run.greedy(prompts, steps)
    ledger.tensor(f"{case}.logits_last_valid", logits[:, 0], excuse=excuse)
    ledger.ids(f"{case}.greedy_ids", ids, from_engine=True)
    if f"{case}.greedy_ids" in ledger:
        same = (ids == ledger.references[f"{case}.greedy_ids"]).all()
        # After another token the logits are of another text: compare the steps before it.
        until = (
            steps if same else 1 + int((ids == ledger.references[f"{case}.greedy_ids"]).all(axis=0).argmin())
        )
        reference = ledger.references.get(f"{case}.greedy_logits")
        if reference is not None:
            how = "" if same else f"first {until} steps"
            name = f"{case}.greedy_logits"
            ledger.tensor(name, logits[:, :until], reference=reference[:, :until], how=how, excuse=excuse)


def _check_experts(case: str, found: tuple[Ints, NDArray[np.float32]] | None, ledger: Ledger) -> None:
    ids_name, weights_name = f"{case}.moe_topk_ids", f"{case}.moe_topk_weights"
    if ids_name not in ledger:
        return
    if found is None:
        ledger.skip(ids_name, "the prefill engine of this bundle does not give out its router's choices")
        return
    ids, weights = _sorted_experts(ledger.references[ids_name][:, 0], ledger.references[weights_name][:, 0])
    ledger.ids(ids_name, found[0], reference=ids, how="as sets", from_engine=True)
    if found[0].shape == ids.shape and (found[0] == ids).all():
        ledger.tensor(weights_name, found[1], reference=weights, how="by expert")


def _sorted_experts(
    ids: NDArray[np.generic], weights: NDArray[np.generic]
) -> tuple[Ints, NDArray[np.float32]]:
    order = np.argsort(ids, axis=-1)
    return (
        np.take_along_axis(ids, order, axis=-1).astype(np.int64),
        np.take_along_axis(weights, order, axis=-1).astype(np.float32),
    )
