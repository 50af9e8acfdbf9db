"""Speech of one answer on its way to the client: sent patch by patch, or kept until the clip is complete.

What is kept does not fill the memory: beyond a few hundred kilobytes an answer is in an unnamed temporary file, and a
budget bounds the bytes of all answers.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mingc.errors import CapacityError
from mingc.server.audio_format import AudioSpec, ClipEncoder, ClipFile
from mingc.server.key_limits import SECONDS_PER_BYTE
from mingc.server.metrics import Metrics

log = logging.getLogger("mingc.http")
_T = TypeVar("_T")

_IN_MEMORY_BYTES = 256 << 10  # of a kept clip, and as much that waits to be written
_PART_BYTES = 192 << 10  # of a kept clip that are read and sent at once; a multiple of 3, for base64


class AnswerBudget:
    """Counts the bytes of all kept clips and pictures, also expected ones. Call it from the event loop only."""

    def __init__(self, limit: int, metrics: Metrics) -> None:
        self._limit = limit
        self._used = 0
        metrics.add_limit("answer_bytes", lambda: (self._used, limit))

    @contextmanager
    def keep(self, spec: AudioSpec, text: str | None = None) -> Iterator[KeptClip]:
        """Keep one clip until the block ends. `text`: what it will say; None if that is unknown.

        Raises: CapacityError if the clips of all requests would be too large.
        """
        seconds = 0.0 if text is None else len(text.encode()) * SECONDS_PER_BYTE
        expected = spec.most_bytes(int(seconds * spec.speech_rate)) + _IN_MEMORY_BYTES
        reserved = min(expected, self._limit)  # alone, it may be too large only when that is certain
        self._take(reserved)

        def grow(num_bytes: int) -> None:
            nonlocal reserved
            if num_bytes > reserved:
                self._take(num_bytes - reserved)
                reserved = num_bytes

        clip = KeptClip(spec, grow)
        try:
            yield clip
        finally:
            clip.close()
            self._used -= reserved

    @contextmanager
    def reserve(self, num_bytes: int) -> Iterator[None]:
        """Count `num_bytes` of an answer until the block ends. Raises: see `keep`."""
        num_bytes = min(num_bytes, self._limit)
        self._take(num_bytes)
        try:
            yield
        finally:
            self._used -= num_bytes

    def _take(self, num_bytes: int) -> None:
        if self._used + num_bytes > self._limit:
            raise CapacityError(
                f"The answers of running requests hold or expect {self._used} of {self._limit} bytes; try again later, "
                "or stream.",
                code="answer_budget_exhausted",
            )
        self._used += num_bytes


class EncoderThread:
    """Runs the encoder of one clip or picture, one call at a time, on a thread that all share.

    A request that is cancelled does not wait for its running call: `close` frees the encoder when that has ended.
    """

    # Beside the threads of asyncio, so that encoders do not delay what waits for those.
    _threads = ThreadPoolExecutor(thread_name_prefix="mingc-encode")

    def __init__(self) -> None:
        self._last: Future[Any] | None = None

    async def run(self, call: Callable[[], _T]) -> _T:
        context = contextvars.copy_context()  # logs have the id of the request
        self._last = last = self._threads.submit(lambda: context.run(call))
        return await asyncio.wrap_future(last)

    def close(self, free: Callable[[], None]) -> None:
        """Call `free` after the last call."""
        if self._last is None:
            free()
        else:
            self._last.add_done_callback(lambda _: free())


class LiveClip:
    """A clip that is sent as it is generated. A header is sent with the first samples. Encoders run on a thread."""

    def __init__(self, spec: AudioSpec) -> None:
        self._spec, self._is_quick = spec, spec.is_quick
        self._encoder: ClipEncoder | None = None
        self._thread = EncoderThread()

    async def add(self, samples: NDArray[np.float32]) -> bytes:
        """Add (n,) float32 mono samples; returns the bytes that can be sent now."""
        return await self._run(samples, is_last=False)

    async def rest(self) -> AsyncIterator[bytes]:
        """The bytes that remain after the last samples."""
        if rest := await self._run(np.empty(0, np.float32), is_last=True):
            yield rest

    def close(self) -> None:
        """Drop the clip."""
        self._thread.close(self._free)

    async def _run(self, samples: NDArray[np.float32], *, is_last: bool) -> bytes:
        if self._is_quick:
            return self._encode(samples, is_last=is_last)
        return await self._thread.run(partial(self._encode, samples, is_last=is_last))

    def _encode(self, samples: NDArray[np.float32], *, is_last: bool) -> bytes:
        if self._encoder is None:  # on the thread, because the first one loads FFmpeg
            self._encoder = ClipEncoder(self._spec)
        return self._encoder.add(samples, is_last=is_last)

    def _free(self) -> None:
        if self._encoder is not None:
            self._encoder.close()


class KeptClip:
    """A clip that is sent when it is complete: FLAC, or one with its length in the header.

    `grow` is called with its size so far before more is kept.
    """

    def __init__(self, spec: AudioSpec, grow: Callable[[int], None]) -> None:
        self._spec = spec
        # Closed by `close`; a file on disk from `max_size` on.
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        self._clip: ClipFile | None = None
        self._grow = grow
        self._num_samples = 0
        self._total: int | None = None  # bytes of the complete clip
        self._pending: list[NDArray[np.float32]] = []
        self._pending_bytes = 0
        self._thread = EncoderThread()

    async def add(self, samples: NDArray[np.float32]) -> bytes:
        """Add (n,) float32 mono samples. Returns nothing to send. Raises: CapacityError when there is no room."""
        self._num_samples += len(samples)
        self._grow(self._spec.most_bytes(self._num_samples))
        self._pending.append(samples)
        self._pending_bytes += samples.nbytes
        if self._pending_bytes >= _IN_MEMORY_BYTES:
            await self._thread.run(self._write)
        return b""

    async def finish(self) -> int:
        """Complete the clip. Returns its bytes, which `rest` reads."""
        if self._total is None:
            self._total = await self._thread.run(self._finish)
        return self._total

    async def rest(self) -> AsyncIterator[bytes]:
        """The whole clip, in parts."""
        left = await self.finish()
        while left > 0:
            part = await self._thread.run(partial(self._file.read, _PART_BYTES))
            left -= len(part)
            yield part

    def close(self) -> None:
        """Drop the clip."""
        self._thread.close(self._free)

    def _write(self) -> ClipFile:
        with _needing_space():
            if self._clip is None:  # on the thread, because the first one loads FFmpeg
                self._clip = ClipFile(self._spec, self._file)
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            if pending:
                self._clip.add(np.concatenate(pending))
            return self._clip

    def _finish(self) -> int:
        clip = self._write()
        with _needing_space():
            return clip.finish()

    def _free(self) -> None:
        try:
            if self._clip is not None:
                self._clip.close()
        except OSError as error:  # its encoder writes a last packet
            log.debug("a dropped clip could not be completed: %s", error.strerror)
        self._file.close()


@contextmanager
def _needing_space() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        log.error("answers cannot be kept in %s: %s", tempfile.gettempdir(), error.strerror)
        raise CapacityError(
            "There is no space for the answer on the server; try again later, or stream.",
            code="answer_budget_exhausted",
        ) from error
