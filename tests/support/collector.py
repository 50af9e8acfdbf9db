"""Collects the items of one request, for tests that run the loops without a server."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np

from mingc.errors import ServeError
from mingc.runtime.request import AudioDelta, Recorder
from mingc.runtime.request_stream import FailedItem, Item, TokenItem


class Collector:
    """Receives the items of one request; its recorder is for loops that are given it."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self.recorder = Recorder()
        self._changed = threading.Condition()

    def put(self, item: Item) -> None:
        with self._changed:
            self.items.append(item)
            self._changed.notify_all()

    def wait(self, is_done: Callable[[Sequence[Item]], bool], what: str = "the end") -> list[Item]:
        with self._changed:
            assert self._changed.wait_for(lambda: is_done(self.items), 30), f"no {what}: {self.items[-3:]}"
            return list(self.items)

    def tokens(self) -> list[int]:
        items = self.wait(
            lambda items: any(isinstance(i, FailedItem) or getattr(i, "finish", None) for i in items)
        )
        return [item.token for item in items if isinstance(item, TokenItem) and item.token is not None]

    def error(self) -> ServeError:
        items = self.wait(lambda items: any(isinstance(item, FailedItem) for item in items), "error")
        return next(item.error for item in items if isinstance(item, FailedItem))

    def segments(self, count: int = 1) -> list[np.ndarray]:
        """Samples of each of `count` segments."""
        items = self.wait(
            lambda items: (
                any(isinstance(i, FailedItem) for i in items)
                or sum(isinstance(i, AudioDelta) and i.is_segment_end for i in items) == count
            )
        )
        done: list[np.ndarray] = []
        parts: list[np.ndarray] = []
        for item in items:
            assert isinstance(item, AudioDelta), item
            parts.append(item.samples)
            if item.is_segment_end:
                done.append(np.concatenate(parts))
                parts = []
        return done
