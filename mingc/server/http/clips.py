"""Speech of one answer on its way to the client: sent patch by patch, or kept until the clip is complete.

What is kept does not fill the memory: beyond a few hundred kilobytes an answer is in an unnamed temporary file, and a
budget bounds the bytes of all answers.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from mingc.errors import CapacityError
from mingc.server.audio_format import AudioSpec, ClipFile, to_pcm16, wav_header
from mingc.server.key_limits import SECONDS_PER_BYTE
from mingc.server.metrics import Metrics

log = logging.getLogger("mingc.http")

_IN_MEMORY_BYTES = 256 << 10  # of a kept clip, and as much that waits to be written
_PART_BYTES = 192 << 10  # of a kept clip that are read and sent at once; a multiple of 3, for base64


class AnswerBudget:
    """Counts the bytes of all kept clips, and those that are expected of them. Call it from the event loop only."""

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
        expected = int(seconds * spec.sample_rate) * 2 + _IN_MEMORY_BYTES
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

    def _take(self, num_bytes: int) -> None:
        if self._used + num_bytes > self._limit:
            raise CapacityError(
                f"The answers of running requests hold or expect {self._used} of {self._limit} bytes; try again later, "
                "or stream.",
                code="answer_budget_exhausted",
            )
        self._used += num_bytes


class LiveClip:
    """WAV or raw PCM that is sent as it is generated. The header is sent with the first samples."""

    def __init__(self, spec: AudioSpec) -> None:
        self._header = wav_header(spec.sample_rate, None) if spec.format == "wav" else b""

    async def add(self, samples: NDArray[np.float32]) -> bytes:
        """Add (n,) float32 mono samples; returns the bytes that can be sent now."""
        header, self._header = self._header, b""
        return header + to_pcm16(samples).tobytes()

    async def rest(self) -> AsyncIterator[bytes]:
        """The bytes that remain after the last samples."""
        if self._header:
            yield self._header


class KeptClip:
    """A clip that is sent when it is complete: FLAC, or one with its length in the header.

    `grow` is called with its size so far before more is kept.
    """

    def __init__(self, spec: AudioSpec, grow: Callable[[int], None]) -> None:
        # Closed by `close`; a file on disk from `max_size` on.
        self._file = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY_BYTES)  # noqa: SIM115
        self._clip = ClipFile(spec, self._file)
        self._grow = grow
        self._num_bytes = 0  # of 16-bit samples
        self._total: int | None = None  # bytes of the complete clip
        self._pending: list[NDArray[np.int16]] = []
        self._pending_bytes = 0
        self._lock = threading.Lock()  # held while a thread uses the file

    async def add(self, samples: NDArray[np.float32]) -> bytes:
        """Add (n,) float32 mono samples. Returns nothing to send. Raises: CapacityError when there is no room."""
        pcm = to_pcm16(samples)
        self._num_bytes += pcm.nbytes
        self._grow(self._num_bytes)
        self._pending.append(pcm)
        self._pending_bytes += pcm.nbytes
        if self._pending_bytes >= _IN_MEMORY_BYTES:
            await asyncio.to_thread(self._write)
        return b""

    async def finish(self) -> int:
        """Complete the clip. Returns its bytes, which `rest` reads."""
        if self._total is None:
            self._total = await asyncio.to_thread(self._finish)
        return self._total

    async def rest(self) -> AsyncIterator[bytes]:
        """The whole clip, in parts."""
        left = await self.finish()
        while left > 0:
            part = await asyncio.to_thread(self._file.read, _PART_BYTES)
            left -= len(part)
            yield part

    def close(self) -> None:
        """Drop the clip."""
        with self._lock:
            self._clip.close()

    def _write(self) -> None:
        with self._lock, _needing_space():
            pending, self._pending, self._pending_bytes = self._pending, [], 0
            if pending and not self._file.closed:  # the client may have left
                self._clip.add(np.concatenate(pending))

    def _finish(self) -> int:
        self._write()
        with self._lock, _needing_space():
            return 0 if self._file.closed else self._clip.finish()


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
