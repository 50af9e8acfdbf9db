"""Thinker loop: a thread that plans steps, runs them on all ranks, and emits tokens to the requests.

The service submits a request with its prompt and an `emit` callback. The scheduler plans each step, this loop builds
its inputs, calls the worker or rank group, and passes tokens through `emit` to the request's stream.

Async scheduling: a runner that samples on the device also samples the first token of an answer there, and this loop
launches the next step before the host knows the tokens of the previous one. For a request that has ended by then, one
surplus token is computed and discarded. With other runners the host samples between steps.

What a constrained answer allows next depends on its last token. So the layers of a step with such an answer are
launched first; while they run, the host collects the last tokens, lets the matchers fill their masks, and launches the
sampling. The device waits for neither.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mingc.errors import RequestError, ServeError, WorkerError
from mingc.kernels.sample_tokens import MAX_BANNED, NOT_FINITE
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.runtime.engine_thread import EngineThread
from mingc.runtime.engines.cuda_graphs import AsyncHostCopy
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.request import FinishReason, Recorder, SamplingParams
from mingc.runtime.request_stream import FailedItem, Item
from mingc.runtime.speech_starts import SpeechStarts
from mingc.runtime.thinker.logit_edits import NO_OPTIONS, SampleOptions, top_logprobs
from mingc.runtime.thinker.page_keys import answer_keys, page_keys
from mingc.runtime.thinker.running_chat import (
    Masks,
    RunningChat,
    decode_step,
    prefill_step,
    sample_options,
    sampling_rows,
)
from mingc.runtime.thinker.sampler import SamplerRow, sample
from mingc.runtime.thinker.scheduler import PrefillChunk, ThinkerScheduler
from mingc.runtime.thinker.step import DecodeStep, Ints, PrefillStep, SampleStep
from mingc.runtime.thinker.token_matcher import MaskWords, TokenMatcher, full_mask
from mingc.runtime.thinker.worker import LaunchedTokens

log = logging.getLogger("mingc.engine")

# The device is certainly busy for this share of a chunk's measured time. Real tokens may reach fewer experts than the
# random tokens of the measurement.
_BUSY_SHARE = 0.5
_FEW_CHATS = 2  # with more, the steps that wait for a first patch are of too many others


class StepRunner(Protocol):
    """Interface of a worker or a rank group. Media embeddings of prompts are on `device`."""

    device: torch.device

    @property
    def samples_on_device(self) -> bool: ...

    def prefill(self, step: PrefillStep) -> Tensor: ...

    def decode(self, step: DecodeStep) -> Tensor: ...

    def launch_sampling(self, step: SampleStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens: ...

    def launch_decode(self, step: DecodeStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens: ...

    def launch_prefill(self, step: PrefillStep, *, options: SampleOptions = NO_OPTIONS) -> LaunchedTokens: ...

    def take_rows(self, tokens: Ints) -> AsyncHostCopy: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A launched call whose tokens the host has not collected yet.

    Attributes:
        at: time of the launch (`time.perf_counter`), or of the layer groups that were queued before it.
        prefill_ms: measured time of these layer groups.
        num_decoding: requests of the decode step; 0 for the first tokens after a chunk.
    """

    rows: list[tuple[int, RunningChat]]
    tokens: LaunchedTokens
    at: float
    prefill_ms: float
    num_decoding: int


class ThinkerLoop(EngineThread):
    """Runs all requests of one thinker.

    Args:
        stop_ids: tokens that end every answer and are not part of it; a request may name more.
        prefix_salt: distinguishes the prefix cache's keys of different models; None: no prefix cache.

    Attributes:
        speech_starts: spoken answers on the thinker's device whose first patches go before the next step.
    """

    def __init__(
        self,
        runner: StepRunner,
        scheduler: ThinkerScheduler,
        *,
        stop_ids: Sequence[int],
        vocab_size: int,
        prefix_salt: bytes | None = None,
    ) -> None:
        super().__init__("thinker")
        self.runner = runner
        self.scheduler = scheduler
        self.speech_starts = SpeechStarts()
        self._stop_ids = frozenset(stop_ids)
        self._vocab_size = vocab_size
        self._prefix_salt = prefix_salt
        self._vocabulary = full_mask(vocab_size)
        self._requests: dict[int, RunningChat] = {}
        self._ids = itertools.count(1)
        self._slots = SlotPool(scheduler.max_running + 1)
        self._chunk_requests: list[int] = []  # requests of the current chunk, including removed ones
        self._chunk_step: PrefillStep  # inputs of the current chunk, shared by all its layer groups
        self._launched: deque[_Launched] = deque()
        self._last_end = 0.0  # when the tokens of the last call were collected
        # Layer groups that ran since the last launched call: their measured time, and when the first one ran.
        self._pending_prefill_ms, self._pending_prefill_at = 0.0, 0.0
        self._next_chunk_at = 0.0  # earliest start of the next chunk (`time.perf_counter`)

    @property
    def held(self) -> dict[str, int]:
        """Resources that requests hold: KV pages, slots, and work in flight."""
        scheduler, pool, slots = self.scheduler, self.scheduler.pool, self._slots
        return {
            "KV pages": pool.num_pages - 1 - pool.num_free,
            "thinker slots": slots.num_slots - 1 - slots.num_free,
            "chats": len(self._requests),
            "scheduled chats": scheduler.num_waiting + scheduler.num_running,
            "prompts in a chunk": scheduler.num_chunk_prompts,
            "thinker steps in flight": len(self._launched),
        }

    @property
    def has_work(self) -> bool:
        """Whether requests run or wait. Any thread may read it."""
        return bool(self._requests)

    @property
    def has_prefix_cache(self) -> bool:
        return self._prefix_salt is not None

    def page_keys(self, prompt: ThinkerPrompt) -> list[bytes] | None:
        """Keys of the full pages of `prompt` for `submit`; None without a prefix cache.

        Takes milliseconds for a long prompt. Any thread may call it.
        """
        if self._prefix_salt is None:
            return None
        return page_keys(prompt, page_size=self.scheduler.pool.page_size, salt=self._prefix_salt)

    def forget_prefixes(self) -> None:
        """Prevent later prompts from reusing pages that are written by now."""
        with self._lock:
            self.scheduler.unpublish_all()

    def submit(
        self,
        prompt: ThinkerPrompt,
        sampling: SamplingParams,
        seed: int,
        emit: Callable[[Item], None],
        *,
        keys: Sequence[bytes] | None = None,
        recorder: Recorder | None = None,
        matcher: TokenMatcher | None = None,
        wakes: bool = True,
    ) -> int:
        """Queue a request. Returns its id for `cancel`. The thinker's thread calls `emit`.

        `wakes`: False: the caller calls `wake` when all requests that may share a chunk are there. A full chunk begins
        before that.

        `keys` are the `page_keys` of the prompt; without them it neither reuses nor publishes pages. `recorder` gets
        the logits of every token. `matcher` constrains the answer; it serves no other request.

        Raises: RequestError when the prompt exceeds the context, CapacityError when the queue is full,
            WorkerError when the loop has failed or is stopping.
        """
        count = len(prompt.input_ids)
        max_tokens = self.scheduler.max_new_tokens(count, sampling.max_tokens)
        stop_ids = self._stop_ids_of(sampling)
        if self.runner.samples_on_device:
            row = SamplerRow(sampling, seed, stop_ids=stop_ids)  # the device tracks the seen tokens
        else:
            ids, device = prompt.input_ids.tolist(), self.runner.device
            row = SamplerRow.begin(sampling, seed, ids, self._vocab_size, device, stop_ids)
        with self._lock:
            self._check_healthy()
            request = next(self._ids)
            self.scheduler.add(request, prompt_tokens=count, max_tokens=max_tokens, keys=keys)
            self._requests[request] = RunningChat(prompt, max_tokens, row, emit, recorder, keys, matcher)
            if wakes or self.scheduler.fills_chunk:
                self._notify()
        return request

    def submit_queries(
        self, prompt: ThinkerPrompt, emit: Callable[[Item], None], *, keys: Sequence[bytes] | None = None
    ) -> int:
        """Queue a prompt whose answer are the hidden rows of its `queries`: one `HiddenRowsItem`, or a `FailedItem`.

        The runner must keep rows. The token after the prompt, which every prompt has, is dropped. `keys`, the result
        and errors: as of `submit`.
        """
        assert prompt.queries is not None, "the prompt has queries"
        return self.submit(prompt, SamplingParams(max_tokens=1), 0, emit, keys=keys)

    def _stop_ids_of(self, sampling: SamplingParams) -> tuple[int, ...]:
        """Tokens that end an answer. Raises: RequestError for ids that the model lacks, or too many."""
        named = {f"stop_token_ids[{index}]": token for index, token in enumerate(sampling.stop_token_ids)}
        named.update((f"logit_bias.{token}", token) for token, _ in sampling.logit_bias)
        for param, token in named.items():
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"token {token} is not one of the model's {self._vocab_size}",
                    fix="leave it out",
                    param=param,
                    code="invalid_value",
                )
        ids = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else self._stop_ids)}
        most = MAX_BANNED - len({*sampling.banned_tokens} - ids)
        if len(ids) > most:
            raise RequestError(
                f"{len(ids)} tokens would end the answer, the model's own included; the limit is {most}",
                fix="send fewer",
                param="stop_token_ids",
                code="invalid_value",
            )
        return tuple(sorted(ids))

    def cancel(self, request: int) -> None:
        """Remove a request before the next step; does nothing if it has ended."""
        self.post(lambda: self._remove(request))

    @torch.inference_mode()
    def _step(self) -> bool:
        if self._wait_for_prompts() or self._wait_for_speech():
            return True
        with self._lock:
            plan = self.scheduler.plan()
            for request in plan.preempted:
                self._slots.free(request)
                self._requests[request].begin_again()
        if plan.is_empty and not self._launched:
            self._pending_prefill_ms = 0.0  # the prompts of these layer groups were removed
            with self._lock:
                self.scheduler.check_count()
                self._slots.check()
            return False
        num_uncollected = len(self._launched)
        logits = self._run_prefill(plan.prefill) if plan.prefill is not None else None
        with self._lock:
            self.scheduler.commit(plan)
        if plan.prefill is not None and logits is not None:
            self._sample([each.request for each in plan.prefill.ended], logits)
        if self.runner.samples_on_device:
            self._launch_and_collect(plan.decode, num_uncollected)
        elif plan.decode:
            self._run_decode(plan.decode)
        if self.runner.samples_on_device and plan.prefill is not None:
            self._next_chunk_at = time.perf_counter() + 1e-3 * _BUSY_SHARE * self._measured_ms(plan.prefill)
        return True

    def _wait_for_prompts(self) -> bool:
        """Wait for prompts that may share the next chunk while the device is certainly busy. Returns False to plan."""
        left = self._next_chunk_at - time.perf_counter()
        if left <= 0.0:
            return False
        with self._lock:
            if not self.scheduler.can_start_chunk:
                return False
            if not self._inbox:
                self._wake.wait(left)
        return True

    def _wait_for_speech(self) -> bool:
        """Let the first patch of a spoken answer go before the next step. Returns False to plan the step."""
        num_chats = self.scheduler.num_running + self.scheduler.num_waiting
        if not self._launched or num_chats > _FEW_CHATS or not self.speech_starts.wait_for_segment():
            return False
        self._launch_and_collect((), len(self._launched))
        self.speech_starts.wait_for_patches()
        return True

    def _measured_ms(self, chunk: PrefillChunk) -> float:
        """Time of these layer groups, as measured at startup."""
        return self.scheduler.prefill_policy.measured_ms(chunk.num_rows, chunk.end_group - chunk.first_group)

    def _run_prefill(self, chunk: PrefillChunk) -> Tensor | None:
        """Run layer groups of a chunk. Returns logits (k, V) of the k prompts that end with it, if the host samples.

        A failure fails all requests of the chunk.
        """
        requests = [each.request for each in chunk.prompts]
        if chunk.first_group == 0:
            for prompt in chunk.prompts:
                running = self._requests[prompt.request]
                if running.prefilled == 0:
                    self._slots.allocate(prompt.request)
                    running.begin_prefill()
                running.begun_at = running.begun_at or time.perf_counter()
            self._chunk_requests = requests
            self._chunk_step = prefill_step(
                [self._requests[each] for each in requests],
                chunk.prompts,
                [self._pages(each.request, each.start + each.count) for each in chunk.prompts],
                [self._slots.slot(each) for each in requests],
            )
        self._pending_prefill_at = (
            self._pending_prefill_at if self._pending_prefill_ms else time.perf_counter()
        )
        self._pending_prefill_ms += self._measured_ms(chunk)
        ended = [each.request for each in chunk.ended]
        rows = np.array([self._chunk_requests.index(each) for each in ended], np.int64)
        is_sampled = bool(ended) and self.runner.samples_on_device
        chats = [self._requests[each] for each in ended]
        masks = self._fill_masks(ended, chats) if is_sampled else []
        step = replace(
            self._chunk_step,
            embeds=self._chunk_step.embeds if chunk.first_group == 0 else None,
            first_group=chunk.first_group,
            end_group=chunk.end_group,
            ended=rows if is_sampled else None,
            sampling=sampling_rows(chats, masks) if is_sampled else None,
        )
        try:
            if is_sampled:
                options = sample_options(chats, masks, is_first=True)
                launched = self.runner.launch_prefill(step, options=options)
                self._take_rows(chunk)
                self._add_launched(zip(ended, chats, strict=True), launched, self._pending_prefill_at, 0)
                return None
            logits = self.runner.prefill(step)
            self._take_rows(chunk)
            return logits[torch.from_numpy(rows).to(logits.device)] if ended else None
        except Exception as error:
            self._fail_step(requests, error)
            return None

    def _take_rows(self, chunk: PrefillChunk) -> None:
        """Copy the hidden rows of the queries in a complete chunk to the host."""
        if not chunk.is_whole:
            return
        asked = [
            (chat, each)
            for each in chunk.prompts
            # A prompt may have ended with its constraint.
            if (chat := self._requests.get(each.request)) is not None and chat.prompt.queries is not None
        ]
        if not asked:
            return
        first = np.cumsum(self._chunk_step.counts) - self._chunk_step.counts
        found = [
            (chat, chat.queries_in(each) + first[self._chunk_requests.index(each.request)])
            for chat, each in asked
        ]
        if not sum(len(tokens) for _, tokens in found):
            return
        copy = self.runner.take_rows(np.concatenate([tokens for _, tokens in found]))
        begin = 0
        for chat, tokens in found:
            chat.hidden.append((copy, slice(begin, begin + len(tokens))))
            begin += len(tokens)

    def _run_decode(self, requests: Sequence[int]) -> None:
        step = self._decode_step(requests)
        try:
            logits = self.runner.decode(step)
        except Exception as error:
            self._fail_step(requests, error)
            return
        self._sample(requests, logits)

    def _launch_and_collect(self, requests: Sequence[int], num_uncollected: int) -> None:
        """Launch the next token of `requests`, and collect the `num_uncollected` calls of earlier steps.

        Collects them before the sampling is launched if an answer is constrained.
        """
        launchable = [request for request in requests if self._requests[request].is_launchable]
        try:
            if launchable:
                chats = [self._requests[request] for request in launchable]
                step, at = self._decode_step(launchable), time.perf_counter()
                masks: Masks = [None] * len(chats)
                if any(chat.matcher is not None for chat in chats):
                    assert step.slots is not None, "the device samples"
                    self.runner.decode(replace(step, sampling=None))
                    for _ in range(num_uncollected):
                        self._collect()
                    num_uncollected = 0
                    masks = self._fill_masks(launchable, chats)
                    sampling = SampleStep(slots=step.slots, sampling=sampling_rows(chats, masks))
                    options = sample_options(chats, masks, is_first=False)
                    launched = self.runner.launch_sampling(sampling, options=options)
                else:
                    options = sample_options(chats, masks, is_first=False)
                    launched = self.runner.launch_decode(step, options=options)
                self._add_launched(zip(launchable, chats, strict=True), launched, at, len(launchable))
            for _ in range(num_uncollected):
                self._collect()
        except Exception as error:
            # The device reports errors late, so any of the launched calls may have failed.
            affected = {*launchable} | {request for each in self._launched for request, _ in each.rows}
            self._launched.clear()
            self._fail_step(affected, error)

    def _fill_masks(self, requests: Sequence[int], chats: Sequence[RunningChat]) -> Masks:
        """What the constraints allow next. A matcher that raises fails its request; so do masks without a token."""
        masks: list[MaskWords | None] = []
        for request, chat in zip(requests, chats, strict=True):
            mask = None
            if chat.matcher is not None and self._requests.get(request) is chat:
                try:
                    if chat.matcher.is_active:
                        mask = np.zeros_like(self._vocabulary)
                        chat.matcher.fill(mask)
                        mask &= self._vocabulary
                        if not mask.any():
                            raise WorkerError("the constraint of the answer allows no token", where="thinker")
                except Exception as error:
                    self._fail_constraint(request, error)
                    mask = None
            masks.append(mask)
        return masks

    def _fail_constraint(self, request: int, error: Exception) -> None:
        if not isinstance(error, RequestError):  # it is the client's that is too complex
            log.error("the constraint of an answer failed", exc_info=error)
        if not isinstance(error, ServeError):
            error = WorkerError(f"the constraint of the answer failed: {error}", where="thinker")
        self._fail(request, error)

    def _add_launched(
        self,
        rows: Iterable[tuple[int, RunningChat]],
        launched: LaunchedTokens,
        at: float,
        num_decoding: int,
    ) -> None:
        """Note a call that was launched `at` this time."""
        rows = list(rows)
        at = self._pending_prefill_at if self._pending_prefill_ms else at
        self._launched.append(_Launched(rows, launched, at, self._pending_prefill_ms, num_decoding))
        self._pending_prefill_ms = 0.0
        for _, running in rows:
            running.pending += 1

    def _collect(self) -> None:
        """Wait for the tokens of the oldest call and emit them, except to requests that were removed or have ended."""
        launched = self._launched[0]
        tokens, logits, logprobs = (
            launched.tokens.wait(),
            launched.tokens.logits(),
            launched.tokens.logprobs(),
        )
        self._launched.popleft()
        start, self._last_end = max(launched.at, self._last_end), time.perf_counter()
        ms = 1e3 * (self._last_end - start)
        self.scheduler.prefill_policy.observe(
            ms, prefill_ms=launched.prefill_ms, num_decoding=launched.num_decoding
        )
        for row, ((request, running), token) in enumerate(zip(launched.rows, tokens, strict=True)):
            if self._requests.get(request) is running:
                running.pending -= 1
                recorded = logits[row] if logits is not None and running.recorder is not None else None
                found = None if token == NOT_FINITE else token
                self._append_token(request, found, recorded, logprobs.get(row))

    def _decode_step(self, requests: Sequence[int]) -> DecodeStep:
        chats = [self._requests[request] for request in requests]
        pages = [self._pages(request, chat.num_tokens) for request, chat in zip(requests, chats, strict=True)]
        slots = [self._slots.slot(each) for each in requests] if self.runner.samples_on_device else None
        return decode_step(chats, pages, slots)

    def _sample(self, requests: Sequence[int], logits: Tensor) -> None:
        chats = [self._requests[request] for request in requests]
        masks = self._fill_masks(requests, chats)
        ids = sample(logits, [chat.row for chat in chats], masks)
        for row, (request, chat, token) in enumerate(zip(requests, chats, ids, strict=True)):
            if self._requests.get(request) is not chat:
                continue  # its constraint failed
            recorded = logprobs = None
            if chat.recorder is not None:
                recorded = logits[row].float().cpu().numpy().copy()  # the next step overwrites the logits
            if chat.row.params.num_logprobs is not None and token is not None:
                found = top_logprobs(logits[row : row + 1], torch.tensor([token], device=logits.device))
                logprobs = found[0].cpu().numpy()
            self._append_token(request, token, recorded, logprobs)

    def _append_token(
        self,
        request: int,
        token: int | None,
        logits: NDArray[np.float32] | None,
        logprobs: NDArray[np.float32] | None,
    ) -> None:
        """Append a token to the answer and emit it. `token` is None when its logits are not finite."""
        running = self._requests[request]
        if token is None:
            self.forget_prefixes()  # the cause may be in the pages
            self._fail(request, WorkerError("the model's logits are not finite", where="thinker"))
            return
        if running.prompt.queries is not None:
            try:
                running.emit(running.hidden_rows())
                self._remove(request)
            except WorkerError as error:
                self.forget_prefixes()
                self._fail(request, error)
            return
        if token in running.row.stop_ids:
            running.emit_token(None, "stop")
            self._remove(request, is_stopped=True)
            return
        is_complete = False
        if running.matcher is not None:
            try:
                running.matcher.accept(token)
                is_complete = running.matcher.is_stopped
            except Exception as error:
                self._fail_constraint(request, error)
                return
        if running.recorder is not None and logits is not None:
            running.recorder.logits.append(logits)
        running.answer.append(token)
        running.row.advance(token)
        finish: FinishReason | None = "length" if len(running.answer) == running.max_tokens else None
        finish = "stop" if is_complete else finish
        running.emit_token(token, finish, running.logprobs(logprobs))
        if finish is not None:
            self._remove(request)

    def _pages(self, request: int, num_tokens: int) -> NDArray[np.int64]:
        pool = self.scheduler.pool
        return np.array(pool.pages(request)[: pool.pages_for(num_tokens)], dtype=np.int64)

    def _remove(self, request: int, *, is_stopped: bool = False) -> None:
        keys = self._written_keys(request, is_stopped=is_stopped)
        with self._lock:
            self.scheduler.publish(request, keys)
            self.scheduler.remove(request)
            self._slots.free(request)
            self._requests.pop(request, None)

    def _written_keys(self, request: int, *, is_stopped: bool) -> Sequence[bytes]:
        """Keys of the full pages of a prompt and its answer, with which the next turn of the chat begins.

        The row of the last token is computed by the step that samples the token after it: one that `is_stopped`, or one
        that is launched.
        """
        running = self._requests.get(request)
        if self._prefix_salt is None or running is None or running.keys is None:
            return ()
        has_last = is_stopped or running.pending > 0
        written = running.answer if has_last else running.answer[:-1]
        if not written:
            return ()
        return answer_keys(
            running.prompt,
            written,
            page_size=self.scheduler.pool.page_size,
            salt=self._prefix_salt,
            known=running.keys,
        )

    def _fail(self, request: int, error: ServeError) -> None:
        self._requests[request].emit(FailedItem(error=error))
        self._remove(request)

    def _fail_step(self, requests: Iterable[int], error: Exception) -> None:
        """Fail the requests of an engine call that raised; the others continue."""
        log.error("a step of the thinker failed", exc_info=error)
        self.forget_prefixes()  # pages of earlier chunks, too, as the device reports errors late
        mapped: ServeError = WorkerError(f"the thinker failed: {error}", where="thinker")
        if isinstance(error, ServeError):
            mapped = error
        for request in requests:
            if request in self._requests:
                self._fail(request, mapped)

    def _fail_all(self, error: ServeError) -> None:
        for request in list(self._requests):
            self._fail(request, error)
