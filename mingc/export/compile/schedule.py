"""Schedule of an export's worker processes: engines, weights files and checks, with their dependencies."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mingc.artifacts.manifest import (
    BackendRefusal,
    EngineRecord,
    EngineTiming,
    GraphRecord,
    QuantizationError,
    TunedKernel,
)
from mingc.errors import CompileError
from mingc.export.compile.build import (
    BuiltEngine,
    GraphResult,
    GraphTask,
    Replay,
    Timer,
    build_engine,
    check_graph,
    engine_label,
    measure_quantization_error,
    time_graph,
)
from mingc.export.compile.choice import choose_fastest
from mingc.export.process_pool import result_of, submit, worker_pool
from mingc.export.recipe import ExportRecipe
from mingc.export.weights.files import WeightsFile, WrittenFile, write_in_worker
from mingc.host import equal_gpus

Sizes = Mapping[str, Mapping[str, list[dict[str, int] | None]]]  # of a graph's engines, by stage and graph


class Schedule:
    """Builds the graphs of an export in `jobs` processes.

    Engines need only the first rank's weights file of their stage, which is written first. Files of other ranks are
    written meanwhile, one after another, so that only one rank's weights are in memory. Checks and comparisons, which
    read every rank's file, start when all files of their stage are complete. If several backends are tried, their
    engines are timed at the end, one graph at a time, when nothing else runs.

    Attributes:
        results: of every graph, once it has run.
        quantization_error: by stage, for stages with quantized weights that measure it.
        peak_rss_bytes: the largest peak of any process.
    """

    def __init__(
        self,
        recipe: ExportRecipe,
        folder: Path,
        replay: Replay,
        sizes: Sizes,
        files: Mapping[str, tuple[WeightsFile, ...]],
        step: Callable[[str, str, float | None], None],
        kernel_configs: Mapping[str, tuple[TunedKernel, ...]],
        compile_costs: Mapping[str, int] = MappingProxyType({}),
        timer: Timer | None = None,
        refused: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
        subfolder: str = "",
    ) -> None:
        """Plan the work.

        Args:
            refused: reasons of backends that cannot build a graph, by graph and backend; they are not tried.
            subfolder: of engines and goldens of a target other than the first; weights files and quantization error of
                the first target are reused. Empty: the first target.
        """
        self._timer = timer
        self._recipe, self._folder, self._replay = recipe, folder, replay
        self._sizes, self._step = sizes, step
        self._paths = {stage: tuple(file.path for file in each) for stage, each in files.items()}
        tasks = [
            GraphTask(
                recipe=recipe,
                stage=stage,
                graph=graph,
                folder=folder,
                weights=self._paths[stage],
                kernel_configs=kernel_configs.get(stage, ()),
                subfolder=subfolder,
            )
            for stage, graphs in sizes.items()
            for graph in graphs
        ]
        self._refused = {
            task.name: [
                BackendRefusal(backend=backend, reason=reason)
                for backend, reason in sorted(refused.get(task.name, {}).items())
            ]
            for task in tasks
        }
        self._to_compile = deque(
            (replace(task, backend=backend), static_shapes)
            # Longest compiles first, so that no job is left with one at the end.
            for task in sorted(tasks, key=lambda each: -compile_costs.get(each.name, 0))
            for backend in recipe.backends_of(task.stage)
            if backend not in refused.get(task.name, {})
            for static_shapes in sizes[task.stage][task.graph]
        )
        self._left = Counter(task.name for task, _ in self._to_compile)  # engines to build, by graph
        to_write = [] if subfolder else [file for each in files.values() for file in each[1:]]
        self._to_write = deque(to_write)  # until it is whole
        self._to_check: list[tuple[GraphTask, tuple[EngineRecord, ...]]] = []
        self._to_time: list[tuple[GraphTask, GraphRecord]] = []
        self._to_compare = [
            stage
            for stage in sizes
            if recipe.quantization(stage) is not None and not recipe.synthetic and not subfolder
        ]
        self._is_writing = False
        self._engines: dict[str, list[BuiltEngine]] = {}
        self._checked: dict[str, GraphResult] = {}
        # What is done with a future's result, in the order in which they were submitted.
        self._running: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        self.results: list[GraphResult] = []
        self.quantization_error: dict[str, QuantizationError] = {}
        self.peak_rss_bytes = 0

    def run(self) -> None:
        """Raises: the first error that any process raises, at once; the other processes are terminated."""
        # All equal GPUs, because a check needs up to eight gigabytes and there are as many as there are jobs.
        gpus = equal_gpus() if self._recipe.device == "cuda" else ()
        with worker_pool(self._recipe.jobs, gpus) as pool:
            self._fill(pool)
            while self._running:
                finished, _ = wait(self._running, return_when=FIRST_COMPLETED)
                for future in [each for each in self._running if each in finished]:
                    self._running.pop(future)(future)
                self._fill(pool)

    def _fill(self, pool: Executor) -> None:
        # No more than there are processes, so that a check need not queue behind compiles.
        while len(self._running) < self._recipe.jobs and self._begin_next(pool):
            pass

    def _begin_next(self, pool: Executor) -> bool:
        """Start the task that other tasks wait for, else the one nearest to completion; False if none can start now."""
        check = next((each for each in self._to_check if self._is_whole(each[0].stage)), None)
        compare = None if self._to_compile else next(filter(self._is_whole, self._to_compare), None)
        if self._to_write and not self._is_writing:
            self._is_writing = True
            file = self._to_write[0]
            self._step("weights", file.name, None)
            written = submit(pool, file.name, write_in_worker, file, self._recipe, self._folder)
            self._running[written] = self._take_file
        elif compare is not None:
            self._to_compare.remove(compare)
            of_stage = (self._recipe, compare, self._folder, self._paths[compare])
            compared = submit(pool, compare, measure_quantization_error, *of_stage)
            self._running[compared] = partial(self._take_quantization_error, compare)
        elif check is not None:
            self._to_check.remove(check)
            self._step("check", check[0].name, None)
            checked = submit(pool, check[0].name, check_graph, *check, self._replay)
            self._running[checked] = partial(self._take_check, check[0], time.perf_counter())
        elif self._to_compile:
            task, static_shapes = self._to_compile.popleft()
            label = self._label(task, static_shapes)
            self._step("engine", label, None)
            built = submit(pool, task.name, build_engine, task, static_shapes)
            self._running[built] = partial(self._take_engine, task, label)
        elif self._to_time and not self._running:
            task, record = self._to_time.pop(0)
            self._step("time", task.name, None)
            timed = submit(pool, task.name, time_graph, task, record, self._timer)
            self._running[timed] = partial(self._take_timings, task, record, time.perf_counter())
        else:
            return False
        return True

    def _is_whole(self, stage: str) -> bool:
        """Whether every rank's weights file of `stage` is written."""
        return all(file.stage != stage for file in self._to_write)

    def _take_file(self, future: Future[WrittenFile]) -> None:
        file = self._to_write[0]
        written = result_of(future, file.name)
        self._to_write.popleft()
        self._is_writing = False
        self._hold(written.peak_rss_bytes)
        self._step("weights", file.name, written.seconds)

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
            order = self._recipe.backends_of(task.stage)
            refused = {each.backend for each in self._refused[task.name]}
            records = [each.record for each in done if each.record.backend not in refused]
            records.sort(key=lambda each: (_size_order(each), order.index(each.backend)))
            self._to_check.append((task, tuple(records)))

    def _refuse(self, task: GraphTask, error: CompileError) -> None:
        """Continue without a backend that cannot compile a graph. Raises: CompileError when it was the last one."""
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

    def _take_check(self, task: GraphTask, started: float, future: Future[GraphResult]) -> None:
        seconds = time.perf_counter() - started
        result = result_of(future, task.name)
        self._hold(result.peak_rss_bytes)
        self._step("check", task.name, seconds)
        if not self._recipe.is_measured(task.stage):
            self.results.append(result)
            return
        self._refused[task.name] += result.refused
        self._checked[task.name] = result
        if len(result.record.backends) > 1:
            self._to_time.append((task, result.record))
        else:
            self._choose(task, result.record, "", ())

    def _take_timings(
        self,
        task: GraphTask,
        record: GraphRecord,
        started: float,
        future: Future[tuple[str, tuple[EngineTiming, ...]]],
    ) -> None:
        device, timings = result_of(future, task.name)
        self._step("time", task.name, time.perf_counter() - started)
        self._choose(task, record, device, timings)

    def _choose(
        self, task: GraphTask, record: GraphRecord, device: str, timings: tuple[EngineTiming, ...]
    ) -> None:
        """Keep the engines of a graph that its timings select, and remove the files of the others."""
        chosen = choose_fastest(
            record,
            timings,
            device=device,
            refused=self._refused[task.name],
            keep_all=self._recipe.keep_all,
        )
        kept = {each.file for each in chosen.engines}
        for built in self._engines[task.name]:
            if built.record.file not in kept:
                (self._folder / built.record.file).unlink(missing_ok=True)
        self.results.append(replace(self._checked[task.name], record=chosen))

    def _take_quantization_error(self, stage: str, future: Future[QuantizationError | None]) -> None:
        error = result_of(future, stage)
        if error is not None:
            self.quantization_error[stage] = error

    def _hold(self, peak_rss_bytes: int) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_bytes)


def _size_order(record: EngineRecord) -> tuple[int, ...]:
    return tuple((record.dims or {}).values())
