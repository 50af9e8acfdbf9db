"""Cache of media embeddings by content: a recently encoded image, video or clip is not encoded again."""

from __future__ import annotations

import threading
from collections import OrderedDict

from torch import Tensor


class EncoderCache:
    """Embeddings by key, at most `max_bytes` in all; the least recently used are dropped first. Thread-safe.

    Embeddings are kept in host memory, which leaves device memory to KV pages: a hit saves the encoder call, and the
    copy to a device takes little of its time.

    Attributes:
        num_bytes: bytes of all entries.
        num_hits: lookups since the start that found embeddings, or another request waiting for the same ones.
        num_misses: lookups since the start after which an encoder had to run.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._entries: OrderedDict[bytes, Tensor] = OrderedDict()
        self.num_bytes = self.num_hits = self.num_misses = 0

    def get(self, key: bytes) -> Tensor | None:
        """The embeddings under `key`. All callers share them, so nobody may write to them."""
        with self._lock:
            found = self._entries.get(key)
            if found is None:
                self.num_misses += 1
            else:
                self.num_hits += 1
                self._entries.move_to_end(key)
            return found

    def count_shared(self) -> None:
        """Count a hit on embeddings that are being computed for another request."""
        with self._lock:
            self.num_hits += 1

    def put(self, key: bytes, embeddings: Tensor) -> None:
        """Keep the host tensor `embeddings`, unless it alone exceeds the budget. Nothing else may write to it."""
        size = embeddings.untyped_storage().nbytes()
        with self._lock:
            self._drop(key)
            if size > self.max_bytes:
                return
            self._entries[key] = embeddings
            self.num_bytes += size
            while self.num_bytes > self.max_bytes:
                self._drop(next(iter(self._entries)))

    def clear(self) -> None:
        """Drop all entries; the counters of lookups stay."""
        with self._lock:
            self._entries.clear()
            self.num_bytes = 0

    def _drop(self, key: bytes) -> None:
        found = self._entries.pop(key, None)
        if found is not None:
            self.num_bytes -= found.untyped_storage().nbytes()
