"""Which engines of a graph an export compares with its float32 reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from stage_checks import graph_of

from mingc.artifacts.manifest import EngineRecord, Parity
from mingc.artifacts.spec import GraphSpec
from mingc.errors import CompileError, ParityError
from mingc.export.checkpoint import open_checkpoint
from mingc.export.checks.eager_reference import run_eager
from mingc.export.checks.parity import worst_parity
from mingc.export.recipe import ExportRecipe
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages.thinker import STAGE
from mingc.export.tasks import graph_task
from mingc.export.tasks.check_graph import check_graph
from mingc.export.tasks.graph_task import GraphTask
from mingc.export.weights.loading import load_module, write_weights

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
OPTIONS = StageOptions(static_buckets=True, batch_sizes=(1, 2, 4))


class Engines:
    """Engines of a thinker's graph that run the eager module; the engine of batch `spoiled` is wrong."""

    def __init__(self, folder: Path, spoiled: int | None, graph: str = "head") -> None:
        checkpoint = open_checkpoint(TINY)
        config = STAGE.config(checkpoint)
        write_weights(
            checkpoint, STAGE, config, Shard(), torch.float32, folder / "weights", file_bytes=1 << 14
        )
        (folder / "goldens").mkdir()
        self._plan = graph_of(STAGE, config, graph, OPTIONS)
        self._module = load_module(
            STAGE,
            config,
            Shard(),
            folder / "weights",
            submodule=self._plan.spec.layer_instances[0],
        )
        self._spoiled = spoiled
        self.batches: list[int] = []
        recipe = ExportRecipe(checkpoint=TINY, output=folder / "out", stages=("thinker",))
        self.task = GraphTask(
            recipe=recipe, stage="thinker", graph=graph, folder=folder, weights=("weights",)
        )
        self.records = tuple(
            EngineRecord(
                backend="aoti",
                file=f"engines/thinker.{graph}-B{size}.pt2",
                dims={"B": size},
                compile_seconds=0,
            )
            for size in OPTIONS.batch_sizes
        )

    def replay(
        self,
        engine: Path,
        backend: str,
        spec: GraphSpec,
        weights: Sequence[Path],
        calls: Sequence[Mapping[str, torch.Tensor]],
        device: str,
    ) -> list[dict[str, torch.Tensor]]:
        (tensors,) = calls
        batch = len(next(iter(tensors.values())))
        assert engine.stem == f"{self.task.name}-B{batch}"
        self.batches.append(batch)
        found = run_eager(self._plan, self._module, tensors)
        return [{name: 1.01 * value if batch == self._spoiled else value for name, value in found.items()}]


@pytest.fixture
def _static(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph_task, "stage_options", lambda recipe: OPTIONS)


@pytest.mark.usefixtures("_static")
def test_the_engine_for_one_request_is_checked_beside_another(tmp_path: Path) -> None:
    engines = Engines(tmp_path, None)
    record = check_graph(engines.task, engines.records, engines.replay).record
    assert engines.batches == [4, 1]
    assert record.parity.compiled == 0.0 and record.golden == "goldens/thinker.head.safetensors"


@pytest.mark.usefixtures("_static")
@pytest.mark.parametrize(("spoiled", "where"), [(4, "thinker.head"), (1, "thinker.head-B1")])
def test_either_of_them_refuses_the_export(tmp_path: Path, spoiled: int, where: str) -> None:
    engines = Engines(tmp_path, spoiled)
    with pytest.raises(ParityError, match="differ from the float32 reference") as caught:
        check_graph(engines.task, engines.records, engines.replay)
    assert caught.value.where == where


@pytest.mark.usefixtures("_static")
def test_the_golden_is_written_on_request_only(tmp_path: Path) -> None:
    engines = Engines(tmp_path, None)
    record = check_graph(engines.task, engines.records, engines.replay, writes_golden=False).record
    assert not (tmp_path / record.golden).exists()
    check_graph(engines.task, engines.records, engines.replay, writes_golden=True)
    assert (tmp_path / record.golden).exists()


@pytest.mark.usefixtures("_static")
def test_an_engine_that_raises_fails_its_check_with_the_error_of_its_library(tmp_path: Path) -> None:
    engines = Engines(tmp_path, None)

    def replay(*_: object) -> NoReturn:
        raise RuntimeError("illegal instruction")

    with pytest.raises(CompileError, match="engine of aoti does not run: RuntimeError: illegal") as caught:
        check_graph(engines.task, engines.records, replay)
    assert caught.value.where == "thinker.head"


@pytest.mark.usefixtures("_static")
def test_a_graph_that_only_cuda_exports_have_is_its_own_reference(tmp_path: Path) -> None:
    """The float32 reference is an export for a CPU, and such exports sample on the host."""
    (tmp_path / "right").mkdir()
    engines = Engines(tmp_path / "right", None, "sample")
    record = check_graph(engines.task, engines.records, engines.replay).record
    assert record.parity.compiled == 0.0 and [each.name for each in record.spec.outputs] == ["tokens"]
    (tmp_path / "wrong").mkdir()
    engines = Engines(tmp_path / "wrong", 4, "sample")
    with pytest.raises(ParityError):
        check_graph(engines.task, engines.records, engines.replay)


def test_the_worse_figures_of_two_engines_are_reported() -> None:
    of_one = Parity(compiled=0.02, eager=0.03, quantization=0.1, rerouted=None)
    of_more = Parity(compiled=0.01, eager=0.04, quantization=0.2, rerouted=0.1)
    worst = Parity(compiled=0.02, eager=0.03, quantization=0.2, rerouted=0.1)
    assert worst_parity(of_one, of_more) == worst_parity(of_more, of_one) == worst
    exact = Parity(compiled=0.0, eager=0.0)
    assert worst_parity(exact, exact) == exact
