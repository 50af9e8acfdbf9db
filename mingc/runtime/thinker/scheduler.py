"""Thinker scheduler: continuous batching with paged KV and chunked prefill. Plain Python; imports no torch.

The thinker loop calls `add` for each request, then per step `plan`, runs the step, and `commit`. A request that ends
for any reason is passed to `remove`, which frees all it holds. Not thread-safe; the loop holds a lock.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mingc.errors import CapacityError, RequestError
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy

_PATIENCE = 4  # pages that overtaking requests may need, in pages that the waiting request may need


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkShape:
    """Capacity of a prefill chunk.

    Attributes:
        max_rows: most rows: tokens and alignment padding.
        max_prompts: most prompts that may share it.
        alignment: the first row of each prompt is a multiple of this.
        shared_rows: most rows of a chunk that several prompts share.
        two_batch_rows: most tokens of one prompt that a step may run as two overlapped chunks, all layer groups at
            once, while no request decodes. The first chunk has `max_rows`, the second one the rest. 0 without two-batch
            overlap.
    """

    max_rows: int
    max_prompts: int = 1
    alignment: int = 1
    shared_rows: int = 0
    two_batch_rows: int = 0

    def place(self, num_rows: int) -> int:
        """First row of a further prompt after `num_rows` rows."""
        return -(-num_rows // self.alignment) * self.alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """Tokens `start` to `start + count` of a request's prompt. `is_end`: whether they are its last tokens."""

    request: int
    start: int
    count: int
    is_end: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """A range of layer groups to run for the next tokens of some prompts.

    Attributes:
        prompts: slices of the chunk, without removed requests.
        num_rows: rows from the first token to the last, including alignment padding.
        first_group, end_group: range of layer groups; earlier groups have run.
        is_whole: whether the chunk is complete after these groups.
    """

    prompts: tuple[PromptSlice, ...]
    num_rows: int
    first_group: int
    end_group: int
    is_whole: bool

    @property
    def ended(self) -> tuple[PromptSlice, ...]:
        """Prompts that are completely prefilled after these layer groups."""
        return tuple(each for each in self.prompts if each.is_end) if self.is_whole else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkerPlan:
    """One step: layer groups of at most one prefill chunk, then one token for each request of `decode`.

    `preempted`: requests that lost their pages and wait again. Their prompt now ends with their last sampled token.
    """

    prefill: PrefillChunk | None
    decode: tuple[int, ...]
    preempted: tuple[int, ...] = ()

    @property
    def is_empty(self) -> bool:
        return self.prefill is None and not self.decode


@dataclass(slots=True)
class _Sequence:
    """A request.

    Attributes:
        prompt_tokens: tokens to prefill; after a preemption the answer's tokens are among them.
        num_rows: rows of the pool that prompt and answer need; the last token needs none.
        arrival: position in the order of arrival; younger requests are preempted first.
        keys: keys of the prompt's full pages; None: it takes no part in the prefix cache.
        computed: tokens to prefill whose keys and values are in the pool, including reused tokens.
        patience: pages that younger requests may need in all before they no longer overtake this one.
        least_pages: pages that it needs at admission if it shares all it can.
        base: while it decodes: `ThinkerScheduler._num_steps` less the number of its rows, which is constant.
    """

    prompt_tokens: int
    num_rows: int
    arrival: int
    patience: int
    keys: Sequence[bytes] | None
    least_pages: int = 0
    computed: int = 0
    base: int = 0

    @property
    def first_rows(self) -> int:
        """Rows for its prompt and the first decode step."""
        return min(self.prompt_tokens + 1, self.num_rows)


class ThinkerScheduler:
    """Chooses which requests prefill and which decode in each step.

    A request is admitted when pages for its prompt are free and one more for each running request, in order of arrival
    as far as they fit: smaller requests overtake one that waits for pages, until they may have needed
    `_PATIENCE` times its pages. From then on all wait for it.

    A decoding request gets a page whenever its rows fill the last one. While none is free, the youngest request is
    preempted: it loses its pages, waits at its place in the order of arrival, and prefills its prompt and the answer so
    far again. So the oldest request is never preempted, and all of them end: one alone always fits.

    Each step runs layer groups of at most one chunk, as many as `ChunkedPrefillPolicy` says, so these delay decoding
    requests and never a whole prompt. A chunk starts alternately with the oldest prompt and with the prompt that has
    the fewest tokens left: short prompts overtake long ones, and none starves. Further prompts whose remaining tokens
    fit share the chunk, oldest first. A chunk is completed before the next one starts, unless one of its prompts is
    preempted.

    Requests with page keys take part in the prefix cache: pages of a prompt are published when their chunk is complete.
    When a prompt is admitted, and before each chunk, it skips the tokens whose pages another prompt has published. Its
    last token is always computed, because its logits are needed.

    Args:
        max_running: most requests admitted at once; the largest decode batch.
        prefill_policy: chooses how much of a chunk a step runs.
        max_context: most tokens of prompt and answer together.
        max_waiting: most requests in the queue before more are refused.

    Attributes:
        num_prefilled: tokens prefilled so far, by all requests; after a preemption also tokens of answers.
        num_reused: tokens that were not prefilled, because their pages were cached.
        num_preempted: how often a request was preempted.
    """

    def __init__(
        self,
        pool: PagePool,
        *,
        max_running: int,
        chunk: ChunkShape,
        prefill_policy: ChunkedPrefillPolicy,
        max_context: int,
        max_waiting: int,
    ) -> None:
        self.pool = pool
        self.max_context = min(max_context, pool.max_tokens)
        self.max_running = max_running
        self._chunk = chunk
        self.prefill_policy = prefill_policy
        self._current: PrefillChunk | None = None  # the last groups that ran, of a chunk that is not complete
        self._max_waiting = max_waiting
        self.num_prefilled = self.num_reused = self.num_preempted = self._num_added = 0
        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._prefilling: OrderedDict[int, _Sequence] = OrderedDict()
        self._decoding: OrderedDict[int, _Sequence] = OrderedDict()
        self._num_steps = 0  # committed; each wrote one row of every decoding request
        # Decoding requests by `base` modulo the page size: at step s those of s modulo the page size begin a page.
        self._by_base: list[dict[int, _Sequence]] = [{} for _ in range(pool.page_size)]
        self._leftovers: list[
            int
        ] = []  # removed, but the other layer groups of the chunk still write their rows
        self._is_turn_of_oldest = True

    @property
    def max_waiting(self) -> int:
        return self._max_waiting

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_chunk_prompts(self) -> int:
        """How many prompts the current chunk has: some of its layer groups have run, others have not."""
        return 0 if self._current is None else len(self._current.prompts)

    @property
    def can_start_chunk(self) -> bool:
        """Whether the next plan may start a chunk, which a prompt that arrives before it could share."""
        return self._current is None and bool(self._waiting or self._prefilling)

    @property
    def fills_chunk(self) -> bool:
        """Whether as many prompts wait as may share a chunk, or as many tokens."""
        waiting = (*self._prefilling.values(), *self._waiting.values())[: self._chunk.max_prompts]
        num_tokens = sum(each.prompt_tokens - each.computed for each in waiting)
        return len(waiting) == self._chunk.max_prompts or num_tokens >= self._chunk.shared_rows

    def max_new_tokens(self, prompt_tokens: int, requested: int) -> int:
        """`requested` limited to what the context holds after the prompt.

        Raises: RequestError when the prompt leaves room for no token.
        """
        room = self.max_context - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the prompt has {prompt_tokens} tokens, the context holds {self.max_context} with the answer",
                fix="send less text or smaller media",
                param="messages",
                code="context_length_exceeded",
            )
        return max(1, min(requested, room))

    def add(
        self, request: int, *, prompt_tokens: int, max_tokens: int, keys: Sequence[bytes] | None = None
    ) -> None:
        """Queue a request. `keys`: keys of the prompt's full pages; None: it takes no part in the prefix cache.

        Raises: CapacityError when the queue is full.
        """
        assert prompt_tokens > 0 and prompt_tokens + max_tokens <= self.max_context
        assert len(keys or ()) <= prompt_tokens // self.pool.page_size, "only full pages have keys"
        num_rows = prompt_tokens + max_tokens - 1
        patience = _PATIENCE * self.pool.pages_for(num_rows)
        sequence = _Sequence(prompt_tokens, num_rows, self._num_added, patience, keys)
        self._admit()  # who could run by now does not wait
        if len(self._waiting) >= self._max_waiting and (self._waiting or not self._has_room(sequence)):
            raise CapacityError(
                f"the queue is full: {len(self._waiting)} requests are waiting",
                fix="try again later",
                code="queue_full",
            )
        self._num_added += 1
        self._queue(request, sequence)

    def publish(self, request: int, keys: Sequence[bytes]) -> None:
        """Let later prompts share the pages of a decoding request: `keys` of all its full pages written so far."""
        sequence = self._decoding.get(request)
        if sequence is not None and sequence.keys is not None:
            self.pool.publish(request, keys)

    def unpublish_all(self) -> None:
        """Prevent later prompts from reusing any page that is written by now.

        Pages of running requests are not published later, either.
        """
        self.pool.unpublish_all()
        for sequence in (*self._prefilling.values(), *self._decoding.values()):
            sequence.keys = None

    def remove(self, request: int) -> None:
        """Remove a request in any state and free its pages; does nothing if it is unknown."""
        for queue in (self._waiting, self._prefilling):
            queue.pop(request, None)
        self._end_decoding(request)
        if self._current:
            left = tuple(each for each in self._current.prompts if each.request != request)
            if left and len(left) < len(self._current.prompts):
                self._current = replace(self._current, prompts=left)
                self._leftovers.append(request)
                return
            if not left:
                self._end_chunk()
        self.pool.free(request)

    def plan(self) -> ThinkerPlan:
        """Preempt and admit requests and choose the next step.

        Called again before `commit`, it preempts none; only admissions and reuse change.
        """
        preempted = self._grow()
        if self._waiting and not preempted:
            self._admit()
        return ThinkerPlan(prefill=self._next_chunk(), decode=tuple(self._decoding), preempted=preempted)

    def commit(self, plan: ThinkerPlan) -> None:
        """Record that the layer groups of `plan` ran, for prompts that have not been removed, and its decode step."""
        self._num_steps += 1
        if plan.prefill is None:
            return
        left = tuple(each for each in plan.prefill.prompts if each.request in self._prefilling)
        if left and not plan.prefill.is_whole:
            self._current = replace(plan.prefill, prompts=left)
            return
        self._end_chunk()
        if not left:
            return
        self._is_turn_of_oldest = not self._is_turn_of_oldest
        for each in left:
            sequence = self._prefilling[each.request]
            first = sequence.computed // self.pool.page_size
            sequence.computed += each.count
            self.num_prefilled += each.count
            if sequence.keys is not None:
                written = sequence.keys[: sequence.computed // self.pool.page_size]
                self.pool.publish(each.request, written, first)
            if each.is_end:
                self._decoding[each.request] = self._prefilling.pop(each.request)
                sequence.base = self._num_steps - sequence.prompt_tokens
                self._by_base[sequence.base % self.pool.page_size][each.request] = sequence

    def check_count(self) -> None:
        """Assert by counts that pages belong to admitted requests only. Cheap enough for an idle server."""
        self.pool.check_count()
        if not self.num_running:
            assert self.pool.num_free == self.pool.num_pages - 1, "KV pages held by no request"

    def check(self) -> None:
        """Assert the same for every page. For tests."""
        self.pool.check()
        self.check_count()

    def _has_room(self, sequence: _Sequence) -> bool:
        return self.num_running < self.max_running and self.pool.has_room(
            sequence.first_rows, self._reusable(sequence), spare=self.num_running
        )

    def _admit(self) -> None:
        """Admit waiting requests that fit, oldest first."""
        passed: list[_Sequence] = []
        spare = self.num_running
        room = self.pool.num_free - spare
        for request, sequence in tuple(self._waiting.items()):
            if spare == self.max_running:
                return
            num_shared = None
            if sequence.least_pages <= room:
                keys = self._reusable(sequence)
                num_shared = self.pool.allocate(request, sequence.first_rows, keys, spare=spare)
            if num_shared is None:
                if sequence.patience <= 0:
                    return
                passed.append(sequence)
                continue
            del self._waiting[request]
            self._prefilling[request] = sequence
            self._skip(sequence, num_shared)
            spare = self.num_running
            room = self.pool.num_free - spare
            for each in passed:
                each.patience -= self.pool.pages_for(sequence.num_rows)
            if any(each.patience <= 0 for each in passed):
                return

    def _grow(self) -> tuple[int, ...]:
        """Give pages to decoding requests whose next row begins one. Returns the requests preempted for that."""
        preempted: list[int] = []
        for request, sequence in tuple(self._by_base[self._num_steps % self.pool.page_size].items()):
            rows = min(self._num_steps - sequence.base + 1, sequence.num_rows)
            while request in self._decoding and not self.pool.extend(request, rows):
                running = {**self._prefilling, **self._decoding}
                youngest = max(running, key=lambda each: running[each].arrival)
                self._preempt(youngest)
                preempted.append(youngest)
        return tuple(preempted)

    def _preempt(self, request: int) -> None:
        """Free the pages of a running request, and queue it to prefill its prompt and its answer so far again."""
        sequence = self._prefilling.pop(request, None)
        if sequence is None:
            sequence = self._end_decoding(request)
            assert sequence is not None
            num_rows = self._num_steps - sequence.base
            sequence.prompt_tokens = num_rows + 1  # with the last token, which has no row yet
        sequence.computed = 0
        if self._current and any(each.request == request for each in self._current.prompts):
            self._end_chunk()  # incomplete: its other layer groups would write to the pages
        self.pool.free(request)
        self._queue(request, sequence)
        self._waiting = OrderedDict(sorted(self._waiting.items(), key=lambda item: item[1].arrival))
        self.num_preempted += 1

    def _queue(self, request: int, sequence: _Sequence) -> None:
        sequence.least_pages = self.pool.pages_for(sequence.first_rows) - len(self._reusable(sequence))
        self._waiting[request] = sequence

    def _end_decoding(self, request: int) -> _Sequence | None:
        sequence = self._decoding.pop(request, None)
        if sequence is not None:
            del self._by_base[sequence.base % self.pool.page_size][request]
        return sequence

    def _end_chunk(self) -> None:
        """Run no further layer group of the current chunk."""
        self._current = None
        for request in self._leftovers:
            self.pool.free(request)
        self._leftovers.clear()

    def _reusable(self, sequence: _Sequence) -> Sequence[bytes]:
        """Keys of the pages that a prompt may share: at least its last token remains to be computed."""
        return (sequence.keys or ())[: (sequence.prompt_tokens - 1) // self.pool.page_size]

    def _reuse(self, request: int, sequence: _Sequence) -> None:
        """Skip the next tokens of a prompt whose pages were published since it was admitted."""
        first, begun = divmod(sequence.computed, self.pool.page_size)
        if not begun:
            self._skip(sequence, self.pool.share(request, self._reusable(sequence), first))

    def _skip(self, sequence: _Sequence, num_pages: int) -> None:
        sequence.computed += num_pages * self.pool.page_size
        self.num_reused += num_pages * self.pool.page_size

    def _next_chunk(self) -> PrefillChunk | None:
        """Layer groups of the current chunk, or of a new one."""
        if not self._prefilling:
            return None
        if self._current:
            first, prompts, num_rows = self._current.end_group, self._current.prompts, self._current.num_rows
        else:
            first = 0
            for request, sequence in self._prefilling.items():
                self._reuse(request, sequence)
            prompts, num_rows = self._start_chunk()
        num_layer_groups = self.prefill_policy.num_layer_groups
        groups = self.prefill_policy.groups_per_step(
            num_rows, num_prompts=len(self._prefilling), num_decoding=len(self._decoding)
        )
        end = min(first + groups, num_layer_groups)
        return PrefillChunk(
            prompts=prompts,
            num_rows=num_rows,
            first_group=first,
            end_group=end,
            is_whole=end == num_layer_groups,
        )

    def _start_chunk(self) -> tuple[tuple[PromptSlice, ...], int]:
        """The prompts of a new chunk, and its number of rows."""
        request = next(iter(self._prefilling))
        if not self._is_turn_of_oldest:
            request = min(self._prefilling, key=self._left)
        prompts = [self._slice(request)]
        num_rows = prompts[0].count
        for other in self._prefilling:
            if len(prompts) == self._chunk.max_prompts:
                break
            end = self._chunk.place(num_rows) + self._left(other)
            if other != request and end <= min(self._chunk.shared_rows, self._chunk.max_rows):
                prompts.append(self._slice(other))
                num_rows = end
        return tuple(prompts), num_rows

    def _slice(self, request: int) -> PromptSlice:
        """The next tokens of a prompt, as many as a chunk holds."""
        left = self._left(request)
        is_two_batch = self._chunk.two_batch_rows > 0 and not self._decoding
        count = min(self._chunk.two_batch_rows if is_two_batch else self._chunk.max_rows, left)
        start = self._prefilling[request].computed
        return PromptSlice(request=request, start=start, count=count, is_end=count == left)

    def _left(self, request: int) -> int:
        sequence = self._prefilling[request]
        return sequence.prompt_tokens - sequence.computed
