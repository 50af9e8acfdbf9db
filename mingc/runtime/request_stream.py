"""From engine threads to the asyncio side: one queue a request.

Nothing here blocks an engine. Text is bounded by the request's `max_tokens`; of speech the talker leaves a request
out of its batch while `num_pending_patches` is at its limit, so a slow client costs a slot, never memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mingc.errors import ServeError
from mingc.runtime.request import FinishReason


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenItem:
    """A token of the answer; `token` None when a stop token ended it. `finish` is set on the last item."""

    token: int | None
    finish: FinishReason | None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PatchItem:
    """Samples (n,) float32 of one patch; `is_segment_end` on the last one of a segment, `is_capped` when cut off."""

    samples: NDArray[np.float32]
    is_segment_end: bool
    is_capped: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedItem:
    """The request has failed; nothing follows."""

    error: ServeError


Item = TokenItem | PatchItem | FailedItem


class EventQueue:
    """Takes items on any thread to the channels of one event loop.

    The loop is woken once for all that come together: waking it is a system call, at which a thread may lose Python's
    lock to it, and an engine thread has an item for every request of a step.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[RequestStream, Item]] = deque()
        self._is_woken = False

    def put(self, channel: RequestStream, item: Item) -> None:
        """Hand an item over. Raises: RuntimeError when the event loop is closed."""
        self._items.append((channel, item))
        if self._is_woken:
            return
        self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._hand_over)
        except RuntimeError:
            self._is_woken = False
            self._items.clear()
            raise

    def _hand_over(self) -> None:
        self._is_woken = False  # before the items are taken: what is put from here on wakes the loop again
        while self._items:
            channel, item = self._items.popleft()
            channel.accept(item)


class RequestStream:
    """A queue with its reader on the event_queue's event loop and writers on any thread."""

    def __init__(self, event_queue: EventQueue) -> None:
        self._mailbox = event_queue
        self._items: deque[Item] = deque()
        self._filled = asyncio.Event()
        self._is_closed = False
        # One thread writes each counter, so the difference needs no lock.
        self._patches_put = 0
        self._patches_taken = 0

    @property
    def num_pending_patches(self) -> int:
        """Patches put and not yet taken."""
        return self._patches_put - self._patches_taken

    def put(self, item: Item) -> None:
        """Hand an item over; dropped when the request has ended or the event loop is gone."""
        if self._is_closed:
            return
        if isinstance(item, PatchItem):
            self._patches_put += 1
        try:
            self._mailbox.put(self, item)
        except RuntimeError:  # the event loop is closed: nobody reads
            self._is_closed = True

    async def get(self, timeout_s: float | None = None) -> Item | None:
        """The next item; None after `timeout_s` without one."""
        if not self._items:
            self._filled.clear()
            try:
                async with asyncio.timeout(timeout_s):
                    await self._filled.wait()
            except TimeoutError:
                return None
        item = self._items.popleft()
        if isinstance(item, PatchItem):
            self._patches_taken += 1
        return item

    def close(self) -> None:
        """Drop what is queued and what may still come."""
        self._is_closed = True
        self._items.clear()

    def accept(self, item: Item) -> None:
        """What the event_queue calls on the event loop."""
        if not self._is_closed:
            self._items.append(item)
            self._filled.set()
