"""Which requests run next, as plain numbers. Imports no torch and runs nothing.

A scheduler belongs to one engine thread: nothing here is locked. The thread's loop is `plan`, run, `commit`.
Requests that end, in whatever way, leave through `remove`, which frees all they hold.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, replace

from mingc.errors import CapacityError, RequestError
from mingc.runtime.kv_cache import PagePool
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy


@dataclass(frozen=True, kw_only=True, slots=True)
class ChunkShape:
    """What a chunk can hold.

    Attributes:
        max_rows: tokens, and what alignment leaves empty.
        max_prompts: of which it may hold tokens.
        alignment: the first token of each prompt stands at a multiple of it.
        shared_rows: longest chunk with tokens of several.
        two_batch_rows: tokens of one prompt that may be two chunks in one step, in all parts at once, while no request
            decodes; 0 where that gains nothing.
    """

    max_rows: int
    max_prompts: int = 1
    alignment: int = 1
    shared_rows: int = 0
    two_batch_rows: int = 0

    def place(self, num_rows: int) -> int:
        """Where a further prompt begins behind `num_rows` rows."""
        return -(-num_rows // self.alignment) * self.alignment


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSlice:
    """Tokens `start` to `start + count` of a request's prompt; `is_end` when these are its last."""

    request: int
    start: int
    count: int
    is_end: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillChunk:
    """The next tokens of some prompts, or some parts of the layers for them.

    Attributes:
        prompts: those still there; in the first parts all.
        num_rows: from the first token to the last, alignment included.
        first_group, end_group: of `ChunkedPrefillPolicy.num_layer_groups`; those before have been run.
        is_whole: whether these are its last parts.
    """

    prompts: tuple[PromptSlice, ...]
    num_rows: int
    first_group: int
    end_group: int
    is_whole: bool

    @property
    def ended(self) -> tuple[PromptSlice, ...]:
        """The prompts that are whole after these parts."""
        return tuple(each for each in self.prompts if each.is_end) if self.is_whole else ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ThinkerPlan:
    """One step: at most one chunk of prompts, or parts of it, then one token for each request of `decode`."""

    prefill: PrefillChunk | None
    decode: tuple[int, ...]

    @property
    def is_empty(self) -> bool:
        return self.prefill is None and not self.decode


@dataclass(slots=True)
class _Sequence:
    prompt_tokens: int
    max_tokens: int
    computed: int = 0  # prompt tokens whose keys and values are in the pool


class ThinkerScheduler:
    """Continuous batching with paged KV and chunked prefill.

    A request is admitted, in order of arrival, when pages for its prompt and all of its answer are free, so a
    running request never waits for memory and is never put out. Each step has at most one chunk, and of its parts as
    many as `ChunkedPrefillPolicy` says: running answers are held up by these, never by a whole prompt. Chunks go by
    turns to
    the oldest prompt and to the one with the least left, so short prompts pass long ones and no prompt starves; what
    others have left joins them while there is room, the oldest first. One that was begun is made whole before another
    one begins.

    Args:
        max_running: requests admitted at once; the largest decode batch.
        prefill_policy: how much of a chunk a step runs.
        max_context: tokens of prompt and answer together.
        max_waiting: requests in the queue before more are refused.
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
        self._begun: PrefillChunk | None = None  # the last parts that were run, when others are to follow
        self._max_waiting = max_waiting
        self._waiting: OrderedDict[int, _Sequence] = OrderedDict()
        self._prefilling: OrderedDict[int, _Sequence] = OrderedDict()
        self._decoding: OrderedDict[int, _Sequence] = OrderedDict()
        self._is_turn_of_oldest = True

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._prefilling) + len(self._decoding)

    @property
    def can_start_chunk(self) -> bool:
        """Whether the next plan may begin a chunk: a prompt that comes before it may then share it."""
        return self._begun is None and bool(self._waiting or self._prefilling)

    def max_new_tokens(self, prompt_tokens: int, asked: int) -> int:
        """`asked` cut to what fits in the context behind the prompt.

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
        return max(1, min(asked, room))

    def add(self, request: int, *, prompt_tokens: int, max_tokens: int) -> None:
        """Queue a request. Raises CapacityError when the queue is full."""
        assert prompt_tokens > 0 and prompt_tokens + max_tokens <= self.max_context
        if len(self._waiting) >= self._max_waiting and (
            self._waiting or not self._has_room(prompt_tokens, max_tokens)
        ):
            raise CapacityError(
                f"{len(self._waiting)} requests are waiting, as many as the queue holds",
                fix="try again later",
            )
        self._waiting[request] = _Sequence(prompt_tokens, max_tokens)

    def remove(self, request: int) -> None:
        """Forget a request, wherever it is, and free its pages; nothing happens when it is not known."""
        for place in (self._waiting, self._prefilling, self._decoding):
            place.pop(request, None)
        if self._begun:
            left = tuple(each for each in self._begun.prompts if each.request != request)
            self._begun = replace(self._begun, prompts=left) if left else None
        self.pool.free(request)

    def plan(self) -> ThinkerPlan:
        """Admit what fits and choose the next step. Changes nothing but admissions until `commit`."""
        while self._waiting and self.num_running < self.max_running:
            request, sequence = next(iter(self._waiting.items()))
            if not self.pool.extend(request, sequence.prompt_tokens + sequence.max_tokens):
                break  # strictly in order: passing it by would starve large requests
            del self._waiting[request]
            self._prefilling[request] = sequence
        return ThinkerPlan(prefill=self._next_chunk(), decode=tuple(self._decoding))

    def commit(self, plan: ThinkerPlan) -> None:
        """Record that the prefill chunk of `plan` was run, for those of its prompts that are still there."""
        if plan.prefill is None:
            return
        left = tuple(each for each in plan.prefill.prompts if each.request in self._prefilling)
        if not left or not plan.prefill.is_whole:
            self._begun = replace(plan.prefill, prompts=left) if left else None
            return
        self._begun = None
        self._is_turn_of_oldest = not self._is_turn_of_oldest
        for part in left:
            self._prefilling[part.request].computed += part.count
            if part.is_end:
                self._decoding[part.request] = self._prefilling.pop(part.request)

    def check_count(self) -> None:
        """Assert that pages belong to admitted requests only, as far as their numbers tell. For idle moments."""
        self.pool.check_count()
        if not self.num_running:
            assert self.pool.num_free == self.pool.num_pages - 1, "pages held by no request"

    def check(self) -> None:
        """The same of every page. For tests."""
        self.pool.check()
        self.check_count()

    def _has_room(self, prompt_tokens: int, max_tokens: int) -> bool:
        return (
            self.num_running < self.max_running
            and self.pool.pages_for(prompt_tokens + max_tokens) <= self.pool.num_free
        )

    def _next_chunk(self) -> PrefillChunk | None:
        """Parts of the chunk under way, or of the next one."""
        if not self._prefilling:
            return None
        if self._begun:
            first, prompts, num_rows = self._begun.end_group, self._begun.prompts, self._begun.num_rows
        else:
            first = 0
            prompts, num_rows = self._gather()
        num_layer_groups = self.prefill_policy.num_layer_groups
        parts = self.prefill_policy.groups_per_step(
            num_rows, num_prompts=len(self._prefilling), num_decoding=len(self._decoding)
        )
        end = min(first + parts, num_layer_groups)
        return PrefillChunk(
            prompts=prompts,
            num_rows=num_rows,
            first_group=first,
            end_group=end,
            is_whole=end == num_layer_groups,
        )

    def _gather(self) -> tuple[tuple[PromptSlice, ...], int]:
        """The prompts of a new chunk, and its rows."""
        request = next(iter(self._prefilling))
        if not self._is_turn_of_oldest:
            request = min(self._prefilling, key=self._left)
        prompts = [self._part(request)]
        num_rows = prompts[0].count
        for other in self._prefilling:
            if len(prompts) == self._chunk.max_prompts:
                break
            end = self._chunk.place(num_rows) + self._left(other)
            if other != request and end <= min(self._chunk.shared_rows, self._chunk.max_rows):
                prompts.append(self._part(other))
                num_rows = end
        return tuple(prompts), num_rows

    def _part(self, request: int) -> PromptSlice:
        """As much of what a prompt has left as a chunk takes."""
        left = self._left(request)
        is_pair = 0 < self._chunk.two_batch_rows <= left and not self._decoding
        count = self._chunk.two_batch_rows if is_pair else min(self._chunk.max_rows, left)
        start = self._prefilling[request].computed
        return PromptSlice(request=request, start=start, count=count, is_end=count == left)

    def _left(self, request: int) -> int:
        sequence = self._prefilling[request]
        return sequence.prompt_tokens - sequence.computed
