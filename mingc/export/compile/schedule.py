"""Schedule of an export's worker processes: engines, weights files and checks, with their dependencies."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from mingc.artifacts.manifest import EngineRecord, QuantizationError, TunedKernel
from mingc.export.compile.build import (
    BuiltEngine,
    GraphResult,
    GraphTask,
    Replay,
    build_engine,
    check_graph,
    engine_label,
    measure_quantization_error,
)
from mingc.export.process_pool import result_of, submit, worker_pool
from mingc.export.recipe import ExportRecipe
from mingc.export.weights.files import WeightsFile, WrittenFile, write_in_worker

Sizes = Mapping[str, Mapping[str, list[dict[str, int] | None]]]  # of a graph's engines, by stage and graph


class Schedule:
    """Builds the graphs of an export in `jobs` processes.

    Engines need the first rank's weights file of their stage, which is there before. Files of other ranks are written
    meanwhile, one after the other: several at once would hold the weights of several. What reads every rank's file,
    checks and comparisons, begins when those of its stage are whole.

    Attributes:
        results: of every graph, once it ran.
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
    ) -> None:
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
            )
            for stage, graphs in sizes.items()
            for graph in graphs
        ]
        self._to_compile = deque(
            (task, static_shapes)
            # Longest compiles first, so that no job is left with one at the end.
            for task in sorted(tasks, key=lambda each: -compile_costs.get(each.name, 0))
            for static_shapes in sizes[task.stage][task.graph]
        )
        self._to_write = deque(file for each in files.values() for file in each[1:])  # until it is whole
        self._to_check: list[tuple[GraphTask, tuple[EngineRecord, ...]]] = []
        self._to_compare = [
            stage for stage in sizes if recipe.quantization(stage) is not None and not recipe.synthetic
        ]
        self._is_writing = False
        self._engines: dict[str, list[BuiltEngine]] = {}
        # What is done with a future's result, in the order in which they were submitted.
        self._running: dict[Future[Any], Callable[[Future[Any]], None]] = {}
        self.results: list[GraphResult] = []
        self.quantization_error: dict[str, QuantizationError] = {}
        self.peak_rss_bytes = 0

    def run(self) -> None:
        """Raises: whatever a process raised, as soon as it did; the others are ended in the middle of their work."""
        with worker_pool(self._recipe.jobs) as pool:
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
        """Start the task that others wait for, else the one nearest to completion; False if none can start now."""
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
            self._step("engine", engine_label(task.name, static_shapes), None)
            built = submit(pool, task.name, build_engine, task, static_shapes)
            self._running[built] = partial(self._take_engine, task)
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

    def _take_engine(self, task: GraphTask, future: Future[BuiltEngine]) -> None:
        built = result_of(future, task.name)
        self._hold(built.peak_rss_bytes)
        self._step("engine", Path(built.record.file).stem, built.record.compile_seconds)
        done = self._engines.setdefault(task.name, [])
        done.append(built)
        if len(done) == len(self._sizes[task.stage][task.graph]):
            self._to_check.append((task, tuple(each.record for each in sorted(done, key=_size_order))))

    def _take_check(self, task: GraphTask, started: float, future: Future[GraphResult]) -> None:
        seconds = time.perf_counter() - started
        result = result_of(future, task.name)
        self._hold(result.peak_rss_bytes)
        self._step("check", task.name, seconds)
        self.results.append(result)

    def _take_quantization_error(self, stage: str, future: Future[QuantizationError | None]) -> None:
        error = result_of(future, stage)
        if error is not None:
            self.quantization_error[stage] = error

    def _hold(self, peak_rss_bytes: int) -> None:
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_bytes)


def _size_order(built: BuiltEngine) -> tuple[int, ...]:
    return tuple((built.record.dims or {}).values())
