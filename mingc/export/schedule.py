"""Schedule of an export's worker processes: engines, weights and checks, with their dependencies."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from mingc.artifacts.manifest import (
    BackendRefusal,
    EngineRecord,
    EngineTiming,
    GraphRecord,
    QuantizationError,
    TunedKernel,
)
from mingc.errors import ArtifactError, CompileError, MingcError, ParityError
from mingc.export.plan import ExportPlan
from mingc.export.process_pool import (
    WorkerPool,
    ran_out_of_memory,
    result_of,
    start_processes,
    submit,
    worker_pool,
)
from mingc.export.tasks.check_graph import GraphResult, Replay, check_graph
from mingc.export.tasks.compile_engine import BuiltEngine, build_engine
from mingc.export.tasks.graph_task import GraphTask, engine_label
from mingc.export.tasks.memory_needs import PROCESS_DEVICE, PROCESS_HOST, Need
from mingc.export.tasks.quantization import measure_quantization_error
from mingc.export.tasks.rank_weights import WrittenWeights, write_rank
from mingc.export.tasks.timing import Timer, choose_fastest, size_order, time_graph
from mingc.host.machine import equal_gpus, free_memory_bytes

_T = TypeVar("_T")
_FAULTS = (CompileError, ParityError, ArtifactError)  # of engines that were built
AGAIN = "out of device memory, again alone"  # a step that the plan does not count
ReportStep = Callable[[str, str, float | None], None]
"""Called with the name and the subject of a step before it starts, and with its seconds when it has ended."""

Timings = tuple[str, tuple[EngineTiming, ...]]  # of a graph's engines, and the device they were timed on


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryLimits:
    """How many tasks may run at once.

    Attributes:
        jobs: processes.
        tasks_per_gpu: processes of one GPU.
        free: memory of one GPU and of the host for tasks; None: not limited.
    """

    jobs: int
    tasks_per_gpu: int
    free: Need | None

    def fit(self, needs: Sequence[Need]) -> bool:
        """Whether tasks with these needs may run at the same time."""
        if self.free is None:
            return True
        on_device = sorted((each.device for each in needs), reverse=True)[: self.tasks_per_gpu]
        return sum(on_device) <= self.free.device and sum(each.host for each in needs) <= self.free.host


def memory_limits(jobs: int, num_gpus: int) -> MemoryLimits:
    """Limits of this machine for `jobs` processes on `num_gpus` GPUs of one model, or on none.

    Processes that wait hold memory as well: they may take half of what is free.
    """
    host = free_memory_bytes()
    jobs = max(1, min(jobs, host // 2 // PROCESS_HOST))
    device = 0
    if num_gpus:
        device, _ = torch.cuda.mem_get_info()  # of the first GPU; the others are taken to be as free
        jobs = max(1, min(jobs, num_gpus * (device // 2 // PROCESS_DEVICE)))
    per_gpu = -(-jobs // max(1, num_gpus))
    free = Need(device=max(0, device - per_gpu * PROCESS_DEVICE), host=host - jobs * PROCESS_HOST)
    return MemoryLimits(jobs=jobs, tasks_per_gpu=per_gpu, free=free)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A task that has left its queue: `submit` starts it, `take` takes its result."""

    name: str
    need: Need
    submit: Callable[[WorkerPool], Future[Any]]
    take: Callable[[Future[Any]], None]


class Schedule:
    """Builds the graphs of an export in `jobs` processes.

    Weights are written while engines compile, one after another, so that only one rank's weights are in memory. An
    engine needs only the first rank's weights of its stage. These come first, in the order of the engines. Checks and
    comparisons, which read every rank's weights, start when all of their stage are complete. If several backends are
    tried, their engines are timed at the end, one graph at a time, when nothing else runs. Each task of these graphs
    runs in a separate process, because a backend's library may end it: that backend is refused, as if it had raised an
    error.

    A task starts when its planned memory fits beside that of the tasks that run, on the device and on the host, or when
    nothing runs. With several GPUs it is not known which one a task gets, so the largest tasks, as many as a GPU has
    processes, must fit into one. A task that takes gigabytes of a device has a process of its own, because the end of a
    process returns all of its memory. A task whose device runs out of memory nevertheless is run again when all other
    processes have ended.

    Attributes:
        results: of every graph, once it has run.
        quantization_error: by stage, for stages with quantized weights that measure it.
        peak_rss_bytes: the largest peak of any process.
    """

    def __init__(
        self,
        plan: ExportPlan,
        folder: Path,
        replay: Replay,
        step: ReportStep,
        kernel_configs: Mapping[str, tuple[TunedKernel, ...]],
        timer: Timer | None = None,
    ) -> None:
        self._recipe, self._folder, self._replay, self._step = plan.recipe, folder, replay, step
        self._timer = timer
        self._paths = plan.weights_folders
        self._alone = {stage for stage in self._paths if plan.recipe.runs_alone(stage)}
        tasks = {
            graph.name: GraphTask(
                recipe=plan.recipe,
                stage=graph.stage,
                graph=graph.graph,
                folder=folder,
                weights=self._paths[graph.stage],
                kernel_configs=kernel_configs.get(graph.stage, ()),
            )
            for graph in plan.graphs
        }
        self._refused = {
            graph.name: [
                BackendRefusal(backend=backend, reason=reason)
                for backend, reason in sorted(graph.refused.items())
            ]
            for graph in plan.graphs
        }
        # Longest compiles first, so that no job is left with one at the end.
        graphs = sorted(plan.graphs, key=lambda each: -each.compile_cost)
        self._to_compile = deque(
            (replace(tasks[graph.name], backend=backend), static_shapes)
            for graph in graphs
            for backend in graph.backends
            if backend not in graph.refused
            for static_shapes in graph.sizes
        )
        self._left = Counter(task.name for task, _ in self._to_compile)  # engines to build, by graph
        stages = dict.fromkeys([*(graph.stage for graph in graphs), *plan.weights])
        self._to_write = deque(  # a rank stays until its weights are complete
            sorted(
                (rank for stage in stages for rank in plan.weights[stage]), key=lambda rank: rank.shard.rank
            )
        )
        self._to_check: list[GraphTask] = []  # one backend of a graph at a time
        self._check_started: dict[str, float] = {}
        self._to_time: list[GraphTask] = []
        self._to_compare = [
            stage
            for stage in plan.weights
            if plan.recipe.quantization(stage) is not None and not plan.recipe.synthetic
        ]
        self._is_writing = False
        self._engines: dict[str, list[BuiltEngine]] = {}
        self._checked: dict[str, list[GraphResult]] = {name: [] for name in tasks}  # of each backend
        self._needs = plan.needs
        self._running: dict[Future[Any], _Task] = {}  # in the order of submission
        self._to_retry: deque[_Task] = deque()
        self._limits = MemoryLimits(jobs=self._recipe.jobs, tasks_per_gpu=self._recipe.jobs, free=None)
        self.results: list[GraphResult] = []
        self.quantization_error: dict[str, QuantizationError] = {}
        self.peak_rss_bytes = 0

    def run(self) -> None:
        """Raises: the first error that any process raises, at once; the other processes are terminated."""
        # All equal GPUs, because a check needs up to eight gigabytes and there are as many as there are jobs.
        gpus = equal_gpus() if self._recipe.device == "cuda" else ()
        # All processes are started at once: no more than can have tasks.
        self._limits = memory_limits(min(self._recipe.jobs, len(self._to_compile) + 1), len(gpus))
        while True:
            with worker_pool(self._limits.jobs, gpus) as pool:
                start_processes(pool, self._limits.jobs)
                self._run_tasks(pool)
                if not self._to_retry:
                    for task in self._to_time:
                        self._time(pool, task)
                    return
            # Processes that wait hold memory, too. They have ended now.
            while self._to_retry:
                self._retry(self._to_retry.popleft(), gpus)

    def _run_tasks(self, pool: WorkerPool) -> None:
        """Run tasks until none is left, or until those that ran beside one that lacked memory have ended."""
        self._fill(pool)
        while self._running:
            finished, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in [each for each in self._running if each in finished]:
                ended = self._running.pop(future)
                if ran_out_of_memory(future):
                    self._to_retry.append(ended)
                else:
                    ended.take(future)
            if not self._to_retry:
                self._fill(pool)

    def _retry(self, task: _Task, gpus: Sequence[str]) -> None:
        started = time.perf_counter()
        self._step(AGAIN, task.name, None)
        with worker_pool(1, gpus) as pool:
            future = task.submit(pool)
            wait([future])
        self._step(AGAIN, task.name, time.perf_counter() - started)
        task.take(future)

    def _fill(self, pool: WorkerPool) -> None:
        # Submit no more tasks than there are processes, so that a check does not queue behind compiles.
        while len(self._running) < self._limits.jobs and self._begin_next(pool):
            pass

    def _begin_next(self, pool: WorkerPool) -> bool:
        """Start the first task that fits into memory; False if none can start now."""
        running = [each.need for each in self._running.values()]
        for need, begin in self._candidates():
            if not running or self._limits.fit([*running, need]):
                task = begin()
                self._running[task.submit(pool)] = task
                return True
        return False

    def _candidates(self) -> Iterator[tuple[Need, Callable[[], _Task]]]:
        """Tasks that can start now: first those that others wait for, then the nearest to completion.

        Each with its memory, and a function that takes it out of its queue.
        """
        if self._to_write and not self._is_writing:
            yield self._need("weights", self._to_write[0].stage), self._begin_writing
        compare = None if self._to_compile else next(filter(self._is_whole, self._to_compare), None)
        if compare is not None:
            yield self._need("compare", compare), partial(self._begin_compare, compare)
        for check in self._to_check:
            if self._is_whole(check.stage):
                yield self._need("check", check.name), partial(self._begin_check, check)
        for compile_ in self._to_compile:
            if self._has_first_rank(compile_[0].stage):
                yield self._need("engine", compile_[0].name), partial(self._begin_compile, compile_)

    def _need(self, kind: str, name: str) -> Need:
        return self._needs.get((kind, name), Need())

    def _begin_writing(self) -> _Task:
        self._is_writing = True
        rank = self._to_write[0]
        self._step("weights", rank.name, None)
        return _Task(
            name=rank.name,
            need=self._need("weights", rank.stage),
            submit=lambda pool: submit(pool, rank.name, write_rank, rank, self._recipe, self._folder),
            take=self._take_written,
        )

    def _begin_compare(self, stage: str) -> _Task:
        self._to_compare.remove(stage)
        of_stage = (self._recipe, stage, self._folder, self._paths[stage])
        return _Task(
            name=stage,
            need=self._need("compare", stage),
            submit=lambda pool: submit(pool, stage, measure_quantization_error, *of_stage),
            take=partial(self._take_quantization_error, stage),
        )

    def _begin_check(self, check: GraphTask) -> _Task:
        self._to_check.remove(check)
        need = self._need("check", check.name)
        if check.name not in self._check_started:
            self._check_started[check.name] = time.perf_counter()
            self._step("check", check.name, None)
        given = (
            self._built(check),
            self._replay,
            not self._checked[check.name],
        )  # the first one writes the golden
        return _Task(
            name=check.name,
            need=need,
            submit=lambda pool: self._submit(pool, check, need, check_graph, *given),
            take=partial(self._take_check, check),
        )

    def _begin_compile(self, queued: tuple[GraphTask, dict[str, int] | None]) -> _Task:
        self._to_compile.remove(queued)
        task, static_shapes = queued
        label, need = self._label(task, static_shapes), self._need("engine", task.name)
        self._step("engine", label, None)
        return _Task(
            name=label,
            need=need,
            submit=lambda pool: self._submit(pool, task, need, build_engine, static_shapes),
            take=partial(self._take_engine, task, label),
        )

    def _submit(
        self, pool: WorkerPool, task: GraphTask, need: Need, work: Callable[..., _T], *arguments: object
    ) -> Future[_T]:
        """Start `work` on a graph, alone in its process if it is large or its backend may be refused or crash."""
        if need.has_process or task.stage in self._alone:
            return pool.submit_alone(task.name, work, task, *arguments)
        return submit(pool, task.name, work, task, *arguments)

    def _built(self, task: GraphTask) -> tuple[EngineRecord, ...]:
        """The engines of one backend of a graph, by size."""
        records = [each.record for each in self._engines[task.name] if each.record.backend == task.backend]
        return tuple(sorted(records, key=size_order))

    def _has_first_rank(self, stage: str) -> bool:
        """Whether the first rank's weights of `stage` are written."""
        return all(rank.stage != stage or rank.shard.rank > 0 for rank in self._to_write)

    def _is_whole(self, stage: str) -> bool:
        """Whether every rank's weights of `stage` are written."""
        return all(rank.stage != stage for rank in self._to_write)

    def _take_written(self, future: Future[WrittenWeights]) -> None:
        rank = self._to_write[0]
        written = result_of(future, rank.name)
        self._to_write.popleft()
        self._is_writing = False
        self._hold(written.peak_rss_bytes)
        self._step("weights", rank.name, written.seconds)

    def _take_engine(self, task: GraphTask, label: str, future: Future[BuiltEngine]) -> None:
        done = self._engines.setdefault(task.name, [])
        self._left[task.name] -= 1
        try:
            built = result_of(future, task.name)
        except CompileError as error:
            if not self._recipe.is_measured(task.stage):
                raise
            self._refuse(task, error)
            self._step("engine", label, 0.0)
            self._skip_others(task)
        else:
            self._hold(built.peak_rss_bytes)
            self._step("engine", label, built.record.compile_seconds)
            done.append(built)
        if not self._left[task.name]:
            self._to_check.append(replace(task, backend=self._unchecked(task)[0]))

    def _unchecked(self, task: GraphTask) -> list[str]:
        """The backends of a graph that are neither refused nor checked, the default one first."""
        refused = {each.backend for each in self._refused[task.name]}
        checked = {backend for each in self._checked[task.name] for backend in each.record.backends}
        return [each for each in self._recipe.backends_of(task.stage) if each not in refused | checked]

    def _refuse(self, task: GraphTask, error: MingcError) -> None:
        """Continue without the backend of `task`. Raises: CompileError when it was the last one."""
        reasons = self._refused[task.name]
        if task.backend not in {each.backend for each in reasons}:
            reasons.append(BackendRefusal(backend=task.backend, reason=error.message))
        if not {*self._recipe.backends_of(task.stage)} - {each.backend for each in reasons}:
            listed = "; ".join(f"{each.backend}: {each.reason}" for each in reasons)
            raise CompileError(
                f"no backend takes the graph: {listed}", where=task.name, fix=error.fix
            ) from error

    def _skip_others(self, task: GraphTask) -> None:
        """Remove engines of the same graph and backend from the queue, because they would be discarded."""
        skipped = [each for each in self._to_compile if each[0] == task]
        self._to_compile = deque(each for each in self._to_compile if each[0] != task)
        self._left[task.name] -= len(skipped)
        for _, static_shapes in skipped:
            self._step("engine", self._label(task, static_shapes), 0.0)

    def _label(self, task: GraphTask, static_shapes: dict[str, int] | None) -> str:
        """Name of an engine in progress lines."""
        several = len(self._recipe.backends_of(task.stage)) > 1
        return engine_label(task.name, static_shapes) + (f" ({task.backend})" if several else "")

    def _take_check(self, task: GraphTask, future: Future[GraphResult]) -> None:
        try:
            result = result_of(future, task.name)
        except _FAULTS as error:
            if not self._recipe.is_measured(task.stage):
                raise
            self._refuse(task, error)
        else:
            self._hold(result.peak_rss_bytes)
            self._checked[task.name].append(result)
        if left := self._unchecked(task):
            self._to_check.insert(0, replace(task, backend=left[0]))
            return
        self._step("check", task.name, time.perf_counter() - self._check_started[task.name])
        results = self._checked[task.name]
        if not self._recipe.is_measured(task.stage):
            self.results += results
        elif len(results) > 1:
            self._to_time.append(task)
        else:
            self._choose(task, "", ())

    def _time(self, pool: WorkerPool, task: GraphTask) -> None:
        """Choose engines of a graph by their times."""
        started = time.perf_counter()
        self._step("time", task.name, None)
        records = [each.record for each in self._checked[task.name]]
        try:
            device, timings = self._timings(pool, task, records)
        except _FAULTS:
            device, timings = self._timings_alone(pool, task, records)
        self._step("time", task.name, time.perf_counter() - started)
        self._choose(task, device, timings)

    def _timings_alone(self, pool: WorkerPool, task: GraphTask, records: Sequence[GraphRecord]) -> Timings:
        """Time one backend after the other, because one of them failed; refuse a backend that fails again."""
        device, timings = "", list[EngineTiming]()
        for record in records:
            try:
                device, found = self._timings(pool, task, [record])
            except _FAULTS as error:
                self._refuse(replace(task, backend=record.backends[0]), error)
            else:
                timings += found
        return device, tuple(timings)

    def _timings(self, pool: WorkerPool, task: GraphTask, records: Sequence[GraphRecord]) -> Timings:
        return result_of(self._submit(pool, task, Need(), time_graph, records, self._timer), task.name)

    def _choose(self, task: GraphTask, device: str, timings: tuple[EngineTiming, ...]) -> None:
        """Keep the engines of a graph that its timings select, and remove the files of the others."""
        results = self._checked[task.name]
        chosen = choose_fastest(
            [each.record for each in results], timings, device=device, refused=self._refused[task.name]
        )
        kept = {self._folder / each.file for each in chosen.engines}
        # A compiler that died may have left a part of a file.
        for path in (self._folder / "engines").glob(f"{task.name}[.-]*"):
            if path not in kept:
                path.unlink()
        self.results.append(replace(results[0], record=chosen))

    def _take_quantization_error(self, stage: str, future: Future[QuantizationError | None]) -> None:
        error = result_of(future, stage)
        if error is not None:
            self.quantization_error[stage] = error

    def _hold(self, peak_rss_bytes: int) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_bytes)
