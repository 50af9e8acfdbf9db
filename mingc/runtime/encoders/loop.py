"""Encoder thread: embeds the media of all requests, several in one engine call and equal content once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from mingc.errors import RequestError, ServeError
from mingc.runtime.encoders import host_tensors
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.engine_thread import EngineThread

_MAX_MEDIA = 32  # one call takes at most so many
_MAX_WAITING_BYTES = 64 << 20  # features of about two of the largest images; preprocessing waits above that
# NaN and inf are the values that have all of these bits set.
_BFLOAT16_EXPONENT = np.int16(0x7F80)
_BLOCK_VALUES = 1 << 16


class HostFeatures(Protocol):
    """Decoded media in host memory."""

    @property
    def num_bytes(self) -> int: ...


_Features = TypeVar("_Features", bound=HostFeatures)
_FeaturesIn = TypeVar("_FeaturesIn", contravariant=True, bound=HostFeatures)


class Encoder(Protocol[_FeaturesIn]):
    """Interface of an encoder.

    Attributes:
        max_batch_tokens: padded size above which a call is no faster per token, and only delays the first medium.
    """

    max_batch_tokens: int

    def padded_tokens(self, features: Sequence[_FeaturesIn]) -> int:
        """Tokens that one call for all `features` computes, padding included.

        Raises: RequestError when no call can hold them.
        """
        ...

    def encode(self, features: Sequence[_FeaturesIn]) -> list[Tensor]:
        """Embeddings (tokens, D) of each medium, on the host."""
        ...


@dataclass(slots=True, eq=False)
class _Job(Generic[_Features]):
    """One image, video or clip to encode, for all requests that wait for it."""

    features: _Features
    key: bytes | None  # None: not shared
    futures: list[Future[Tensor]]

    @property
    def is_wanted(self) -> bool:
        return not all(future.cancelled() for future in self.futures)


class EncoderLoop(EngineThread, Generic[_Features]):
    """Runs one encoder for all requests, in order of arrival.

    A call takes waiting media, oldest first, as long as they need no more padding than in separate calls and have at
    most `max_batch_tokens`, unless one medium alone has more. If the call fails, each medium is retried in a separate
    call, so that only the request at fault fails.

    Content that several requests wait for is encoded once. An error goes to the first of these requests; the others try
    again. Media that no request waits for any more are not encoded.

    Args:
        name: name of the stage.
        cache: None: the media of every request are encoded.
    """

    def __init__(self, name: str, encoder: Encoder[_Features], cache: EncoderCache | None = None) -> None:
        super().__init__(name)
        self._encoder = encoder
        self._cache = cache
        self._waiting: deque[_Job[_Features]] = deque()
        self._running: list[_Job[_Features]] = []
        self._has_room = threading.Condition(self._lock)
        self._by_key: dict[bytes, _Job[_Features]] = {}  # waiting and running

    @property
    def held(self) -> dict[str, int]:
        return {f"media in the {self._name}": len(self._waiting) + len(self._running)}

    def submit(self, features: Sequence[_Features], digests: Sequence[bytes]) -> list[Future[Tensor]]:
        """Queue the media of a request. Cancelling a future withdraws its medium. Blocks while too many features wait.

        `digests` are the `content_digest` of each medium; without a cache they are ignored. Results are embeddings
        (tokens, D) on the host, which other requests may share: do not write to them.

        Raises: WorkerError when the thread has failed or is stopping.
        """
        with self._lock:
            self._has_room.wait_for(lambda: self._can_add)
            self._check_healthy()
            futures = [self._add(*each) for each in zip(features, digests, strict=True)]
            self._notify()
        return futures

    @property
    def _can_add(self) -> bool:
        is_ending = self._failure is not None or self._is_stopping
        waiting = sum(job.features.num_bytes for job in self._waiting)
        return is_ending or waiting < _MAX_WAITING_BYTES

    def _add(self, features: _Features, digest: bytes) -> Future[Tensor]:
        future: Future[Tensor] = Future()
        key: bytes | None = None
        if self._cache is not None:
            key = self._name.encode() + b" " + digest
            if key in self._by_key:
                self._by_key[key].futures.append(future)
                self._cache.count_shared()
                return future
            found = self._cache.get(key)
            if found is not None:
                future.set_result(found)
                return future
        job = _Job(features, key, [future])
        self._waiting.append(job)
        if key is not None:
            self._by_key[key] = job
        return future

    def _step(self) -> bool:
        with self._lock:
            self._running = self._take()
        if not self._running:
            return False
        self._encode(self._running)
        self._running = []
        return True

    def _take(self) -> list[_Job[_Features]]:
        """Remove the jobs of the next call from the queue."""
        wanted: deque[_Job[_Features]] = deque()
        for job in self._waiting:
            if job.is_wanted:  # checked once: a future may be cancelled at any moment
                wanted.append(job)
            else:
                self._forget(job)
        self._waiting = wanted
        first = [job.features for job in islice(self._waiting, _MAX_MEDIA)]
        jobs = [self._waiting.popleft() for _ in range(self._batch_size(first))]
        self._has_room.notify_all()
        return jobs

    def _batch_size(self, features: Sequence[_Features]) -> int:
        """How many of the first `features` share a call: as many as need no more padding than separate calls."""
        best, alone = min(1, len(features)), 0
        for count in range(1, len(features) + 1):
            try:
                alone += self._encoder.padded_tokens(features[count - 1 : count])
                together = self._encoder.padded_tokens(features[:count])
            except RequestError:  # one medium, or all together, are too large
                break
            if count > 1 and together > self._encoder.max_batch_tokens:
                break
            if together <= alone:
                best = count
        return best

    def _encode(self, jobs: Sequence[_Job[_Features]]) -> None:
        """Encode `jobs` in one call, or, if that fails, each in its own call."""
        try:
            found = self._encoder.encode([job.features for job in jobs])
        except Exception as error:
            if len(jobs) == 1:
                self._fail(jobs[0], error)
            else:
                for job in jobs:
                    self._encode([job])
            return
        # Caching takes as long as a small call, so all requests get their results before.
        for job, embeddings in zip(jobs, found, strict=True):
            with self._lock:
                waiting, job.futures = job.futures, []
            _resolve(waiting, embeddings)
        for job, embeddings in zip(jobs, found, strict=True):
            self._keep(job, embeddings)

    def _keep(self, job: _Job[_Features], embeddings: Tensor) -> None:
        """Cache `embeddings` if they are finite.

        Requests that joined during the call get the cached copy. If there is none, they try again.
        """
        if self._cache is None or job.key is None:
            return
        is_finite = _is_finite(embeddings)
        if is_finite:
            # A copy, because `embeddings` may be part of a larger result, or pinned memory that later calls reuse.
            embeddings = host_tensors.copy(embeddings)
            self._cache.put(job.key, embeddings)
        with self._lock:
            if job.futures and not is_finite:
                self._waiting.appendleft(job)
                return
            self._forget(job)
        _resolve(job.futures, embeddings)

    def _fail(self, job: _Job[_Features], error: Exception) -> None:
        """Pass `error` to the first request, which started the job; the others try again."""
        with self._lock:
            while job.futures:
                first = job.futures.pop(0)
                if first.set_running_or_notify_cancel():
                    first.set_exception(error)
                    break
            if job.futures:
                self._waiting.appendleft(job)
            else:
                self._forget(job)

    def _forget(self, job: _Job[_Features]) -> None:
        if job.key is not None:
            del self._by_key[job.key]

    def _fail_all(self, error: ServeError) -> None:
        with self._lock:
            jobs = [*self._running, *self._waiting]
            self._running = []
            self._waiting.clear()
            self._by_key.clear()
            self._has_room.notify_all()
        for job in jobs:
            for future in job.futures:
                if not future.done() and future.set_running_or_notify_cancel():
                    future.set_exception(error)


def _resolve(futures: Sequence[Future[Tensor]], embeddings: Tensor) -> None:
    for future in futures:
        if future.set_running_or_notify_cancel():
            future.set_result(embeddings)


def _is_finite(values: Tensor) -> bool:
    """Whether a host tensor holds neither NaN nor inf. torch takes 30 times as long in bfloat16 on one thread."""
    if values.dtype != torch.bfloat16:
        return bool(np.isfinite(values.numpy()).all())
    bits = values.contiguous().view(torch.int16).numpy().reshape(-1)
    # Blocks stay in the processor's cache; one array of all exponents would take new pages of memory.
    for start in range(0, bits.size, _BLOCK_VALUES):
        exponents = np.bitwise_and(bits[start : start + _BLOCK_VALUES], _BFLOAT16_EXPONENT)
        if exponents.max() == _BFLOAT16_EXPONENT:
            return False
    return True
