"""Worker processes of an export: start, memory, and immediate termination on failure."""

from __future__ import annotations

import gc
import multiprocessing
import os
import resource
import signal
import tempfile
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.fx.experimental import proxy_tensor

from mingc.artifacts.work_folder import work_folder
from mingc.errors import CompileError
from mingc.host.parent_watchdog import watch_pool_owner

_T = TypeVar("_T")
_NO_MEMORY = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
_END_S = 10.0  # a terminated process ends at once, unless its disk or device hangs


class WorkerPool(ProcessPoolExecutor):
    """`jobs` processes that share the tasks of an export, and one more for each task that runs alone."""

    def __init__(self, jobs: int, gpus: Sequence[str], scratch: Path) -> None:
        self._scratch = scratch
        # Processes with threads on every core wait for each other. CPU engines keep the number of their compiler's
        # threads, so it is torch's unless the engines are for GPUs.
        self._num_threads = max(1, len(os.sched_getaffinity(0)) // jobs) if gpus else None
        places = [gpus[place % len(gpus)] for place in range(jobs)] if gpus else []
        self._free = deque(places)  # GPUs for tasks that run alone
        self._waiting = ThreadPoolExecutor(jobs)
        super().__init__(jobs, **self._options(places))

    def _options(self, gpus: Sequence[str]) -> dict[str, Any]:
        """Arguments of a pool each of whose processes sees one of `gpus`."""
        spawn = multiprocessing.get_context("spawn")
        places = spawn.SimpleQueue()
        for gpu in gpus:
            places.put(gpu)
        arguments = (str(self._scratch), places if gpus else None, self._num_threads)
        return {"mp_context": spawn, "initializer": start_worker, "initargs": arguments}

    def submit_alone(self, where: str, work: Callable[..., _T], *arguments: object) -> Future[_T]:
        """Start `work(*arguments)` in a process that runs nothing else. At most `jobs` tasks may run at a time.

        If it dies, its future raises a CompileError that says how, and other tasks continue. The future is done once
        the process has ended.
        """
        gpus = [self._free.popleft()] if self._free else []
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(1, **self._options(gpus))
        future = pool.submit(work, *arguments)
        (process,) = set(multiprocessing.active_children()) - others
        return self._waiting.submit(self._result_alone, where, pool, process, future, gpus)

    def _result_alone(
        self, where: str, pool: Executor, process: BaseProcess, future: Future[_T], gpus: Sequence[str]
    ) -> _T:
        """The result of the only task of `pool`, once its `process` has ended."""
        try:
            with pool:
                return future.result()
        except BrokenProcessPool as error:
            raise CompileError(
                f"its process died ({_cause(process.exitcode)})",
                where=where,
                fix="compile this stage with another backend: --backend NAME:STAGE",
            ) from error
        finally:
            self._free.extend(gpus)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._waiting.shutdown(wait, cancel_futures=cancel_futures)


@contextmanager
def worker_pool(jobs: int, gpus: Sequence[str] = ()) -> Iterator[WorkerPool]:
    """A pool of `jobs` processes with a scratch folder for compilers; an error terminates them immediately.

    Each process sees one of `gpus` (entries of CUDA_VISIBLE_DEVICES), in turns; without `gpus`, it sees what this
    process sees.
    """
    others = set(multiprocessing.active_children())
    _start_tracker()
    with (
        work_folder(Path(tempfile.gettempdir()), "mingc-compile-", mode=0o700) as scratch,
        WorkerPool(jobs, gpus, scratch) as pool,
    ):
        try:
            yield pool
        except BaseException:
            # Shutting down alone would wait for the compiles that run: minutes.
            pool.shutdown(wait=False, cancel_futures=True)
            workers = set(multiprocessing.active_children()) - others
            for worker in workers:
                worker.terminate()
            for worker in workers:
                worker.join(_END_S)  # what it writes into is removed next
            raise


def _start_tracker() -> None:
    """Start Python's resource tracker with its warnings silenced.

    A terminated worker leaves the lock that tqdm creates for torch's progress bars.
    """
    before = os.environ.get("PYTHONWARNINGS")
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, (before, "ignore:resource_tracker:UserWarning")))
    try:
        resource_tracker.ensure_running()
    finally:
        if before is None:
            del os.environ["PYTHONWARNINGS"]
        else:
            os.environ["PYTHONWARNINGS"] = before


def submit(pool: Executor, where: str, work: Callable[..., _T], *arguments: object) -> Future[_T]:
    """Start `work(*arguments)` in a process of `pool`. Raises: CompileError when one of its processes has died."""
    try:
        return pool.submit(work, *arguments)
    except BrokenProcessPool as error:
        raise _died(where) from error


def start_processes(pool: Executor, jobs: int) -> None:
    """Start the `jobs` processes of a new pool. They import torch now and not when they get their first task.

    Raises: CompileError when one of them has died.
    """
    for _ in range(jobs):
        submit(pool, "worker processes", os.getpid)


def _died(where: str) -> CompileError:
    return CompileError(
        "the process that worked on this died (out of memory?)",
        where=where,
        fix="give the machine more memory, or lower --jobs",
    )


def _cause(exit_code: int | None) -> str:
    """How a process ended. The kernel kills a process when the machine has no memory left."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {-exit_code}" + (": out of memory?" if exit_code == -signal.SIGKILL else "")


def result_of(future: Future[_T], where: str) -> _T:
    """What `future` returned or raised. Raises: CompileError when its process died or its device has no memory left."""
    try:
        return future.result()
    except BrokenProcessPool as error:
        raise _died(where) from error
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        raise CompileError(
            f"the device does not have enough memory: {str(error).partition('. ')[0]}",
            where=where,
            fix="stop other processes that use the device, or export with more ranks (--tp) or fewer bits (--quantize)",
        ) from error


def ran_out_of_memory(future: Future[Any]) -> bool:
    """Whether a task that is done ended because its device had no memory left."""
    error = future.exception()
    return error is not None and _is_out_of_memory(error)


def _is_out_of_memory(error: BaseException) -> bool:
    """Libraries and engines report it by errors of their own."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in _NO_MEMORY)


def start_worker(scratch: str, gpus: SimpleQueue[str] | None = None, num_threads: int | None = None) -> None:
    """Prepare a worker process: one compile thread (workers are the parallelism), torch's own warnings silenced.

    All temporary files of compilers go to the folder `scratch`. Workers of one export share its Inductor cache, so that
    the C++ compiler is probed only once (9 s). The process sees only the next one of `gpus`, if any.

    `num_threads`: of torch's operations on the CPU; None: torch's default.
    """
    watch_pool_owner()
    if gpus is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = gpus.get()  # CUDA reads it when it is first used
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = os.path.join(scratch, "inductor")
    os.environ["TMPDIR"] = tempfile.tempdir = scratch
    warnings.simplefilter("ignore")
    # Tracing and lowering create objects by the million, few of them garbage before the task ends.
    gc.set_threshold(10_000, 20, 20)


@contextmanager
def gives_memory_back() -> Iterator[None]:
    """Release the memory of what the block traced, and cached device memory, so that other processes can use it.

    Garbage collection skips objects that exist before the block: visiting the objects of torch and sympy would take a
    third of the time of tracing small graphs. Whatever still holds a module then holds it for good.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    except Exception as error:
        _clear_frames(error)
        raise
    finally:
        # torch keeps the nodes of the last traced graph, and with them its module and weights, until the next trace:
        # by then they would be among the objects that collection skips.
        proxy_tensor._FAKE_TENSOR_ID_TO_PROXY_MAP_FOR_EXPORT.clear()
        gc.collect()
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            # A workspace that was cut from a freed block of gigabytes keeps the whole block from being released.
            torch._C._cuda_clearCublasWorkspaces()
            torch.cuda.empty_cache()


def _clear_frames(error: BaseException) -> None:
    """Drop the local variables that `error` and its causes keep: all tensors of a task that ran out of memory."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen = seen.__cause__ or seen.__context__


def peak_rss_bytes() -> int:
    """Peak resident memory of this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
