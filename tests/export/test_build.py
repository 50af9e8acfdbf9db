"""Building of engines and the record of an export: backend per stage, file names, fingerprint, report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mingc.artifacts.manifest import EngineRecord, FileRecord, GraphRecord, Parity
from mingc.artifacts.spec import GraphSpec
from mingc.errors import CompileError
from mingc.export.compile import trace
from mingc.export.compile.backend import Backend
from mingc.export.recipe import ExportRecipe, stage_options
from mingc.export.report import report_export
from mingc.export.run import fingerprint_of
from mingc.export.tasks import compile_engine
from mingc.export.tasks.check_graph import GraphResult
from mingc.export.tasks.graph_task import GraphTask, OpenGraph

RECIPE = ExportRecipe(checkpoint=Path("checkpoint"), output=Path("out"), backend=("aoti", "aoti:cfm"))


class _NamedBackend(Backend):
    """A backend that writes no file."""

    def __init__(self, name: str) -> None:
        self.name, self.suffix = name, f".{name}"

    def compile(self, *_: object, **__: object) -> float:
        return 1.25


def _opened() -> OpenGraph:
    """A graph that nothing traces."""
    plan: Any = SimpleNamespace(spec=None, typical_dims={})
    nothing: Any = None
    return OpenGraph(nothing, None, stage_options(RECIPE), plan, torch.nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("stage", "static_shapes", "backend", "file"),
    [
        ("cfm", {"B": 4}, "mine", "engines/cfm.sample-B4.mine"),
        ("cfm", None, "mine", "engines/cfm.sample.mine"),
        ("talker", {"B": 4, "T": 16}, "aoti", "engines/talker.sample-B4-T16.aoti"),
    ],
)
def test_an_engine_is_compiled_by_the_backend_of_its_stage(
    stage: str, static_shapes: dict[str, int] | None, backend: str, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = replace(RECIPE)
    object.__setattr__(recipe, "backend", ("aoti", "mine:cfm"))  # installed nowhere
    monkeypatch.setattr(compile_engine, "find_backend", _NamedBackend)
    monkeypatch.setattr(trace, "capture", lambda *_, **__: None)
    monkeypatch.setattr(compile_engine, "count_cost", lambda *_: ())
    task = GraphTask(
        recipe=recipe,
        stage=stage,
        graph="sample",
        folder=Path("nowhere"),
        weights=(),
        backend=recipe.backends_of(stage)[0],
    )
    record = compile_engine.compile_engine(task, _opened(), static_shapes)
    assert (record.backend, record.file, record.dims) == (backend, file, static_shapes)


@pytest.mark.parametrize(
    "fault", [ValueError("no such layout"), CompileError("no such layout"), OSError("full")]
)
def test_any_error_of_a_compiler_is_one_of_the_export(
    fault: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(_NamedBackend):
        def compile(self, *_: object, **__: object) -> float:
            raise fault

    monkeypatch.setattr(compile_engine, "find_backend", Failing)
    monkeypatch.setattr(trace, "capture", lambda *_, **__: None)
    task = GraphTask(recipe=RECIPE, stage="cfm", graph="sample", folder=Path("nowhere"), weights=())
    with pytest.raises(OSError if isinstance(fault, OSError) else CompileError, match=str(fault)) as failed:
        compile_engine.compile_engine(task, _opened(), None)
    if isinstance(fault, ValueError):
        says = "aoti does not compile the graph: ValueError: no such layout"
        assert (failed.value.message, failed.value.where) == (says, "cfm.sample")


def test_the_fingerprint_of_a_recipe_leaves_out_where_and_how_it_was_built() -> None:
    checkpoint: Any = SimpleNamespace(fingerprint=lambda: "weights")
    machine: Any = SimpleNamespace(torch="2.11.0", device="cpu", capability="AVX2")

    def digest(**changes: Any) -> str:
        return fingerprint_of(replace(RECIPE, **changes), machine, checkpoint).config_sha256

    elsewhere = {
        "checkpoint": Path("c"),
        "output": Path("o"),
        "jobs": 8,
        "cache": Path("k"),
        "cache_gigabytes": 1.0,
        "force": True,
    }
    for name, value in elsewhere.items():
        assert digest(**{name: value}) == digest(), name
    contents = {
        "dtype": "bfloat16",
        "batch_sizes": (1, 2),
        "quantize": ("fp8",),
        "synthetic": True,
        "world_size": 2,
    }
    assert len({digest(), *(digest(**{name: value}) for name, value in contents.items())}) == 6


def test_a_report_adds_up_the_files_of_each_graph_and_rank() -> None:
    def make_result(stage: str, graph: str, sizes: Mapping[str, float]) -> GraphResult:
        engines = tuple(
            EngineRecord(backend=stage, file=file, dims=None, compile_seconds=seconds)
            for file, seconds in sizes.items()
        )
        spec = GraphSpec(name=graph, inputs=(), outputs=())
        record = GraphRecord(spec=spec, engines=engines, golden="", parity=Parity(compiled=1e-5, eager=0.0))
        return GraphResult(stage=stage, record=record, peak_rss_bytes=0)

    results = [make_result("talker", "step", {"c": 0.5}), make_result("cfm", "sample", {"a": 1.5, "b": 2.0})]
    sizes = {"a": 10, "b": 20, "c": 30, "w0": 500, "w1": 380, "w2": 20, "v": 100}
    manifest: Any = SimpleNamespace(
        stages={
            "cfm": SimpleNamespace(weights=(("w1", "w2"), ("w0",))),
            "talker": SimpleNamespace(weights=(("v",),)),
        },
        files={name: FileRecord(size_bytes=size, sha256="") for name, size in sizes.items()},
        model="tiny",
        notes=(),
    )
    report = report_export(Path("out"), manifest, results, peak_rss_bytes=7, seconds=2.5)
    assert [
        (row.stage, row.backend, row.engines, row.size_bytes, row.compile_seconds) for row in report.graphs
    ] == [
        ("cfm", "cfm", 2, 30, 3.5),
        ("talker", "talker", 1, 30, 0.5),
    ]
    assert (report.weights_bytes, report.largest_weights_bytes, report.artifact_bytes) == (1000, 500, 1060)
