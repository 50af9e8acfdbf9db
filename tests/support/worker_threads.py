"""Threads in place of the processes of an export, which would import torch anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

_T = TypeVar("_T")


class WorkerThreads(ThreadPoolExecutor):
    """Stands in for `mingc.export.process_pool.WorkerPool`."""

    def submit_alone(self, _: str, work: Callable[..., _T], *arguments: object) -> Future[_T]:
        return self.submit(work, *arguments)


@contextmanager
def worker_threads(jobs: int, gpus: Sequence[str]) -> Iterator[WorkerThreads]:
    """Stands in for `worker_pool`."""
    with WorkerThreads(jobs) as pool:
        yield pool
