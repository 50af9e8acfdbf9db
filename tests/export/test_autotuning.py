"""The timing of kernels at an export: what is timed, kept and handed to engines. No device: times are made up."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mingc.artifacts.codec import decode, encode
from mingc.artifacts.manifest import EngineRecord, StageRecord, TunedKernel
from mingc.errors import CompileError, ExportError
from mingc.export.autotune import tuning
from mingc.export.autotune.moe_benchmark import RandomExperts, check_result
from mingc.export.autotune.search_space import candidates
from mingc.export.autotune.selection import Choice
from mingc.export.autotune.tuning import (
    cut_of,
    engine_table,
    expert_shapes,
    record_of,
    shape_of,
    to_tune,
    tune,
)
from mingc.export.compile import build
from mingc.export.compile.backends import aoti
from mingc.export.compile.build import GraphTask, build_engine, stage_options
from mingc.export.recipe import ExportRecipe
from mingc.export.stage import ExpertDims, Shard
from mingc.export.stages import find
from mingc.export.weights.source import open_source
from mingc.kernels.triton.moe_config import Cut, Shape, Tiles, chosen_cuts, rule, using

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
DIMS = ExpertDims(
    hidden_size=4096,
    width=256,
    shared_width=256,
    num_experts=256,
    num_groups=8,
    num_kept_groups=4,
    num_chosen=8,
)
CUT = Cut(
    up=Tiles(columns=16, depth=64), down=Tiles(columns=32, depth=64, warps=8, stages=2, repeats=4), rows=32
)
SHAPES = expert_shapes(DIMS, None, [1, 16, 32, 64, 256, 1024, 4096])
DEVICE = "a device"


class Lab:
    """A device that is not there: `faster` of a shape takes half of the time, `too_large` fit nowhere."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faster: Callable[[Shape], Cut | None] = lambda _: None
        self.too_large: Callable[[Cut], bool] = lambda _: False
        self.timed: list[tuple[Shape, tuple[Cut, ...]]] = []
        self.jobs: list[int] = []
        monkeypatch.setattr(tuning, "worker_pool", self._threads)
        monkeypatch.setattr(tuning, "fits", lambda dims, shape, cut: not self.too_large(cut))
        monkeypatch.setattr(tuning, "time_shapes", self._time)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: DEVICE)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 30, 0))

    @contextmanager
    def _threads(self, jobs: int) -> Iterator[ThreadPoolExecutor]:
        self.jobs.append(jobs)
        with ThreadPoolExecutor(jobs) as pool:
            yield pool

    def _time(self, dims: ExpertDims, cuts: Sequence[tuple[Shape, tuple[Cut, ...]]]) -> list[Choice]:
        self.timed += cuts
        choices = []
        for shape, each in cuts:
            faster = self.faster(shape)
            cut, us = (each[0], 10.0) if faster not in each[1:] else (faster, 5.0)
            choices.append(Choice(shape=shape, cut=cut, us=us, default_us=10.0))
        return choices

    def tokens(self) -> list[int]:
        return sorted(shape.tokens for shape, _ in self.timed)


@pytest.fixture
def lab(monkeypatch: pytest.MonkeyPatch) -> Lab:
    return Lab(monkeypatch)


def test_a_record_reads_back_from_the_manifest_as_it_was_chosen() -> None:
    for shape in SHAPES:
        record = record_of(Choice(shape=shape, cut=CUT, us=1.234, default_us=2.0), DEVICE)
        stage = StageRecord(is_sharded=True, weights=(), graphs={}, kernel_configs=(record,))
        (read,) = decode(StageRecord, json.loads(json.dumps(encode(stage)))).kernel_configs
        assert read == record
        assert (shape_of(read), cut_of(read)) == (shape, CUT)
        assert (read.us, read.default_us, read.device) == (1.23, 2.0, DEVICE)


def test_manifests_without_tiles_are_read() -> None:
    assert decode(StageRecord, {"is_sharded": True, "weights": [], "graphs": {}}).kernel_configs == ()


def test_shapes_are_those_that_kernels_take() -> None:
    assert [shape.kernel for shape in SHAPES] == ["moe_gemv", *["batch"] * 3, *["grouped"] * 3]
    assert expert_shapes(DIMS, "int4", [1])[0].kernel == "batch"
    assert expert_shapes(replace(DIMS, shared_width=512), None, [1])[0].kernel == "row"
    assert expert_shapes(replace(DIMS, shared_width=0), None, [1])[0].kernel == "moe_gemv"
    assert expert_shapes(replace(DIMS, hidden_size=64), None, [1, 16]) == ()
    assert [shape.tokens for shape in expert_shapes(DIMS, "fp8", [32, 16, 32])] == [16, 32]


def test_of_shapes_cut_alike_those_at_both_ends_are_timed(lab: Lab) -> None:
    records = tune(DIMS, SHAPES, jobs=4, cache=None)
    assert lab.tokens() == [1, 16, 64, 256, 1024, 4096]
    assert [record.tokens for record in records] == [1, 16, 64, 256, 1024, 4096]
    for shape, cuts in lab.timed:
        assert cuts == candidates(shape)
    assert all(cut_of(record) == rule(shape_of(record)) for record in records)
    assert {record.device for record in records} == {DEVICE}


def test_what_both_ends_take_is_tried_for_those_between(lab: Lab) -> None:
    won = candidates(SHAPES[1])[2]
    lab.faster = lambda shape: won if shape.kernel == "batch" else None
    records = {record.tokens: record for record in tune(DIMS, SHAPES, jobs=4, cache=None)}
    assert lab.timed[-1] == (SHAPES[2], (rule(SHAPES[2]), won))
    assert [cut_of(records[tokens]) for tokens in (16, 32, 64)] == [won] * 3
    assert (records[32].us, records[32].default_us) == (5.0, 10.0)


def test_between_ends_that_differ_all_is_tried(lab: Lab) -> None:
    won = candidates(SHAPES[1])[2]
    lab.faster = lambda shape: won if shape.tokens == 16 else None
    tune(DIMS, SHAPES, jobs=4, cache=None)
    assert lab.timed[-1] == (SHAPES[2], candidates(SHAPES[2]))


def test_choices_are_taken_again_from_the_cache(lab: Lab, tmp_path: Path) -> None:
    won = candidates(SHAPES[0])[1]
    lab.faster = lambda shape: won if shape.tokens == 1 else None
    first = tune(DIMS, SHAPES, jobs=4, cache=tmp_path)
    lab.timed.clear()
    assert tune(DIMS, SHAPES, jobs=4, cache=tmp_path) == first
    assert lab.timed == []
    more = expert_shapes(DIMS, None, [1, 128])
    assert [record.tokens for record in tune(DIMS, more, jobs=4, cache=tmp_path)] == [1, 128]
    assert lab.tokens() == [128]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"kernel": "batch"}', "[]"])
def test_a_spoiled_choice_is_timed_anew(lab: Lab, tmp_path: Path, text: str) -> None:
    (shape,) = expert_shapes(DIMS, None, [16])
    (record,) = tune(DIMS, [shape], jobs=1, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert tune(DIMS, [shape], jobs=1, cache=tmp_path) == (record,)
    assert lab.tokens() == [16, 16]
    assert decode(TunedKernel, json.loads(file.read_text())) == record


def test_choices_of_another_device_or_other_kernels_are_not_taken(
    lab: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = expert_shapes(DIMS, None, [16])
    tune(DIMS, shapes, jobs=1, cache=tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    (record,) = tune(DIMS, shapes, jobs=1, cache=tmp_path)
    assert record.device == "another"
    monkeypatch.setattr(tuning, "kernel_sources", lambda: b"other code")
    tune(DIMS, shapes, jobs=1, cache=tmp_path)
    assert lab.tokens() == [16, 16, 16]


def test_cuts_that_do_not_fit_are_left_out(lab: Lab) -> None:
    lab.too_large = lambda cut: cut.up.columns >= 256
    (shape,) = expert_shapes(DIMS, None, [1024])
    tune(DIMS, [shape], jobs=4, cache=None)
    ((_, cuts),) = lab.timed
    assert cuts == tuple(cut for cut in candidates(shape) if cut.up.columns < 256)
    assert 1 < len(cuts) < len(candidates(shape))


def test_without_the_rules_cut_there_is_no_engine(lab: Lab) -> None:
    lab.too_large = lambda cut: cut == rule(SHAPES[1])
    with pytest.raises(CompileError, match="kernels for 16 tokens need more than this device has"):
        tune(DIMS, SHAPES[:2], jobs=4, cache=None)


def test_as_many_processes_as_have_room_for_the_weights(lab: Lab) -> None:
    """10 GiB are free; a quarter of 257 experts takes 1.5 in bfloat16, drawn once more, and a process 1 more."""
    for wished, width in ((2, 256), (16, 256), (16, 4096)):
        dims = replace(DIMS, width=width)
        tune(dims, expert_shapes(dims, None, [16]), jobs=wished, cache=None)
    assert lab.jobs == [2, 3, 1]


def test_another_result_is_refused_and_rounding_is_not() -> None:
    given = torch.randn(4, 64)
    check_result(SHAPES[1], CUT, given.to(torch.bfloat16), given)
    for wrong in (1.05 * given, given * torch.nan, given.roll(1, 0)):
        with pytest.raises(ExportError, match="gives other results than the usual one") as caught:
            check_result(SHAPES[1], CUT, wrong, given)
        assert "--no-autotune" in (caught.value.fix or "")


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_random_experts_are_what_the_layer_takes(quantization: str | None) -> None:
    dims = replace(DIMS, hidden_size=256, width=128, shared_width=128, num_experts=16, num_chosen=4)
    for shape in expert_shapes(dims, quantization, [16, 80]):
        experts = RandomExperts(dims, shape.storage, device="cpu")
        inputs, other = experts.inputs(shape.tokens, 2)
        assert not torch.equal(inputs[1], other[1])
        given = experts.run(shape, inputs)
        assert given.shape == (shape.tokens, 256) and given.isfinite().all()
        # Neither so small nor so large that rounding would hide or fake a difference.
        assert 0.1 < given.float().std() < 10
        values = 3 * 128 * 256 * {None: 2, "fp8": 1, "int4": 0.5}[quantization]
        assert experts.read_bytes(inputs) == 17 * values


def _recipe(**changes: object) -> ExportRecipe:
    fixed = {"checkpoint": TINY, "output": Path("out"), "target": "cuda", "dtype": "bfloat16"}
    return ExportRecipe(**{**fixed, "batch_sizes": (1, 4), "prefill_chunk_size": 64, **changes})


class Wide:
    """The tiny thinker with experts wide enough for the kernels."""

    name = "thinker"

    def experts(self, config: object, shard: Shard) -> ExpertDims:
        return replace(DIMS, width=DIMS.width // shard.world_size)


def _found(recipe: ExportRecipe, stage: object) -> tuple[ExpertDims, tuple[Shape, ...]] | None:
    thinker = find("thinker")
    config = thinker.config(open_source(recipe))
    plans = thinker.graphs(config, Shard(world_size=recipe.world_size), stage_options(recipe))
    return to_tune(recipe, stage, config, plans)  # type: ignore[arg-type]


def test_an_export_times_steps_and_chunks_of_its_experts() -> None:
    found = _found(_recipe(world_size=2, quantize=("fp8",)), Wide())
    assert found is not None
    dims, shapes = found
    assert dims.width == 128
    assert [shape.tokens for shape in shapes] == [1, 4, 16, 32, 64]
    assert {(shape.storage, shape.width) for shape in shapes} == {(1, 128)}


@pytest.mark.parametrize("changes", [{"autotune": False}, {"target": "cpu"}, {"dtype": "float32"}])
def test_nothing_is_timed_where_it_is_not_wanted_or_nothing_runs(changes: dict[str, object]) -> None:
    assert _found(_recipe(**changes), Wide()) is None


def test_nothing_is_timed_of_stages_without_kernels_for_experts() -> None:
    assert _found(_recipe(), find("thinker")) is None  # too narrow
    assert _found(_recipe(), find("talker")) is None


@pytest.mark.parametrize(
    ("graph", "sizes", "has_tiles"),
    [
        ("decode_experts", {"B": 4}, True),
        ("prefill_experts", {"T": 64}, True),
        ("decode_experts", {"B": 1}, False),
        ("embed", {"N": 4}, False),
    ],
)
def test_an_engine_is_compiled_with_the_tiles_of_its_size(
    graph: str, sizes: dict[str, int], has_tiles: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def compile_(*_: object) -> EngineRecord:
        seen.append(dict(chosen_cuts()))
        return EngineRecord(backend="aoti", file="", dims=sizes, compile_seconds=0.0)

    monkeypatch.setattr(build, "_load", lambda *_: nn.Module())
    monkeypatch.setattr(build, "share_weights", lambda plan, _: plan)
    monkeypatch.setattr(build, "_compile", compile_)
    monkeypatch.setattr(build, "stage_options", lambda recipe: replace(stage_options(recipe), device="cpu"))
    shapes = expert_shapes(DIMS, None, [4, 64])
    records = tuple(record_of(Choice(shape=each, cut=CUT, us=1, default_us=2), DEVICE) for each in shapes)
    task = GraphTask(
        recipe=_recipe(),
        stage="thinker",
        graph=graph,
        folder=tmp_path,
        weights=("w",),
        kernel_configs=records,
    )
    build_engine(task, sizes)
    (tokens,) = sizes.values()
    assert seen == [{shape: CUT for shape in shapes if shape.tokens == tokens} if has_tiles else {}]
    assert engine_table(records, tokens) == {shape: CUT for shape in shapes if shape.tokens == tokens}
    assert not chosen_cuts()


def test_engines_of_other_tiles_are_others_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    program = torch.export.export(nn.Identity(), (torch.ones(3),))
    key = lambda: aoti._key(program, {}, "cuda")  # noqa: E731
    plain = key()
    with using({SHAPES[0]: CUT, SHAPES[1]: CUT}):
        tuned = key()
    with using({SHAPES[1]: CUT, SHAPES[0]: CUT}):
        assert key() == tuned
    with using({SHAPES[0]: CUT}):
        assert key() not in (plain, tuned)
    assert key() == plain != tuned
