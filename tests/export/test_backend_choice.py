"""Several backends of one graph: which are tried, which are refused, and which engines stay."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from export_plans import plan_of
from stage_checks import graph_of
from torch import nn
from worker_threads import WorkerThreads, worker_threads

from mingc.artifacts.manifest import BackendRefusal, EngineRecord, EngineTiming, GraphRecord, Parity
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.errors import (
    ArtifactError,
    CaptureError,
    CompileError,
    ConfigError,
    MingcError,
    ParityError,
    WorkerError,
)
from mingc.export import run as export_run
from mingc.export import schedule
from mingc.export.compile import backends
from mingc.export.compile.backend import Backend
from mingc.export.recipe import ExportRecipe, stage_options
from mingc.export.source import open_source
from mingc.export.stage import GraphDef
from mingc.export.tasks import compile_engine
from mingc.export.tasks import timing as timing_task
from mingc.export.tasks.check_graph import GraphResult
from mingc.export.tasks.compile_engine import BuiltEngine
from mingc.export.tasks.early_refusals import early_refusals
from mingc.export.tasks.graph_task import GraphTask, engine_label
from mingc.export.tasks.rank_weights import WrittenWeights
from mingc.export.tasks.timing import choose_fastest, time_graph
from mingc.plugins import ExtensionPoint
from mingc.probe import engine_trial

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
SPEC = GraphSpec(
    name="g",
    inputs=(TensorSpec(name="x", dtype="float32", shape=("B", 4)),),
    outputs=(TensorSpec(name="y", dtype="float32", shape=("B", 4)),),
    dims=(Dim(name="B", minimum=1, maximum=8, buckets=(1, 2)),),
)


def engine(backend: str, dims: dict[str, int] | None = None) -> EngineRecord:
    size = "" if dims is None else "-".join(map(str, dims.values()))
    return EngineRecord(backend=backend, file=f"engines/{backend}{size}", dims=dims, compile_seconds=1.0)


def timing(backend: str, batch: int, us: float) -> EngineTiming:
    return EngineTiming(backend=backend, dims={"B": batch, "T": 7}, median_us=us, calls=5)


def record(*engines: EngineRecord, parity: float = 0.0) -> GraphRecord:
    return GraphRecord(spec=SPEC, engines=engines, golden="g", parity=Parity(compiled=parity, eager=0.0))


def test_the_fastest_over_all_sizes_is_kept_with_its_parity_and_all_times() -> None:
    both = [record(engine("a"), parity=1e-6), record(engine("b"), parity=2e-6)]
    # Arithmetic means would say a: 60 against 82; a is 4 times as slow at one size, b 1.6 times at the other.
    timings = [timing("a", 1, 20), timing("b", 1, 5), timing("a", 2, 100), timing("b", 2, 160)]
    refused = [BackendRefusal(backend="c", reason="no")]
    found = choose_fastest(both, timings, device="CPU", refused=refused)
    assert [each.backend for each in found.engines] == ["b"]
    assert found.parity.compiled == 2e-6
    assert found.trial is not None and found.trial.timings == tuple(timings)
    assert (found.trial.device, found.trial.refused) == ("CPU", tuple(refused))
    assert (found.spec, found.golden) == (SPEC, "g")


def test_of_equally_fast_engines_the_first_stays() -> None:
    both = [record(engine("a")), record(engine("b"))]
    found = choose_fastest(both, [timing("b", 1, 5), timing("a", 1, 5)], device="CPU")
    assert [each.backend for each in found.engines] == ["a"]


def test_each_size_of_static_engines_is_chosen_by_its_own_times() -> None:
    one, two = {"B": 1}, {"B": 2}
    given = [
        record(engine("a", one), engine("a", two), parity=3e-6),
        record(engine("b", one), engine("b", two), parity=1e-6),
    ]
    timings = [timing("a", 1, 9), timing("b", 1, 5), timing("a", 2, 5), timing("b", 2, 500)]
    found = choose_fastest(given, timings, device="CPU")
    assert [(each.backend, each.dims) for each in found.engines] == [("b", one), ("a", two)]
    assert found.parity.compiled == 3e-6, "the worst of those that are run"


def test_a_graph_of_one_backend_needs_no_times() -> None:
    found = choose_fastest([record(engine("a"))], (), device="")
    assert [each.backend for each in found.engines] == ["a"]
    assert found.trial is not None and not found.trial.timings


class Fake(Backend):
    """A backend called `name`; `reason` says why it cannot build for the target."""

    suffix = ".bin"

    def __init__(self, name: str, reason: str | None = None, suffix: str = ".bin") -> None:
        self.name, self.reason, self.suffix = name, reason, suffix

    def unsupported_reason(self, target: str, dtype: str) -> str | None:
        return self.reason

    def compile(self, program: Any, path: Path, *, device: str, cache: Path | None, where: str) -> float:
        raise AssertionError("nothing is compiled here")


class Picky(Fake):
    """Refuses every graph that it traces."""

    def check_graph(
        self, plan: GraphDef, module: nn.Module, program: Callable[[], Any], *, where: str
    ) -> None:
        assert all(each.is_meta for each in module.parameters())
        traced = program()
        assert all(each.is_meta for each in traced.state_dict.values())
        raise CompileError("too large", where=where, fix="take another")


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes these backends the only ones."""

    def set_backends(*found: Backend) -> None:
        by_name = {each.name: each for each in found}

        class Installed(ExtensionPoint):
            def names(self) -> list[str]:
                return sorted(by_name)

            def load(self, name: str) -> Any:
                return by_name[name]

        point = Installed(noun="backend", package="", attribute="", group="mingc.backends")
        monkeypatch.setattr(backends, "BACKENDS", point)

    return set_backends


def recipe(*words: str, **changes: Any) -> ExportRecipe:
    return ExportRecipe(checkpoint=TINY, output=Path("out"), backend=words, **changes)


def test_auto_tries_what_can_build_for_the_target_the_default_one_first(install: Callable[..., None]) -> None:
    install(Fake("aoti"), Fake("a"), Fake("rt", "no GPU"))
    found = recipe("a", "auto:cfm")
    assert found.backends_of("cfm") == ("aoti", "a") and found.is_measured("cfm")
    assert found.backends_of("talker") == ("a",) and not found.is_measured("talker")
    assert found.unsupported() == {"rt": "no GPU"}
    assert recipe("auto").is_measured("talker")
    assert recipe("aoti:cfm", "a").backends_of("cfm") == ("aoti",)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("a+aoti",), "--backend a\\+aoti: not one of auto, a, aoti, rt"),
        (("",), "--backend is empty: not one of auto, a, aoti, rt"),
        (("a", "none:cfm"), "--backend none: not one of auto, a, aoti, rt"),
        (("a", "rt:cfm"), "--backend rt: no GPU"),
        (("auto", "a"), "names a backend for all stages twice"),
    ],
)
def test_words_that_name_no_backends_are_refused(
    words: tuple[str, ...], says: str, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("a"), Fake("rt", "no GPU"))
    with pytest.raises(ConfigError, match=says):
        recipe(*words)


def test_auto_needs_a_backend(install: Callable[..., None]) -> None:
    install(Fake("aoti", "no compiler"), Fake("rt", "no GPU"))
    with pytest.raises(ConfigError, match="no backend can be used: aoti: no compiler; rt: no GPU"):
        recipe("auto")


def test_engines_of_backends_with_one_suffix_have_separate_files(install: Callable[..., None]) -> None:
    install(Fake("aoti"), Fake("a"), Fake("c", suffix=".c"))
    task = GraphTask(recipe=recipe("auto"), stage="cfm", graph="g", folder=Path("f"), weights=(), backend="a")
    names = [compile_engine._suffix(task, backends.find_backend(name)) for name in ("aoti", "a", "c")]
    assert names == [".aoti.bin", ".a.bin", ".c"]


def early(words: Sequence[str]) -> dict[str, dict[str, str]]:
    from mingc.export.stages import find

    found = recipe(*words)
    stage: Any = find("cfm")
    config = stage.config(open_source(found))
    options = stage_options(found)
    return early_refusals(found, stage, config, [graph_of(stage, config, "aggregate", options)])


def test_a_backend_refuses_a_graph_before_anything_is_built(install: Callable[..., None]) -> None:
    install(Fake("aoti"), Picky("picky"), Fake("rt", "no GPU"))
    assert early(["aoti"]) == {"cfm.aggregate": {}}
    with pytest.raises(CompileError, match="too large") as refused:
        early(["picky"])
    assert (refused.value.where, refused.value.fix) == ("cfm.aggregate", "take another")
    assert early(["auto"]) == {"cfm.aggregate": {"rt": "no GPU", "picky": "too large"}}
    install(Picky("aoti"), Picky("picky"))
    with pytest.raises(CompileError, match="too large"):
        early(["auto"])


class Trial:
    """An export of one stage with two graphs and backends that compile, check and time as given."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, found: ExportRecipe, jobs: int = 1
    ) -> None:
        self.events: list[tuple[str, ...]] = []
        self.fails: dict[tuple[str, str], Exception] = {}
        self.inaccurate: set[str] = set()
        self.untimed: dict[tuple[str, str], Exception] = {}
        self.goldens: list[tuple[str, str]] = []
        self.us: Mapping[str, float] = {}
        self.running = 0
        self.steps: list[tuple[str, str, float | None]] = []
        found = replace(found, jobs=jobs, output=folder / "out")
        for name in ("weights", "engines"):
            (folder / name).mkdir()
        self.folder = folder
        for name, stand_in in {
            "worker_pool": worker_threads,
            "write_rank": lambda *_: WrittenWeights(seconds=0.0, peak_rss_bytes=1),
            "build_engine": self.build,
            "check_graph": self.check,
            "time_graph": self.time,
        }.items():
            monkeypatch.setattr(schedule, name, stand_in)
        self.recipe = found

    def run(
        self,
        sizes: Sequence[dict[str, int] | None] = (None,),
        refused: Mapping[str, Mapping[str, str]] | None = None,
    ) -> dict[str, GraphRecord]:
        planned = schedule.Schedule(
            plan_of(self.recipe, {"cfm.g": sizes, "cfm.h": sizes}, refused=refused),
            self.folder,
            None,  # type: ignore[arg-type]  # no engine is run
            lambda *step: self.steps.append(step),
            {},
            lambda *_: ("CPU", []),
        )
        planned.run()
        return {each.record.spec.name: each.record for each in planned.results}

    def build(self, task: GraphTask, dims: dict[str, int] | None) -> BuiltEngine:
        self.events.append(("build", task.name, task.backend))
        file = f"engines/{engine_label(task.name, dims)}.{task.backend}"
        (self.folder / file).touch()  # a part of it, if it fails
        if (error := self.fails.get((task.name, task.backend))) is not None:
            raise error
        made = replace(engine(task.backend, dims), file=file)
        return BuiltEngine(record=made, peak_rss_bytes=1)

    def check(
        self, task: GraphTask, engines: tuple[EngineRecord, ...], _: object, writes_golden: bool
    ) -> GraphResult:
        self.events.append(("check", task.name, task.backend))
        assert {each.backend for each in engines} == {task.backend}
        if writes_golden:
            self.goldens.append((task.name, task.backend))
        if task.backend in self.inaccurate:
            raise ParityError("too far", where=task.name)
        return GraphResult(
            stage=task.stage,
            record=GraphRecord(
                spec=replace(SPEC, name=task.graph),
                engines=engines,
                golden=f"goldens/{task.name}",
                parity=Parity(compiled=self.us.get(task.backend, 0.0) / 1e6, eager=0.0),
            ),
            peak_rss_bytes=1,
        )

    def time(
        self, task: GraphTask, given: Sequence[GraphRecord], timer: Any
    ) -> tuple[str, tuple[EngineTiming, ...]]:
        backends = [record.engines[0].backend for record in given]
        self.events.append(("time", task.name, *backends))
        for backend in backends:
            if (error := self.untimed.get((task.name, backend))) is not None:
                raise error
        batches = sorted({each.dims["B"] for each in given[0].engines if each.dims is not None}) or [1, 2]
        return "CPU", tuple(timing(name, b, self.us[name]) for name in backends for b in batches)

    def left(self) -> set[str]:
        return {path.name.removeprefix("cfm.") for path in (self.folder / "engines").iterdir()}


def test_the_faster_engine_stays_and_the_file_of_the_other_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.us = {"aoti": 9.0, "b": 3.0}
    found = trial.run()
    assert {name: each.backends for name, each in found.items()} == {"g": ("b",), "h": ("b",)}
    assert trial.left() == {"g.b", "h.b"}
    assert [each for each in trial.events if each[0] == "time"] == trial.events[-2:], "after all other work"
    assert trial.events[0] == ("build", "cfm.g", "aoti"), "aoti is the default of equals"
    begun = [step[:2] for step in trial.steps if step[2] is None]
    ended = [step[:2] for step in trial.steps if step[2] is not None]
    assert begun == ended and ("engine", "cfm.g (b)") in begun and ("time", "cfm.h") in begun


def test_one_graph_is_timed_at_a_time_however_many_jobs_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"), jobs=4)
    trial.us = {"aoti": 9.0, "b": 3.0}
    other_began, most = threading.Event(), []

    def time_alone(
        task: GraphTask, given: Sequence[GraphRecord], timer: Any
    ) -> tuple[str, tuple[EngineTiming, ...]]:
        trial.running += 1
        most.append(trial.running)
        if trial.running > 1:
            other_began.set()
        other_began.wait(0.3)  # time for another one to begin, if it may
        trial.running -= 1
        return trial.time(task, given, timer)

    monkeypatch.setattr(schedule, "time_graph", time_alone)
    trial.run()
    assert most == [1, 1]


def test_a_backend_that_may_crash_has_processes_of_its_own_and_its_copies_of_state_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    fragile = Fake("b")
    fragile.may_crash = fragile.copies_state = True
    install(Fake("aoti"), fragile)
    alone: list[str] = []
    real = WorkerThreads.submit_alone
    monkeypatch.setattr(
        WorkerThreads,
        "submit_alone",
        lambda self, where, *work: (alone.append(where), real(self, where, *work))[1],
    )
    (tmp_path / "b").mkdir()
    (tmp_path / "aoti").mkdir()
    for name, tasks in (("b", ["cfm.g", "cfm.h"] * 2), ("aoti", [])):
        alone.clear()
        found = Trial(tmp_path / name, monkeypatch, recipe(name)).run()
        assert sorted(alone) == sorted(tasks), "compiled and checked"
        state = (TensorSpec(name="k", dtype="float32", shape=(2,)),)
        kept = replace(found["g"], spec=replace(found["g"].spec, state=state))
        results = [GraphResult(stage="cfm", record=each, peak_rss_bytes=0) for each in (kept, found["h"])]
        notes = ["engines of cfm.g copy their state in every call"] if name == "b" else []
        assert export_run.state_notes(results) == notes


def test_a_backend_that_cannot_compile_gives_way_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.us = {"aoti": 9.0, "b": 3.0}
    trial.fails = {("cfm.g", "b"): CompileError("no such operator", where="cfm.g")}
    found = trial.run([{"B": 1}, {"B": 2}])
    assert found["g"].backends == ("aoti",) and found["h"].backends == ("b",)
    assert found["g"].trial is not None
    assert found["g"].trial.refused == (BackendRefusal(backend="b", reason="no such operator"),)
    assert ("time", "cfm.g") not in [each[:2] for each in trial.events]
    assert found["h"].trial is not None and not found["h"].trial.refused
    results = [GraphResult(stage="cfm", record=each, peak_rss_bytes=0) for each in found.values()]
    assert export_run.refusal_notes(results) == ["b was not used for cfm.g: no such operator"]
    assert trial.left() == {"g-B1.aoti", "g-B2.aoti", "h-B1.b", "h-B2.b"}, (
        "nothing that a failed compiler wrote"
    )


def test_engines_of_a_backend_that_fails_at_a_later_size_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    first = trial.build

    def build_first(task: GraphTask, dims: dict[str, int] | None) -> BuiltEngine:
        if task.backend == "b" and dims == {"B": 2}:
            raise CompileError("out of registers", where=task.name)
        return first(task, dims)

    monkeypatch.setattr(schedule, "build_engine", build_first)
    found = trial.run([{"B": 1}, {"B": 2}])["g"]
    assert [(each.backend, each.dims) for each in found.engines] == [("aoti", {"B": 1}), ("aoti", {"B": 2})]
    assert trial.left() == {"g-B1.aoti", "g-B2.aoti", "h-B1.aoti", "h-B2.aoti"}


def test_a_refused_backend_compiles_no_further_size_of_the_graph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.us = {"aoti": 9.0, "b": 3.0}
    trial.fails = {("cfm.g", "b"): CompileError("no such operator", where="cfm.g")}
    found = trial.run([{"B": 1}, {"B": 2}, {"B": 4}])
    built = [each[1:] for each in trial.events if each[0] == "build"]
    assert built.count(("cfm.g", "b")) == 1
    assert built.count(("cfm.g", "aoti")) == built.count(("cfm.h", "b")) == 3, "nothing else is skipped"
    assert [each.dims for each in found["g"].engines] == [{"B": 1}, {"B": 2}, {"B": 4}]
    ended = [name for kind, name, seconds in trial.steps if kind == "engine" and seconds is not None]
    assert len(ended) == 12, "progress reaches its end"


def test_the_export_fails_when_no_backend_is_left_or_the_one_asked_for_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.fails = {("cfm.g", name): CompileError(f"{name} cannot", where="cfm.g") for name in ("aoti", "b")}
    with pytest.raises(
        CompileError, match="no backend takes the graph: aoti: aoti cannot; b: b cannot"
    ) as failed:
        trial.run()
    assert failed.value.where == "cfm.g"
    trial.recipe = replace(trial.recipe, backend=("b",))
    trial.fails.pop(("cfm.g", "aoti"))
    with pytest.raises(CompileError, match=r"^b cannot"):
        trial.run()
    trial.recipe = replace(trial.recipe, backend=("auto",))
    trial.fails = {("cfm.g", "b"): CaptureError("cannot be traced", where="cfm.g")}
    with pytest.raises(CaptureError):
        trial.run()


def test_an_inaccurate_backend_is_left_out_before_it_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"), Fake("c"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.us, trial.inaccurate = {"aoti": 9.0, "b": 3.0, "c": 5.0}, {"b"}
    found = trial.run()["g"]
    assert found.backends == ("c",) and found.trial is not None
    assert found.trial.refused == (BackendRefusal(backend="b", reason="too far"),)
    assert ("time", "cfm.g", "aoti", "c") in trial.events and trial.left() == {"g.c", "h.c"}
    checks = [each for each in trial.steps if each[0] == "check"]
    assert len(checks) == 4, "one check of each graph begins and ends"


def test_the_golden_is_written_by_the_first_backend_that_is_accurate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"), Fake("c"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"), jobs=2)
    trial.us, trial.inaccurate = {"aoti": 9.0, "b": 3.0, "c": 5.0}, {"aoti"}
    found = trial.run([{"B": 2}, {"B": 1}])["g"]
    assert [each for each in trial.goldens if each[0] == "cfm.g"] == [("cfm.g", "aoti"), ("cfm.g", "b")]
    assert [each[2] for each in trial.events if each[:2] == ("check", "cfm.g")] == ["aoti", "b", "c"]
    assert found.parity.compiled == 3e-6, "that of the engines that are kept"
    assert [(each.backend, each.dims) for each in found.engines] == [("b", {"B": 1}), ("b", {"B": 2})]
    assert found.golden == "goldens/cfm.g"


def test_the_export_fails_when_no_backend_is_accurate_or_the_one_asked_for_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.inaccurate = {"aoti", "b"}
    with pytest.raises(CompileError, match="no backend takes the graph: aoti: too far; b: too far"):
        trial.run()
    trial.recipe = replace(trial.recipe, backend=("b",))
    trial.inaccurate = {"b"}
    with pytest.raises(ParityError, match=r"^too far"):
        trial.run()


@pytest.mark.parametrize("fault", [CompileError, ArtifactError])
def test_a_backend_that_fails_while_it_is_timed_gives_way_and_the_others_are_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None], fault: type[MingcError]
) -> None:
    install(Fake("aoti"), Fake("b"), Fake("c"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"), jobs=2)
    trial.us = {"aoti": 9.0, "b": 3.0, "c": 5.0}
    trial.untimed = {("cfm.g", "b"): fault("does not run", where="cfm.g")}
    found = trial.run()
    timed = [each[2:] for each in trial.events if each[:2] == ("time", "cfm.g")]
    assert timed == [("aoti", "b", "c"), ("aoti",), ("b",), ("c",)]
    assert found["g"].backends == ("c",) and found["h"].backends == ("b",)
    assert found["g"].trial is not None and found["g"].trial.device == "CPU"
    assert found["g"].trial.refused == (BackendRefusal(backend="b", reason="does not run"),)
    assert {each.backend for each in found["g"].trial.timings} == {"aoti", "c"}
    assert trial.left() == {"g.c", "h.b"}
    trial.untimed = {("cfm.g", each): fault(f"{each} ends", where="cfm.g") for each in ("aoti", "b", "c")}
    with pytest.raises(CompileError, match="no backend takes the graph: aoti: aoti ends; b: b ends; c: c en"):
        trial.run()


def test_engines_that_fail_only_together_are_timed_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.us = {"aoti": 9.0, "b": 3.0}

    def time_one(
        task: GraphTask, given: Sequence[GraphRecord], timer: Any
    ) -> tuple[str, tuple[EngineTiming, ...]]:
        if len(given) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.40 GiB")
        return trial.time(task, given, timer)

    monkeypatch.setattr(schedule, "time_graph", time_one)
    found = trial.run()["g"]
    assert found.backends == ("b",) and found.trial is not None and not found.trial.refused
    assert [each.backend for each in found.trial.timings] == ["aoti"] * 2 + ["b"] * 2


def test_a_backend_refused_early_is_not_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, install: Callable[..., None]
) -> None:
    install(Fake("aoti"), Fake("b"))
    trial = Trial(tmp_path, monkeypatch, recipe("auto"))
    trial.us = {"aoti": 9.0, "b": 3.0}
    found = trial.run(refused={"cfm.g": {"b": "too large"}})
    assert ("build", "cfm.g", "b") not in trial.events and ("build", "cfm.h", "b") in trial.events
    assert found["g"].trial is not None
    assert found["g"].trial.refused == (BackendRefusal(backend="b", reason="too large"),)


class Engines:
    """Two fake engines that note the order of their runs; `slow` takes many times as long by the fake clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.runs: list[str] = []
        self.bound: dict[str, list[str]] = {}

    def load(self, backend: str, path: Path, device: torch.device) -> Any:
        def run(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.runs.append(backend)
            self.now += {"fast": 0.001, "slow": 0.02}[backend] * len(tensors[0])
            return [tensors[0]]

        return SimpleNamespace(bind=lambda weights: self.bound.update({backend: sorted(weights)}), run=run)


@pytest.fixture
def timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Engines, list[list[list[float]]]]:
    from safetensors.torch import save_file

    found = Engines()
    files = [tmp_path / "w", tmp_path / "other.w"]
    for file in files:
        save_file({file.name: torch.ones(1)}, file)
    monkeypatch.setattr(engine_trial, "load_engine", found.load)
    monkeypatch.setattr(engine_trial.time, "perf_counter", lambda: found.now)
    calls = [{"x": torch.ones(size, 4)} for size in (1, 2)]
    named = [("slow", Path("a")), ("fast", Path("b"))]
    device, samples = engine_trial.time_engines(named, SPEC, files, calls, "cpu")
    assert device
    return found, samples


def test_engines_run_in_turns_after_a_warm_up(timed: tuple[Engines, list[list[list[float]]]]) -> None:
    found, samples = timed
    assert [[len(each) for each in of_size] for of_size in samples] == [[5, 5], [3, 3]]
    for size, of_size in enumerate(samples, 1):
        for seconds, once in zip(of_size, (0.02, 0.001), strict=True):
            assert seconds == pytest.approx([once * size] * len(seconds))
    assert found.runs[:2] == ["slow", "fast"], "the warm-up, which no sample counts"
    rounds = [found.runs[start : start + 2] for start in range(2, 12, 2)]
    assert all(sorted(each) == ["fast", "slow"] for each in rounds)
    assert {tuple(each) for each in rounds} == {("fast", "slow"), ("slow", "fast")}
    assert found.bound == {"slow": ["other.w", "w"], "fast": ["other.w", "w"]}


def test_errors_of_a_library_that_runs_engines_are_those_of_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = SimpleNamespace(spec=SPEC, check_dims={"B": 1, "T": 7}, example=lambda *_: {})
    monkeypatch.setattr(timing_task, "find_graph", lambda _: (None, None, plan))
    task = GraphTask(recipe=recipe("aoti"), stage="cfm", graph="g", folder=tmp_path, weights=("w",))
    (tmp_path / "w").mkdir()
    fault: Exception = RuntimeError("illegal instruction")

    def fail(*_: object) -> Any:
        raise fault

    says = "the engine of aoti or b does not run: RuntimeError: illegal instruction"
    with pytest.raises(CompileError, match=says) as failed:
        time_graph(task, [record(engine("aoti")), record(engine("b"))], fail)
    assert failed.value.where == "cfm.g"
    fault = WorkerError("not enough memory to capture it")
    with pytest.raises(CompileError, match=f"does not run: {fault.message}"):
        time_graph(task, [record(engine("aoti"))], fail)
    for fault in (torch.OutOfMemoryError("full"), ArtifactError("not an engine"), OSError("no space")):
        with pytest.raises(type(fault), match=str(fault)):
            time_graph(task, [record(engine("aoti"))], fail)


def test_an_export_without_a_timer_refuses_auto(install: Callable[..., None]) -> None:
    install(Fake("aoti"))
    plan = plan_of(recipe("auto"), {"cfm.sample": [None]})
    nothing: Any = None
    with pytest.raises(ConfigError, match="needs a timer, and none was passed"):
        export_run.run(plan, nothing, nothing)
