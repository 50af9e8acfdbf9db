"""Queues from engine threads to the event loop, one per request.

Nothing here blocks an engine. `max_tokens` of a request bounds its text. The talker bounds its speech: it leaves the
request out of its batches while the request `is_behind`, so a slow client occupies a slot but no memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from mingc.errors import ServeError
from mingc.runtime.request import (
    AudioDelta,
    FinishReason,
    ImageDone,
    ImageProgress,
    PartialImage,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenItem:
    """One token of an answer; `token` is None when a stop token ended the answer. The last item has `finish`.

    `reused_tokens`: how many tokens of the prompt the prefix cache held. `begun_at`: when the prefill began
    (`time.perf_counter`). `logprobs`: of the token, if the request asked for them. `answer`: the number of the answer,
    if a request has several.
    """

    token: int | None
    finish: FinishReason | None
    reused_tokens: int = 0
    begun_at: float | None = field(default=None, compare=False)
    logprobs: TokenLogprobs | None = None
    answer: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HiddenRowsItem:
    """The answer to a prompt with `queries`, its last item: `residual` and `delta` (Q, D) after the last layer, on the
    host, in the thinker's dtype. Their sum is the residual stream, whose final norm the next stage applies.

    `reused_tokens`, `begun_at`: as in `TokenItem`.
    """

    residual: Tensor
    delta: Tensor
    reused_tokens: int = 0
    begun_at: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class TextEndItem:
    """The text to speak has ended; all its segments are queued."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedItem:
    """The request has failed; no item follows."""

    error: ServeError


# Unread speech of all requests. Beyond it each request may have a second of speech.
MAX_UNREAD_BYTES = 256 << 20
_FAIR_PATCHES = 4

Item = (
    TokenItem
    | HiddenRowsItem
    | AudioDelta
    | TextEndItem
    | ImageProgress
    | PartialImage
    | ImageDone
    | FailedItem
)


class EventQueue:
    """Passes items from any thread to the request streams of one event loop.

    Items that arrive together wake the loop once: a wake-up is a system call, at which the engine thread may lose the
    GIL to the loop, and a step has an item for every request.

    Attributes:
        unread_bytes: bytes of the patches and pictures that were handed over and not read; the event loop changes it.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, *, max_unread_bytes: int = MAX_UNREAD_BYTES) -> None:
        self.loop = loop
        self.max_unread_bytes = max_unread_bytes
        self.unread_bytes = 0
        self._items: deque[tuple[RequestStream, Item]] = deque()
        self._is_woken = False

    def put(self, stream: RequestStream, item: Item) -> None:
        """Pass an item on. Raises: RuntimeError when the event loop is closed."""
        self._items.append((stream, item))
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self.loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            self._is_woken = False
            self._items.clear()
            raise

    def _hand_over(self) -> None:
        self._is_woken = False  # before items are taken, so a later put wakes the loop again
        while self._items:
            stream, item = self._items.popleft()
            stream.accept(item)


class RequestStream:
    """Items of one request: read on the event loop of `event_queue`, written on any thread.

    Attributes:
        is_closed: whether the request has ended; its items are dropped.
    """

    def __init__(self, event_queue: EventQueue) -> None:
        self._event_queue = event_queue
        self._items: deque[Item] = deque()
        self._reader: asyncio.Future[None] | None = None  # waits for an item
        self.is_closed = False
        # Each counter has one writing thread, so the difference needs no lock.
        self._patches_put = 0
        self._patches_taken = 0

    @property
    def num_pending_patches(self) -> int:
        """How many patches were put and not yet taken."""
        return self._patches_put - self._patches_taken

    def is_behind(self, max_pending: int) -> bool:
        """Whether the client has left as many patches unread as it may; fewer when all clients leave too much."""
        pending = self.num_pending_patches
        if pending >= max_pending:
            return True
        queue = self._event_queue
        return pending >= _FAIR_PATCHES and queue.unread_bytes >= queue.max_unread_bytes

    def resumes_below(self, max_pending: int) -> bool:
        """Whether the patch that was taken last has ended `is_behind`."""
        return self.num_pending_patches in (max_pending - 1, _FAIR_PATCHES - 1)

    def put(self, item: Item) -> None:
        """Pass an item on. Drops it when the request has ended or the event loop is closed."""
        if self.is_closed:
            return
        if isinstance(item, AudioDelta):
            self._patches_put += 1
        try:
            self._event_queue.put(self, item)
        except RuntimeError:  # the event loop is closed: there is no reader
            self.is_closed = True

    async def get(self) -> Item:
        """The next item."""
        while not self._items:
            self._reader = self._event_queue.loop.create_future()
            await self._reader
        item = self._items.popleft()
        self._patches_taken += isinstance(item, AudioDelta)
        self._event_queue.unread_bytes -= _num_bytes(item)
        return item

    def close(self) -> None:
        """Drop queued and future items."""
        self.is_closed = True
        for item in self._items:
            self._event_queue.unread_bytes -= _num_bytes(item)
        self._items.clear()

    def accept(self, item: Item) -> None:
        """Queue an item for `get`; called by `EventQueue` on the event loop."""
        if not self.is_closed:
            self._event_queue.unread_bytes += _num_bytes(item)
            self._items.append(item)
            if self._reader is not None and not self._reader.done():
                self._reader.set_result(None)


def _num_bytes(item: Item) -> int:
    match item:
        case AudioDelta():
            return item.samples.nbytes
        case PartialImage() | ImageDone():
            return item.pixels.nbytes
    return 0
