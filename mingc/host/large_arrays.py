"""Arrays of many megabytes that can be dropped anywhere without stopping other threads.

Python keeps its lock while memory returns to the system, whichever thread drops the last reference. For 100 MB that
takes 3 to 20 ms, in which the event loop cannot run. Here a thread returns the memory of large arrays in small steps.
"""

from __future__ import annotations

import functools
import math
import mmap
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

# Smaller arrays come from malloc: glibc keeps freed blocks of up to 32 MiB for later arrays, which saves page faults.
# Returning a block takes 1 to 3 ms.
LARGE_BYTES = 32 << 20
_STEP_BYTES = 4 << 20  # returning so many takes less than a millisecond
_PAUSE_S = 0.0005  # between two steps, in which other threads get Python's lock
_MAX_UNUSED = 4  # at most so many blocks wait for the thread


class _Block(mmap.mmap):
    """Private memory. When nothing refers to it any more, it goes to the thread that returns it to the system."""

    def __del__(self) -> None:
        # Threads that keep Python's lock can delay that thread. Memory that piles up would be worse than a pause here.
        if _unused.qsize() < _MAX_UNUSED:
            # A new reference: a finalizer may make one (PEP 442), and is not called again.
            _unused.put(self)


_unused: queue.SimpleQueue[_Block] = queue.SimpleQueue()


def empty(shape: int | Sequence[int], dtype: DTypeLike) -> NDArray[Any]:
    """Like `numpy.empty`, but memory of `LARGE_BYTES` and more returns to the system in steps."""
    kind = np.dtype(dtype)
    count = math.prod([shape] if isinstance(shape, int) else shape)
    if count * kind.itemsize < LARGE_BYTES:
        return np.empty(shape, kind)
    _start()
    block = _Block(-1, count * kind.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(block, kind).reshape(shape)


def join(parts: list[bytes]) -> memoryview:
    """Join the bytes of all `parts`. Empties the list, so that parts are not freed all at once."""
    joined = empty(sum(map(len, parts)), np.uint8)
    parts.reverse()
    start = 0
    while parts:
        part = parts.pop()
        # NumPy gives Python's lock back while it copies.
        joined[start : start + len(part)] = np.frombuffer(part, np.uint8)
        start += len(part)
    return joined.data


@functools.cache
def _start() -> None:
    threading.Thread(target=_return_unused, name="mingc-memory", daemon=True).start()


def _return_unused() -> None:
    while True:
        block = _unused.get()
        for start in range(0, len(block), _STEP_BYTES):
            block.madvise(mmap.MADV_DONTNEED, start, _STEP_BYTES)
            time.sleep(_PAUSE_S)
        block.close()
