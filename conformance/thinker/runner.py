"""Runs recorded prompts through a server's thinker loop, with KV pages in reverse order.

`ThinkerLoop` schedules, cuts chunks, fills page tables and samples, as in a server. `StepRecorder` stands between the
loop and the worker or rank group: it keeps the logits of every step, and can force the next token.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from conformance.engines import Engines
from mingc.artifacts.parameters import ThinkerParameters
from mingc.errors import WorkerError
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.request import Recorder, SamplingParams
from mingc.runtime.request_stream import FailedItem, HiddenRowsItem, Item, TokenItem
from mingc.runtime.thinker.create_worker import create_worker
from mingc.runtime.thinker.logit_edits import NO_OPTIONS, SampleOptions
from mingc.runtime.thinker.loop import StepRunner, ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.scheduler import ThinkerPlan, ThinkerScheduler
from mingc.runtime.thinker.step import DecodeStep, PrefillStep, SampleStep
from mingc.runtime.thinker.worker import LaunchedTokens, ThinkerWorker
from mingc.verify.engine_run import to_numpy

Ints = NDArray[np.int64]
Floats = NDArray[np.float32]

_LIMIT_S = 600.0  # for the next token of any request; a step of the released dims takes milliseconds


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Request:
    """A prompt, and its next tokens (n,): the answer is forced to begin with them."""

    prompt: ThinkerPrompt
    tokens: Ints


class ThinkerRunner:
    """The workers of all ranks; each call runs its prompts in a new thinker loop.

    Args:
        rows: most prompts that run together.
        longest: most tokens of a prompt and its continuation.
    """

    def __init__(self, engines: Engines, parameters: ThinkerParameters, *, rows: int, longest: int) -> None:
        self._parameters = parameters
        self._num_pages = 1 + rows * -(-longest // parameters.page_size)

        def start(stage: LoadedStage, num_pages: int) -> ThinkerWorker:
            self._worker = create_worker(
                stage, engines.artifact.manifest, num_pages=num_pages, device=engines.device
            )
            return self._worker

        self.num_ranks = engines.world_size
        self._group: RankGroup | None = None
        if engines.world_size > 1:
            self._group = RankGroup(
                engines.artifact.root,
                engines.rank_devices(),
                lambda: engines.stage("thinker"),
                lambda: self._num_pages,
                start,
                on_failure=lambda error: None,  # the next step raises it
            )
        else:
            start(engines.stage("thinker"), self._num_pages)
        self._recorder = StepRecorder(self._group or self._worker)
        self.max_chunk = self._worker.max_chunk

    def close(self) -> None:
        if self._group is not None:
            self._group.close()

    def prefill(self, prompt: ThinkerPrompt, chunk: int) -> list[Floats]:
        """Logits (V,) of the last token of every chunk of at most `chunk` tokens."""
        self._run([prompt], max_tokens=1, chunk=chunk)
        return [logits[0] for logits in self._recorder.prefills]

    def greedy(self, prompts: Sequence[ThinkerPrompt], steps: int) -> tuple[Ints, Floats]:
        """Greedy continuation of all prompts together: ids (B, steps) and logits (B, steps, V)."""
        recorders = [Recorder() for _ in prompts]
        answers = self._run(prompts, max_tokens=steps, chunk=self.max_chunk, recorders=recorders)
        ids = np.array([[item.token for item in answer] for answer in answers], np.int64)
        return ids, np.stack([np.stack(each.logits) for each in recorders])

    def force(self, requests: Sequence[Request]) -> Floats:
        """Decode all requests in one batch, forcing their tokens (n,). Returns logits (n, B, V) after every token."""
        (steps,) = {len(request.tokens) for request in requests}
        prompts = [request.prompt for request in requests]
        tokens = [request.tokens for request in requests]
        self._run(prompts, max_tokens=steps + 1, chunk=self.max_chunk, forced=tokens)
        decodes = self._recorder.decodes
        assert [len(rows) for rows, _ in decodes] == [len(requests)] * steps, "one batch a step"
        return np.stack([logits[np.argsort(rows)] for rows, logits in decodes])

    def hidden_rows(self, prompts: Sequence[ThinkerPrompt]) -> list[HiddenRowsItem]:
        """The answers to prompts with queries, which run together."""
        loop = self._loop(len(prompts), self.max_chunk)
        items: queue.Queue[tuple[int, Item]] = queue.Queue()
        for row, prompt in enumerate(prompts):
            loop.submit_queries(prompt, partial(_emit, items, row))
        self._recorder.begin(lambda page: 0, prompts, None)
        loop.start()
        try:
            found = dict(_next(items) for _ in prompts)
        finally:
            loop.stop(_LIMIT_S)
        return [each for _, each in sorted(found.items()) if isinstance(each, HiddenRowsItem)]

    def cached(self, name: str, num_tokens: int) -> NDArray[np.generic]:
        """KV state `name` (heads, num_tokens, head_dim) of the last prompt, in token order."""
        size = self._parameters.page_size
        pages = self._recorder.pages
        rows = (pages[:, None] * size + np.arange(size)).reshape(-1)[:num_tokens]
        cached: NDArray[np.generic] = to_numpy(self._worker.state[name])[rows].swapaxes(0, 1)
        return cached

    def experts(self, num_tokens: int) -> tuple[Ints, Floats] | None:
        """Expert ids and weights (layers, tokens, k) of the last chunk; None when engines do not return them."""
        routes = self._worker.routes
        if not routes:
            return None
        ids, weights = (torch.stack([each[index][:num_tokens] for each in routes]) for index in (0, 1))
        return to_numpy(ids).astype(np.int64), to_numpy(weights).astype(np.float32)

    def _run(
        self,
        prompts: Sequence[ThinkerPrompt],
        *,
        max_tokens: int,
        chunk: int,
        forced: Sequence[Ints] | None = None,
        recorders: Sequence[Recorder] | None = None,
    ) -> list[list[TokenItem]]:
        """Run the prompts in a new loop over the same workers. Returns the tokens of each prompt."""
        loop = self._loop(len(prompts), chunk)
        items: queue.Queue[tuple[int, Item]] = queue.Queue()
        sampling = SamplingParams(max_tokens=max_tokens)
        # In reverse order, so that the row of a batch differs from the request's number.
        ids = {
            row: loop.submit(
                prompts[row],
                sampling,
                0,
                partial(_emit, items, row),
                recorder=None if recorders is None else recorders[row],
            )
            for row in reversed(range(len(prompts)))
        }
        pool = loop.scheduler.pool
        self._recorder.begin(lambda page: _owner(pool, ids, page), prompts, forced)
        loop.start()
        try:
            return _collect(items, len(prompts))
        finally:
            loop.stop(_LIMIT_S)

    def _loop(self, num_prompts: int, chunk: int) -> ThinkerLoop:
        """A new loop for chunks of at most `chunk` tokens."""
        pool = PagePool(self._num_pages, self._parameters.page_size)
        _reverse(pool)
        scheduler = _TogetherScheduler(
            pool,
            max_running=num_prompts,
            chunk=replace(
                self._worker.chunk,
                max_rows=chunk,
                max_prompts=self._worker.chunk.max_prompts if chunk == self.max_chunk else 1,
                two_batch_rows=0,
            ),
            prefill_policy=ChunkedPrefillPolicy(num_layer_groups=self._worker.num_layer_groups),
            max_context=pool.max_tokens,
            max_waiting=num_prompts,
        )
        return ThinkerLoop(self._recorder, scheduler, stop_ids=(), vocab_size=self._parameters.vocab_size)


class StepRecorder:
    """The step runner of a thinker loop whose host samples: passes steps to `runner` and keeps their logits.

    Attributes:
        prefills: logits (s, V) after each chunk.
        decodes: prompt numbers (n,) and logits (n, V) of each decode step.
        pages: KV pages of the last chunk's first prompt, in token order.
    """

    samples_on_device = False

    def __init__(self, runner: StepRunner) -> None:
        self._runner = runner
        self.device = runner.device
        self.begin(lambda page: 0, (), None)

    def begin(
        self, find_row: Callable[[int], int], prompts: Sequence[ThinkerPrompt], forced: Sequence[Ints] | None
    ) -> None:
        """Forget the steps so far. `find_row` maps the first page of a prompt to its number."""
        self._find_row, self._prompts, self._forced = find_row, prompts, forced
        self.prefills: list[Floats] = []
        self.decodes: list[tuple[Ints, Floats]] = []
        self.pages: Ints = np.zeros(0, np.int64)

    def prefill(self, step: PrefillStep) -> torch.Tensor:
        logits = self._runner.prefill(step)
        if len(logits):
            self.prefills.append(to_numpy(logits).astype(np.float32))
            self.pages = step.pages[0].copy()
        return self._force(logits, self._rows(step.pages), step.starts + step.counts)

    def decode(self, step: DecodeStep) -> torch.Tensor:
        logits, rows = self._runner.decode(step)[: len(step.input_ids)], self._rows(step.pages)
        self.decodes.append((rows, to_numpy(logits).astype(np.float32)))
        return self._force(logits, rows, step.lengths)

    def launch_sampling(self, step: SampleStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        raise AssertionError("the host samples")

    def launch_decode(self, step: DecodeStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        raise AssertionError("the host samples")

    def launch_prefill(self, step: PrefillStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens:
        raise AssertionError("the host samples")

    def take_rows(self, tokens: Ints) -> AsyncHostCopy:
        return self._runner.take_rows(tokens)

    def _rows(self, pages: Ints) -> Ints:
        return np.array([self._find_row(int(page)) for page in pages[:, 0]], np.int64)

    def _force(self, logits: torch.Tensor, rows: Ints, lengths: Ints) -> torch.Tensor:
        """Return `logits` (n, V), or with forced tokens zeros with ones at the tokens that the loop must sample."""
        if self._forced is None or not len(logits):
            return logits
        forced = torch.zeros_like(logits)
        for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            index = int(length) - self._prompts[row].num_tokens
            if 0 <= index < len(self._forced[row]):
                forced[place, int(self._forced[row][index])] = 1.0
        return forced


class _TogetherScheduler(ThinkerScheduler):
    """Decodes when no prompt is left to prefill, so that the batch is as large as the number of prompts."""

    def plan(self) -> ThinkerPlan:
        plan = super().plan()
        return plan if plan.prefill is None else replace(plan, decode=())


def _reverse(pool: PagePool) -> None:
    """Let a new pool allocate its last page first, so that memory order differs from token order."""
    owners = range(pool.num_free)
    for owner in owners:
        pool.extend(owner, 1)
    for owner in owners:
        pool.free(owner)


def _owner(pool: PagePool, ids: dict[int, int], page: int) -> int:
    """Find the number of the prompt whose first page is `page`."""
    return next(row for row, request in ids.items() if page in pool.pages(request)[:1])


def _emit(items: queue.Queue[tuple[int, Item]], row: int, item: Item) -> None:
    items.put((row, item))


def _next(items: queue.Queue[tuple[int, Item]]) -> tuple[int, Item]:
    """The next item of any request. Raises: the error of a failed request, or WorkerError after `_LIMIT_S`."""
    try:
        row, item = items.get(timeout=_LIMIT_S)
    except queue.Empty:
        raise WorkerError(f"the thinker made no token for {_LIMIT_S:.0f} s", where="thinker") from None
    if isinstance(item, FailedItem):
        raise item.error
    return row, item


def _collect(items: queue.Queue[tuple[int, Item]], num_requests: int) -> list[list[TokenItem]]:
    """Wait for the tokens of every request. Raises: as `_next`."""
    answers: list[list[TokenItem]] = [[] for _ in range(num_requests)]
    num_running = num_requests
    while num_running:
        row, item = _next(items)
        assert isinstance(item, TokenItem), "the thinker emits tokens"
        answers[row].append(item)
        num_running -= item.finish is not None
    return answers
