"""Autotuning at export: what is timed, cached and used by engines. Needs no GPU: times are made up."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import mingc
from mingc.artifacts.codec import decode, encode
from mingc.artifacts.manifest import EngineRecord, StageRecord, TunedKernel
from mingc.artifacts.target import KernelConfig, lookup
from mingc.errors import CompileError, ExportError
from mingc.export.autotune import tuning
from mingc.export.autotune.moe_benchmark import RandomExperts, check_result
from mingc.export.autotune.search_space import search_space
from mingc.export.autotune.selection import Selection
from mingc.export.autotune.tuning import (
    autotune,
    config_of,
    moe_problems,
    problem_of,
    problems_to_tune,
    record_of,
    tuned_table,
    with_choice,
)
from mingc.export.compile.backends import aoti
from mingc.export.compile.kernel_sources import kernel_sources
from mingc.export.recipe import ExportRecipe, stage_options
from mingc.export.source import open_source
from mingc.export.stage import ExpertDims, Shard
from mingc.export.stages import find
from mingc.export.tasks import compile_engine, graph_task
from mingc.export.tasks.compile_engine import build_engine
from mingc.export.tasks.graph_task import GraphTask
from mingc.kernels import dispatch
from mingc.kernels.triton.moe_config import (
    INT4,
    MoeConfig,
    MoeProblem,
    default_config,
    tuned_configs,
    use_tuned_configs,
)

H200 = lookup((9, 0), "NVIDIA H200", 132)
TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
DIMS = ExpertDims(
    hidden_size=4096,
    intermediate_size=256,
    shared_intermediate_size=256,
    num_experts=256,
    num_groups=8,
    num_kept_groups=4,
    top_k=8,
)
CONFIG = MoeConfig(
    up=KernelConfig(block_n=16, block_k=64),
    down=KernelConfig(block_n=32, block_k=64, num_warps=8, num_stages=2, tiles_per_program=4),
    block_m=32,
)
PROBLEMS = moe_problems(DIMS, None, [1, 16, 32, 64, 256, 1024, 4096])
DEVICE = "a device"


class FakeGpu:
    """Made-up times: the configuration `faster` of a problem takes half the time, a `too_large` one does not fit."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.faster: Callable[[MoeProblem], MoeConfig | None] = lambda _: None
        self.too_large: Callable[[MoeConfig], bool] = lambda _: False
        self.timed: list[tuple[MoeProblem, tuple[MoeConfig, ...]]] = []
        self.jobs: list[int] = []
        monkeypatch.setattr(tuning, "worker_pool", self._threads)
        monkeypatch.setattr(tuning, "fits", lambda dims, problem, config: not self.too_large(config))
        monkeypatch.setattr(tuning, "time_problems", self._time)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: DEVICE)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10 << 30, 0))

    @contextmanager
    def _threads(self, jobs: int) -> Iterator[ThreadPoolExecutor]:
        self.jobs.append(jobs)
        with ThreadPoolExecutor(jobs) as pool:
            yield pool

    def _time(
        self, dims: ExpertDims, configs: Sequence[tuple[MoeProblem, tuple[MoeConfig, ...]]]
    ) -> list[Selection]:
        self.timed += configs
        selections = []
        for problem, each in configs:
            faster = self.faster(problem)
            config, us = (each[0], 10.0) if faster not in each[1:] else (faster, 5.0)
            selections.append(Selection(problem=problem, config=config, us=us, default_us=10.0))
        return selections

    def tokens(self) -> list[int]:
        return sorted(problem.tokens for problem, _ in self.timed)


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    return FakeGpu(monkeypatch)


def test_a_record_survives_a_round_trip_through_the_manifest() -> None:
    for problem in PROBLEMS:
        record = record_of(Selection(problem=problem, config=CONFIG, us=1.234, default_us=2.0), DEVICE)
        stage = StageRecord(is_sharded=True, weights=(), graphs={}, kernel_configs=(record,))
        (read,) = decode(StageRecord, json.loads(json.dumps(encode(stage)))).kernel_configs
        assert read == record
        assert (problem_of(read), config_of(read)) == (problem, CONFIG)
        assert (read.us, read.default_us, read.device) == (1.23, 2.0, DEVICE)


def test_manifests_without_kernel_configs_are_read() -> None:
    assert decode(StageRecord, {"is_sharded": True, "weights": [], "graphs": {}}).kernel_configs == ()


def test_problems_name_the_kernels_that_run_them() -> None:
    assert [problem.kernel for problem in PROBLEMS] == ["moe_gemv", *["batch"] * 3, *["grouped"] * 3]
    assert moe_problems(DIMS, "int4", [1])[0].kernel == "batch"
    assert moe_problems(replace(DIMS, shared_intermediate_size=512), None, [1])[0].kernel == "expert_gemv"
    assert moe_problems(replace(DIMS, shared_intermediate_size=0), None, [1])[0].kernel == "moe_gemv"
    assert moe_problems(replace(DIMS, hidden_size=64), None, [1, 16]) == ()
    assert [problem.tokens for problem in moe_problems(DIMS, "fp8", [32, 16, 32])] == [16, 32]


def test_of_problems_with_one_default_the_first_and_last_are_timed(fake_gpu: FakeGpu) -> None:
    records = autotune(DIMS, PROBLEMS, jobs=4, cache=None)
    assert fake_gpu.tokens() == [1, 16, 64, 256, 1024, 4096]
    assert [record.tokens for record in records] == [1, 16, 64, 256, 1024, 4096]
    for problem, configs in fake_gpu.timed:
        assert configs == search_space(problem)
    assert all(config_of(record) == default_config(problem_of(record)) for record in records)
    assert {record.device for record in records} == {DEVICE}


def test_a_configuration_that_wins_at_both_ends_is_timed_between_them(fake_gpu: FakeGpu) -> None:
    won = search_space(PROBLEMS[1])[2]
    fake_gpu.faster = lambda problem: won if problem.kernel == "batch" else None
    records = {record.tokens: record for record in autotune(DIMS, PROBLEMS, jobs=4, cache=None)}
    assert fake_gpu.timed[-1] == (PROBLEMS[2], (default_config(PROBLEMS[2]), won))
    assert [config_of(records[tokens]) for tokens in (16, 32, 64)] == [won] * 3
    assert (records[32].us, records[32].default_us) == (5.0, 10.0)


def test_between_ends_that_differ_everything_is_timed(fake_gpu: FakeGpu) -> None:
    won = search_space(PROBLEMS[1])[2]
    fake_gpu.faster = lambda problem: won if problem.tokens == 16 else None
    autotune(DIMS, PROBLEMS, jobs=4, cache=None)
    assert fake_gpu.timed[-1] == (PROBLEMS[2], search_space(PROBLEMS[2]))


def test_records_are_read_from_the_cache(fake_gpu: FakeGpu, tmp_path: Path) -> None:
    won = search_space(PROBLEMS[0])[1]
    fake_gpu.faster = lambda problem: won if problem.tokens == 1 else None
    first = autotune(DIMS, PROBLEMS, jobs=4, cache=tmp_path)
    fake_gpu.timed.clear()
    assert autotune(DIMS, PROBLEMS, jobs=4, cache=tmp_path) == first
    assert fake_gpu.timed == []
    more = moe_problems(DIMS, None, [1, 128])
    assert [record.tokens for record in autotune(DIMS, more, jobs=4, cache=tmp_path)] == [1, 128]
    assert fake_gpu.tokens() == [128]


@pytest.mark.parametrize("text", ["", "{", "{}", '{"kernel": "batch"}', "[]"])
def test_an_unreadable_record_is_timed_again(fake_gpu: FakeGpu, tmp_path: Path, text: str) -> None:
    (problem,) = moe_problems(DIMS, None, [16])
    (record,) = autotune(DIMS, [problem], jobs=1, cache=tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_text(text)
    assert autotune(DIMS, [problem], jobs=1, cache=tmp_path) == (record,)
    assert fake_gpu.tokens() == [16, 16]
    assert decode(TunedKernel, json.loads(file.read_text())) == record


def test_records_of_another_gpu_or_other_kernels_are_not_used(
    fake_gpu: FakeGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems = moe_problems(DIMS, None, [16])
    autotune(DIMS, problems, jobs=1, cache=tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "another")
    (record,) = autotune(DIMS, problems, jobs=1, cache=tmp_path)
    assert record.device == "another"
    monkeypatch.setattr(tuning, "kernel_sources", lambda: b"other code")
    autotune(DIMS, problems, jobs=1, cache=tmp_path)
    assert fake_gpu.tokens() == [16, 16, 16]


def test_configurations_that_do_not_fit_are_left_out(fake_gpu: FakeGpu) -> None:
    fake_gpu.too_large = lambda config: config.up.block_n >= 256
    (problem,) = moe_problems(DIMS, None, [1024])
    autotune(DIMS, [problem], jobs=4, cache=None)
    ((_, configs),) = fake_gpu.timed
    assert configs == tuple(config for config in search_space(problem) if config.up.block_n < 256)
    assert 1 < len(configs) < len(search_space(problem))


def test_a_default_that_does_not_fit_is_an_error(fake_gpu: FakeGpu) -> None:
    fake_gpu.too_large = lambda config: config == default_config(PROBLEMS[1])
    with pytest.raises(CompileError, match="kernels for 16 tokens need more shared memory or registers than"):
        autotune(DIMS, PROBLEMS[:2], jobs=4, cache=None)


def test_the_number_of_processes_is_limited_by_memory(fake_gpu: FakeGpu) -> None:
    """10 GiB are free; a quarter of 257 experts takes 1.5 GiB in bfloat16, values as much again; a process 1 GiB."""
    for requested, width in ((2, 256), (16, 256), (16, 4096)):
        dims = replace(DIMS, intermediate_size=width)
        autotune(dims, moe_problems(dims, None, [16]), jobs=requested, cache=None)
    assert fake_gpu.jobs == [2, 3, 1]


def test_another_result_is_refused_but_rounding_is_not() -> None:
    given = torch.randn(4, 64)
    check_result(PROBLEMS[1], CONFIG, given.to(torch.bfloat16), given)
    for wrong in (1.05 * given, given * torch.nan, given.roll(1, 0)):
        with pytest.raises(ExportError, match="gives another result than the default") as caught:
            check_result(PROBLEMS[1], CONFIG, wrong, given)
        assert "--no-autotune" in (caught.value.fix or "")


@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_random_experts_run_in_the_layer(quantization: str | None) -> None:
    dims = replace(
        DIMS, hidden_size=256, intermediate_size=128, shared_intermediate_size=128, num_experts=16, top_k=4
    )
    for problem in moe_problems(dims, quantization, [16, 80]):
        experts = RandomExperts(dims, problem.weight_format, device="cpu")
        inputs, other = experts.inputs(problem.tokens, 2)
        assert not torch.equal(inputs[1], other[1])
        given = experts.run(problem, inputs)
        assert given.shape == (problem.tokens, 256) and given.isfinite().all()
        # Neither so small nor so large that rounding hides or causes a difference.
        assert 0.1 < given.float().std() < 10
        values = 3 * 128 * 256 * {None: 2, "fp8": 1, "int4": 0.5}[quantization]
        assert experts.read_bytes(inputs) == 17 * values


def test_random_experts_are_timed_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if on a GPU where the layer runs in CUDA C++ for 64 and for 80 tokens."""
    calls: list[tuple[str, int, int]] = []
    for name in ("moe_decode", "moe_prefill"):

        def record(*given: object, name: str = name) -> None:
            calls.append((name, len(given), given.count(None)))

        recorder = SimpleNamespace(**{name: record})
        monkeypatch.setitem(sys.modules, f"mingc.kernels.triton.{name}", recorder)
    dims = replace(
        DIMS, hidden_size=512, intermediate_size=512, shared_intermediate_size=512, num_experts=16, top_k=4
    )
    experts = RandomExperts(dims, INT4, device="cpu")
    problems = moe_problems(dims, "int4", [16, 64, 80])
    inputs = [experts.inputs(problem.tokens, 1)[0] for problem in problems]
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    monkeypatch.setattr(dispatch, "_has_kernels", lambda index, family: True)
    for problem, given in zip(problems, inputs, strict=True):
        experts.run(problem, given)
    # A step with the shared expert's four tensors, a chunk without its output and without machine code.
    assert calls == [("moe_decode", 11, 0), ("moe_decode", 11, 0), ("moe_prefill", 9, 2)]


def _recipe(**changes: object) -> ExportRecipe:
    fixed = {"checkpoint": TINY, "output": Path("out"), "target": "cuda", "dtype": "bfloat16"}
    return ExportRecipe(**{**fixed, "batch_sizes": (1, 4), "prefill_chunk_size": 64, **changes})


class LargeExperts:
    """The tiny thinker with experts large enough for the kernels."""

    name = "thinker"

    def experts(self, config: object, shard: Shard) -> ExpertDims:
        return replace(DIMS, intermediate_size=DIMS.intermediate_size // shard.world_size)


def _found(recipe: ExportRecipe, stage: object) -> tuple[ExpertDims, tuple[MoeProblem, ...]] | None:
    thinker = find("thinker")
    config = thinker.config(open_source(recipe))
    graphs = thinker.graphs(config, Shard(world_size=recipe.world_size), stage_options(recipe))
    return problems_to_tune(recipe, stage, config, graphs)  # type: ignore[arg-type]


@pytest.fixture
def on_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "gpu_target", lambda: H200)


@pytest.mark.usefixtures("on_h200")
def test_an_export_times_decode_steps_and_prefill_chunks() -> None:
    found = _found(_recipe(world_size=2, quantize=("fp8",)), LargeExperts())
    assert found is not None
    dims, problems = found
    assert dims.intermediate_size == 128
    assert [problem.tokens for problem in problems] == [1, 4, 16, 32, 64]
    assert {(problem.weight_format, problem.intermediate_size) for problem in problems} == {(1, 128)}


@pytest.mark.parametrize(
    ("quantization", "tokens"), [("int4", [1, 16, 512]), ("fp8", [1, 16, 32, 64, 128, 256, 512])]
)
def test_steps_and_chunks_that_cuda_multiplies_are_not_timed(
    quantization: str, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    dims = replace(DIMS, intermediate_size=1024)
    problems = moe_problems(dims, quantization, [1, 16, 32, 64, 128, 256, 512])
    monkeypatch.setattr(tuning, "gpu_target", lambda: H200)
    assert [each.tokens for each in with_choice(problems)] == tokens
    monkeypatch.setattr(tuning, "gpu_target", lambda: replace(H200, kernels=frozenset({"triton"})))
    assert with_choice(problems) == problems


def test_nothing_is_timed_on_an_unknown_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "gpu_target", lambda: lookup((8, 0), "NVIDIA A100-SXM4-80GB", 108))
    assert _found(_recipe(), LargeExperts()) is None


@pytest.mark.parametrize("changes", [{"autotune": False}, {"target": "cpu"}, {"dtype": "float32"}])
def test_nothing_is_timed_when_disabled_or_without_kernels(changes: dict[str, object]) -> None:
    assert _found(_recipe(**changes), LargeExperts()) is None


@pytest.mark.usefixtures("on_h200")
def test_nothing_is_timed_for_stages_without_expert_kernels() -> None:
    assert _found(_recipe(), find("thinker")) is None  # too small
    assert _found(_recipe(), find("talker")) is None


@pytest.mark.parametrize(
    ("graph", "sizes", "has_configs"),
    [
        ("decode_experts", {"B": 4}, True),
        ("prefill_experts", {"T": 64}, True),
        ("decode_experts", {"B": 1}, False),
        ("embed", {"N": 4}, False),
    ],
)
def test_an_engine_is_compiled_with_the_configurations_of_its_size(
    graph: str, sizes: dict[str, int], has_configs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    def compile_(*_: object) -> EngineRecord:
        seen.append(dict(tuned_configs()))
        return EngineRecord(backend="aoti", file="", dims=sizes, compile_seconds=0.0)

    monkeypatch.setattr(graph_task, "load_shard", lambda *_: nn.Module())
    monkeypatch.setattr(graph_task, "share_weights", lambda plan, _: plan)
    monkeypatch.setattr(compile_engine, "compile_engine", compile_)
    monkeypatch.setattr(
        graph_task, "stage_options", lambda recipe: replace(stage_options(recipe), device="cpu")
    )
    problems = moe_problems(DIMS, None, [4, 64])
    records = tuple(
        record_of(Selection(problem=each, config=CONFIG, us=1, default_us=2), DEVICE) for each in problems
    )
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
    assert seen == [
        {problem: CONFIG for problem in problems if problem.tokens == tokens} if has_configs else {}
    ]
    assert tuned_table(records, tokens) == {
        problem: CONFIG for problem in problems if problem.tokens == tokens
    }
    assert not tuned_configs()


def test_engines_with_other_configurations_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aoti, "gpu_target", lambda: H200)
    program = torch.export.export(nn.Identity(), (torch.ones(3),))
    key = lambda: aoti._key(program, {}, "cuda")  # noqa: E731
    plain = key()
    with use_tuned_configs({PROBLEMS[0]: CONFIG, PROBLEMS[1]: CONFIG}):
        tuned = key()
    with use_tuned_configs({PROBLEMS[1]: CONFIG, PROBLEMS[0]: CONFIG}):
        assert key() == tuned
    with use_tuned_configs({PROBLEMS[0]: CONFIG}):
        assert key() not in (plain, tuned)
    assert key() == plain != tuned


def test_keys_cover_the_source_of_all_kernels_and_the_gpu_table() -> None:
    sources = kernel_sources()
    package = Path(mingc.__file__).parent
    parts = [
        "triton/gemv.py",
        "triton/moe_config.py",
        "cuda/flow_sampler.py",
        "cuda/flow_sampler.cu",
        "cuda/int4_experts.py",
        "cuda/int4_experts.cu",
        "cuda/rotary_varlen_attention.py",
        "cuda/rotary_varlen_attention.cu",
        "cuda/nvrtc.py",
    ]
    for path in (*(package / "kernels" / part for part in parts), package / "artifacts" / "target.py"):
        assert path.read_bytes() in sources


def test_engines_for_another_gpu_have_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    program = torch.export.export(nn.Identity(), (torch.ones(3),))
    keys = set()
    for name, count in (("NVIDIA H200", 132), ("NVIDIA H200 MIG 3g.71gb", 60), ("NVIDIA H100", 132)):
        target = lookup((9, 0), name, count)
        monkeypatch.setattr(aoti, "gpu_target", lambda target=target: target)
        keys.add(aoti._key(program, {}, "cuda"))
    assert len(keys) == 3
