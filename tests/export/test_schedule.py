"""Schedule of an export: order of weights files, compiles, checks and comparisons, and their preconditions."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import pytest
import torch
from export_plans import plan_of
from worker_threads import WorkerThreads, worker_threads

from mingc.artifacts.manifest import EngineRecord, GraphRecord, Parity, QuantizationError
from mingc.artifacts.spec import GraphSpec
from mingc.errors import CheckpointError, CompileError
from mingc.export import run as export_run
from mingc.export import schedule
from mingc.export.plan import plan_export
from mingc.export.recipe import ExportRecipe
from mingc.export.tasks.check_graph import GraphResult
from mingc.export.tasks.compile_engine import BuiltEngine
from mingc.export.tasks.graph_task import GraphTask
from mingc.export.tasks.memory_needs import Need
from mingc.export.tasks.rank_weights import RankWeights, WrittenWeights
from mingc.verify.engine_run import run_engine

_T = TypeVar("_T")
_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_STAGES = ("vision_encoder", "audio_encoder", "cfm", "audio_vae")
_RANKS = 4
_WAIT_S = 20
_LOST = QuantizationError(tokens=1, layer_cosine=(1.0,), logit_kl=0.0, same_argmax=1.0)


def _build(task: GraphTask, static_shapes: dict[str, int] | None) -> BuiltEngine:
    """Build an engine in no time; requires the first rank's weights."""
    assert (task.folder / task.weights[0]).exists()
    record = EngineRecord(
        backend="aoti", file=f"engines/{task.name}.pt2", dims=static_shapes, compile_seconds=1.0, cost=None
    )
    return BuiltEngine(record=record, peak_rss_bytes=1)


def _check(task: GraphTask, engines: tuple[EngineRecord, ...], *_: object) -> GraphResult:
    """Check a graph in no time; requires the weights of all ranks."""
    assert all((task.folder / path).exists() for path in task.weights)
    record = GraphRecord(
        spec=GraphSpec(name=task.graph, inputs=(), outputs=()),
        engines=engines,
        golden="",
        parity=Parity(compiled=0.0, eager=0.0),
    )
    return GraphResult(stage=task.stage, record=record, peak_rss_bytes=2)


def _compare(
    recipe: ExportRecipe, stage: str, folder: Path, weights: tuple[str, ...]
) -> QuantizationError | None:
    assert all((folder / path).exists() for path in weights)
    return _LOST if stage == "thinker" else None


class _Disk:
    """Writes weights and fails if two ranks are written at once. `before` is called before each is complete."""

    def __init__(self, before: Callable[[RankWeights], None] = lambda _: None) -> None:
        self._before = before
        self._one = threading.Lock()

    def write(self, rank: RankWeights, _: ExportRecipe, folder: Path) -> WrittenWeights:
        assert self._one.acquire(blocking=False), "two ranks are written at once"
        self._before(rank)
        (folder / rank.path).touch()
        self._one.release()
        return WrittenWeights(seconds=1.0, peak_rss_bytes=3)


class _Export:
    """A thinker of four ranks with two graphs, and a sampler of one, which is compiled first."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        disk: _Disk,
        jobs: int,
        *,
        sample_sizes: Sequence[dict[str, int] | None] = (None,),
        synthetic: bool = False,
    ) -> None:
        self.begun: list[tuple[str, str]] = []
        self.steps: list[tuple[str, str]] = []  # that ended
        recipe = ExportRecipe(
            checkpoint=_TINY,
            output=folder / "out",
            world_size=_RANKS,
            jobs=jobs,
            quantize=("fp8",),
            synthetic=synthetic,
        )
        sizes = {"thinker.embed": [None], "thinker.head": [None], "cfm.sample": sample_sizes}
        plan = plan_of(recipe, sizes, first="cfm.sample")
        (folder / "weights").mkdir()
        for name, stand_in in {
            "worker_pool": worker_threads,
            "build_engine": _build,
            "check_graph": _check,
            "measure_quantization_error": _compare,
            "write_rank": disk.write,
        }.items():
            monkeypatch.setattr(schedule, name, stand_in)
        self.schedule = schedule.Schedule(plan, folder, run_engine, self._record, {})

    def _record(self, kind: str, name: str, seconds: float | None) -> None:
        (self.begun if seconds is None else self.steps).append((kind, name))


class _BrokenPool(ThreadPoolExecutor):
    """A pool with a process that died while idle."""

    def submit(self, *_: object) -> NoReturn:
        raise BrokenProcessPool("A child process terminated abruptly")


def _files(num_ranks: int) -> list[tuple[str, str]]:
    """Steps of the sampler's weights and those of the thinker's first ranks, in order."""
    return [("weights", "cfm"), *(("weights", f"thinker.rank{rank}") for rank in range(num_ranks))]


def test_a_process_that_dies_between_two_tasks_is_reported_and_not_as_a_bug(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export = _Export(tmp_path, monkeypatch, _Disk(), jobs=1)
    monkeypatch.setattr(schedule, "worker_pool", _BrokenPool)
    monkeypatch.setattr(schedule, "start_processes", lambda *_: None)
    with pytest.raises(CompileError, match=r"died \(out of memory\?\)") as caught:
        export.schedule.run()
    assert caught.value.where == "cfm"


def test_engines_compile_during_writes_and_checks_wait_for_all_files_of_their_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_compiled = {name: threading.Event() for name in ("cfm.sample", "thinker.head")}
    before = {"thinker.rank0": "cfm.sample", "thinker.rank1": "thinker.head"}

    def wait_for_engines(rank: RankWeights) -> None:
        if rank.name in before:
            assert is_compiled[before[rank.name]].wait(_WAIT_S), f"no engine compiles beside {rank.name}"

    def compile_(task: GraphTask, static_shapes: dict[str, int] | None) -> BuiltEngine:
        built = _build(task, static_shapes)
        if task.name in is_compiled:
            is_compiled[task.name].set()
        return built

    export = _Export(tmp_path, monkeypatch, _Disk(wait_for_engines), jobs=2)
    monkeypatch.setattr(schedule, "build_engine", compile_)
    export.schedule.run()
    assert sorted(export.begun) == sorted(export.steps), "each step is reported when it begins, too"
    assert export.begun[:3] == [("weights", "cfm"), ("weights", "thinker.rank0"), ("engine", "cfm.sample")]
    compiled = [step for step in export.steps if step[0] != "weights"]
    assert compiled[:3] == [
        ("engine", "cfm.sample"),
        ("check", "cfm.sample"),  # one rank: its weights are complete
        ("engine", "thinker.embed"),
    ]
    assert sorted(export.steps[-2:]) == [("check", "thinker.embed"), ("check", "thinker.head")]
    assert [step for step in export.steps if step[0] == "weights"] == _files(4)
    assert len(export.schedule.results) == 3
    assert export.schedule.quantization_error == {"thinker": _LOST}
    assert export.schedule.peak_rss_bytes == 3


def test_one_job_writes_the_files_and_then_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = _Export(tmp_path, monkeypatch, _Disk(), jobs=1)
    export.schedule.run()
    graphs = [("cfm", "sample"), ("thinker", "embed"), ("thinker", "head")]
    assert export.steps == _files(4) + [
        (kind, f"{stage}.{graph}") for stage, graph in graphs for kind in ("engine", "check")
    ]


def test_a_graph_is_checked_once_with_all_its_engines_by_size(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[list[dict[str, int] | None]] = []

    def check(task: GraphTask, engines: tuple[EngineRecord, ...], *given: object) -> GraphResult:
        checked.append([engine.dims for engine in engines])
        return _check(task, engines, *given)

    sizes: list[dict[str, int] | None] = [{"B": 8}, {"B": 1}, {"B": 4}]
    export = _Export(tmp_path, monkeypatch, _Disk(), jobs=1, sample_sizes=sizes)
    monkeypatch.setattr(schedule, "check_graph", check)
    export.schedule.run()
    assert [{"B": 1}, {"B": 4}, {"B": 8}] in checked
    assert len(checked) == len(export.schedule.results) == 3


def test_quantization_is_compared_after_the_last_compile_has_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []

    def build(task: GraphTask, fixed: dict[str, int] | None) -> BuiltEngine:
        begun.append(task.name)
        return _build(task, fixed)

    def compare(*given: object) -> QuantizationError | None:
        begun.append("compare")
        return _LOST

    export = _Export(tmp_path, monkeypatch, _Disk(), jobs=1)
    monkeypatch.setattr(schedule, "build_engine", build)
    monkeypatch.setattr(schedule, "measure_quantization_error", compare)
    export.schedule.run()
    assert "compare" in begun
    assert begun.index("compare") > max(begun.index(name) for name in begun if name != "compare")


def test_random_weights_are_not_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    export = _Export(tmp_path, monkeypatch, _Disk(), jobs=1, synthetic=True)
    export.schedule.run()
    assert not export.schedule.quantization_error


@pytest.mark.parametrize("jobs", [1, 2, 8])
def test_a_file_that_fails_ends_the_export_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int
) -> None:
    def fail(rank: RankWeights) -> None:
        if rank.shard.rank == 2:
            raise CheckpointError("tensor x is missing", where="main")

    export = _Export(tmp_path, monkeypatch, _Disk(fail), jobs=jobs)
    with pytest.raises(CheckpointError, match="tensor x is missing"):
        export.schedule.run()
    assert [step for step in export.steps if step[0] == "weights"] == _files(2)
    assert not [step for step in export.steps if step[0] == "check" and step[1] != "cfm.sample"]
    assert not (tmp_path / "weights" / "thinker.rank3").exists()


def _run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str | None) -> list[export_run.Step]:
    """Steps that end while four stages are built with one job and instant compiles; the check of `bad` fails."""
    steps: list[export_run.Step] = []

    def check(task: GraphTask, engines: tuple[EngineRecord, ...], *given: object) -> GraphResult:
        if task.name == bad:
            raise CompileError(task.name)
        return _check(task, engines, *given)

    monkeypatch.setattr(schedule, "worker_pool", worker_threads)
    monkeypatch.setattr(schedule, "build_engine", _build)
    monkeypatch.setattr(schedule, "check_graph", check)
    plan = plan_export(ExportRecipe(checkpoint=_TINY, output=tmp_path / "out", stages=_STAGES))
    step = export_run.step_counter(plan, steps.append)
    (tmp_path / "weights").mkdir()
    try:
        schedule.Schedule(plan, tmp_path, run_engine, step, {}).run()
    except CompileError:
        assert bad is not None
    return [step for step in steps if step.seconds is not None]


def test_every_engine_is_reported_when_compiled_and_checked_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = _run(tmp_path, monkeypatch, None)
    files, graphs = steps[: len(_STAGES)], steps[len(_STAGES) :]
    stages = dict.fromkeys(step.subject.partition(".")[0] for step in graphs)
    assert {*stages} == {*_STAGES}
    assert [(step.name, step.subject) for step in files] == [("weights", name) for name in stages]
    assert [step.name for step in graphs] == ["engine", "check"] * (len(graphs) // 2)
    assert [step.subject for step in graphs[::2]] == [step.subject for step in graphs[1::2]]
    assert graphs[0].subject == "cfm.sample"
    assert (steps[-1].done, steps[-1].total) == (
        len(steps),
        len(steps) + 2,
    )  # served goldens and the manifest are left


def test_a_failed_check_ends_the_export_before_the_next_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = _run(tmp_path, monkeypatch, "cfm.sample")[-1]
    assert (step.name, step.subject) == ("engine", "cfm.sample")


class _Memory:
    """Tasks that run until told to end, and what they hold; `free` limits it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: Need | None, jobs: int, per_gpu: int) -> None:
        self.held: list[tuple[str, str]] = []
        self.most: list[tuple[tuple[str, str], ...]] = []
        self._lock = threading.Lock()
        limits = schedule.MemoryLimits(jobs=jobs, tasks_per_gpu=per_gpu, free=free)
        monkeypatch.setattr(schedule, "memory_limits", lambda *_: limits)
        monkeypatch.setattr(schedule, "worker_pool", worker_threads)
        monkeypatch.setattr(schedule, "build_engine", self._build)
        monkeypatch.setattr(schedule, "write_rank", _Disk().write)
        monkeypatch.setattr(
            schedule, "check_graph", lambda task, *given: self._hold("check", task, _check(task, *given))
        )
        self.fails: dict[str, int] = {}  # how often a graph's engine ends without memory

    def _build(self, task: GraphTask, sizes: dict[str, int] | None) -> BuiltEngine:
        if self.fails.get(task.name, 0):
            self.fails[task.name] -= 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")
        return self._hold("engine", task, BuiltEngine(record=_build_record(task, sizes), peak_rss_bytes=1))

    def _hold(self, kind: str, task: GraphTask, result: _T) -> _T:
        with self._lock:
            self.held.append((kind, task.name))
            self.most.append(tuple(self.held))
        time.sleep(0.002)  # lets others start, if they may
        with self._lock:
            self.held.remove((kind, task.name))
        return result


def _build_record(task: GraphTask, sizes: dict[str, int] | None) -> EngineRecord:
    file = f"engines/{task.name}.{'' if sizes is None else sizes['B']}"
    return EngineRecord(backend="aoti", file=file, dims=sizes, compile_seconds=1.0, cost=None)


_SIZES: dict[str, list[dict[str, int] | None]] = {
    "cfm.sample": [{"B": 2**size} for size in range(8)],
    "talker.step": [{"B": 2**size} for size in range(8)],
    "audio_vae.decode": [None],
}
_NEEDS = {
    ("engine", "cfm.sample"): Need(device=40, host=3),
    ("engine", "talker.step"): Need(device=10, host=1),
    ("check", "audio_vae.decode"): Need(device=90),
}


def _run_within(tmp_path: Path, memory: _Memory, **options: Any) -> list[tuple[str, str]]:
    recipe = ExportRecipe(checkpoint=_TINY, output=tmp_path / "out", jobs=99, **options)
    steps: list[tuple[str, str]] = []
    (tmp_path / "weights").mkdir()
    plan = plan_of(recipe, _SIZES, needs=_NEEDS)
    schedule.Schedule(plan, tmp_path, run_engine, lambda *step: steps.append(step[:2]), {}).run()
    return steps


@pytest.mark.parametrize("jobs", [1, 4, 10, 16])
@pytest.mark.parametrize(
    "free", [Need(device=100, host=100), Need(device=100, host=5), Need(device=5, host=1)]
)
def test_tasks_run_together_while_their_memory_fits(
    jobs: int, free: Need, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _Memory(monkeypatch, free, jobs, per_gpu=jobs)
    steps = _run_within(tmp_path, memory)
    assert len([step for step in steps if step[0] == "engine"]) == 2 * 17
    for held in memory.most:
        needs = [_NEEDS.get(each, Need()) for each in held]
        fits = (
            sum(each.device for each in needs) <= free.device
            and sum(each.host for each in needs) <= free.host
        )
        assert len(held) == 1 or (fits and len(held) <= jobs), held
    if jobs > 1 and free.device == 100:
        assert max(map(len, memory.most)) > 1


def test_only_tasks_that_need_a_process_get_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone: list[str] = []

    class _Pool(WorkerThreads):
        def submit_alone(self, where: str, work: Callable[..., _T], *arguments: object) -> Future[_T]:
            alone.append(where)
            return super().submit_alone(where, work, *arguments)

    memory = _Memory(monkeypatch, None, 2, per_gpu=2)
    monkeypatch.setattr(schedule, "worker_pool", lambda jobs, _: _Pool(jobs))
    monkeypatch.setitem(_NEEDS, ("engine", "cfm.sample"), Need(has_process=True))
    _run_within(tmp_path, memory)
    assert alone == ["cfm.sample"] * len(_SIZES["cfm.sample"])


def test_the_largest_tasks_may_meet_on_one_of_several_gpus() -> None:
    limits = schedule.MemoryLimits(jobs=6, tasks_per_gpu=2, free=Need(device=100, host=100))
    small, large = Need(device=20), Need(device=60)
    assert limits.fit([large, *[small] * 5]) and not limits.fit([large, large])


def test_a_task_without_memory_runs_again_alone_and_then_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _Memory(monkeypatch, None, 4, per_gpu=4)
    memory.fails = {"cfm.sample": 1, "talker.step": 1}
    pools: list[tuple[str, int]] = []

    @contextmanager
    def pool(jobs: int, gpus: Sequence[str]) -> Iterator[WorkerThreads]:
        pools.append(("begins", jobs))
        with worker_threads(jobs, gpus) as threads:
            yield threads
        pools.append(("ended", jobs))

    monkeypatch.setattr(schedule, "worker_pool", pool)
    steps = _run_within(tmp_path, memory)
    assert ("begins", 1) in pools
    for before, (state, _) in zip(["ended", *(each for each, _ in pools)], pools, strict=False):
        assert state != before, "a process that waits holds memory of the device"
    again = [index for index, (kind, _) in enumerate(steps) if kind == schedule.AGAIN]
    assert len(again) == 2 * 2, "each begins and ends"
    for begun, ended in zip(again[::2], again[1::2], strict=True):
        assert steps[begun] == steps[ended] and ended == begun + 1, "nothing begins before it has ended"
    assert len([each for each in steps if each[0] == "engine"]) == 2 * 17


def test_a_task_that_lacks_memory_when_it_is_alone_ends_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = _Memory(monkeypatch, None, 4, per_gpu=4)
    memory.fails = {"cfm.sample": 99}
    with pytest.raises(CompileError, match="does not have enough memory") as caught:
        _run_within(tmp_path, memory)
    assert "--jobs" not in str(caught.value.fix)


@pytest.mark.parametrize("jobs", [1, 4, 10_000])
def test_every_number_of_jobs_leaves_memory_for_tasks(jobs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule.torch.cuda, "mem_get_info", lambda: (20 << 30, 80 << 30))
    monkeypatch.setattr(schedule, "free_memory_bytes", lambda: 30 << 30)
    limits = schedule.memory_limits(jobs, 1)
    assert limits.free is not None and limits.free.device >= 10 << 30 and limits.free.host >= 15 << 30
    assert 1 <= limits.jobs <= jobs
