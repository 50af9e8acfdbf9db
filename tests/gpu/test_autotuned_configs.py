"""Configurations of the mixture-of-experts kernels, run and timed on a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mingc.artifacts.spec import Quantization
from mingc.artifacts.target import KernelConfig
from mingc.errors import ExportError
from mingc.export.autotune import tuning
from mingc.export.autotune.moe_benchmark import ProblemTimer, RandomExperts, check_result, fits
from mingc.export.autotune.search_space import search_space
from mingc.export.stage import ExpertDims
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.triton.moe_config import (
    MoeConfig,
    MoeProblem,
    default_config,
    use_tuned_configs,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIMS = ExpertDims(
    hidden_size=1024,
    intermediate_size=512,
    shared_intermediate_size=512,
    num_experts=32,
    num_groups=4,
    num_kept_groups=2,
    top_k=4,
)


def only_problem(tokens: int, quantization: Quantization | None, dims: ExpertDims = DIMS) -> MoeProblem:
    (problem,) = tuning.moe_problems(dims, quantization, [tokens])
    return problem


@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 1100])
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_every_configuration_gives_the_result_of_the_default(
    tokens: int, quantization: Quantization | None
) -> None:
    problem = only_problem(tokens, quantization)
    experts = RandomExperts(DIMS, problem.weight_format)
    (inputs,) = experts.inputs(tokens, 1)
    expected = experts.run(problem, inputs)
    tried = [config for config in search_space(problem) if fits(DIMS, problem, config)]
    assert tried[0] == default_config(problem)
    assert len(tried) >= 4
    for config in tried:
        with use_tuned_configs({problem: config}):
            check_result(problem, config, experts.run(problem, inputs), expected)
    if problem.kernel != "moe_gemv":
        with plain_torch():
            check_result(problem, tried[0], expected, experts.run(problem, inputs))


def test_a_configuration_beyond_shared_memory_does_not_fit() -> None:
    problem = only_problem(300, None)
    huge = KernelConfig(block_n=256, block_k=256, num_warps=8, num_stages=4)
    assert fits(DIMS, problem, default_config(problem))
    assert not fits(DIMS, problem, replace(default_config(problem), up=huge, down=huge))


def test_each_time_belongs_to_its_configuration() -> None:
    problem = only_problem(16, None, replace(DIMS, hidden_size=4096, num_experts=256))
    slow = replace(default_config(problem), up=KernelConfig(block_n=16, block_k=32, num_stages=1))
    timer = ProblemTimer(
        RandomExperts(replace(DIMS, hidden_size=4096, num_experts=256), problem.weight_format), problem
    )
    first, other, again = timer.time_us([default_config(problem), slow, default_config(problem)])
    assert 0 < first < other
    assert 0 < again < other


def test_a_configuration_with_another_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = only_problem(16, None)
    experts = RandomExperts(DIMS, problem.weight_format)
    timer = ProblemTimer(experts, problem)
    right, other = search_space(problem)[:2]
    timer.time_us([right])
    run = experts.run
    monkeypatch.setattr(experts, "run", lambda *call: 1.1 * run(*call))
    with pytest.raises(ExportError, match="gives another result than the default"):
        timer.time_us([other])


def test_records_are_cached_and_reused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = tuning.moe_problems(DIMS, "fp8", [1, 16, 32, 128])
    records = tuning.autotune(DIMS, problems, jobs=4, cache=tmp_path)
    timed = [each.tokens for each in records]
    assert timed == [1, 16, 32, 128]
    for each in records:
        assert each.device == torch.cuda.get_device_name()
        is_default = tuning.config_of(each) == default_config(tuning.problem_of(each))
        assert each.us == each.default_us if is_default else each.us < each.default_us
    monkeypatch.setattr(tuning, "worker_pool", None)
    assert tuning.autotune(DIMS, problems, jobs=4, cache=tmp_path) == records


@pytest.mark.parametrize("is_tuned", [False, True])
def test_compiled_code_uses_the_tuned_configuration(is_tuned: bool) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    problem = only_problem(16, None)
    experts = RandomExperts(DIMS, problem.weight_format)
    (inputs,) = experts.inputs(16, 1)
    config = MoeConfig(
        up=KernelConfig(block_n=16, block_k=64), down=KernelConfig(block_n=64, block_k=64, num_stages=2)
    )
    expected = experts.run(problem, inputs)
    with (
        use_tuned_configs({problem: config} if is_tuned else {}),
        torch._functorch.config.patch(enable_autograd_cache=False),  # its key lacks the configuration
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        given, sources = run_and_get_code(torch.compile(experts.run, fullgraph=True), problem, inputs)
    check_result(problem, config, given, expected)
    assert ("'BLOCK_N': 16" in "".join(sources)) == is_tuned
