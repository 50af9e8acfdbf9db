"""The processes that an export compiles in, and how they end when it fails: at once."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

from mingc.artifacts.work_folder import work_folder
from mingc.errors import CompileError
from mingc.export.build import start_worker

_T = TypeVar("_T")


@contextmanager
def worker_pool(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """`jobs` processes and a folder for what compilers leave. An error ends them in the middle of their work."""
    others = set(multiprocessing.active_children())
    with (
        work_folder(Path(tempfile.gettempdir()), "mingc-compile-", mode=0o700) as scratch,
        ProcessPoolExecutor(
            max_workers=jobs,
            mp_context=multiprocessing.get_context("spawn"),
            initializer=start_worker,
            initargs=(str(scratch),),
        ) as pool,
    ):
        try:
            yield pool
        except BaseException:
            # Shutting down alone would wait for the compiles that run: minutes.
            pool.shutdown(wait=False, cancel_futures=True)
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            raise


def result_of(future: Future[_T], where: str) -> _T:
    """What `future` returned or raised. Raises: CompileError when its process died or its device has no memory left."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise CompileError(
            "the process that built or checked this died (out of memory?)",
            where=where,
            fix="lower --jobs, or give the machine more memory",
        ) from error
    except torch.OutOfMemoryError as error:
        # A check holds its graph's layer in float32, and as many run at a time as there are jobs.
        raise CompileError(
            f"the device's memory does not suffice: {str(error).partition('. ')[0]}",
            where=where,
            fix="lower --jobs, or end what else uses the device",
        ) from error
