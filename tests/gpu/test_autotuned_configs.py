"""Cuts of the experts' kernels, tried and timed on a CUDA device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mingc.errors import ExportError
from mingc.export.autotune import tuning
from mingc.export.autotune.moe_benchmark import RandomExperts, ShapeTrial, check_result, fits
from mingc.export.autotune.search_space import candidates
from mingc.export.recipe import Quantization
from mingc.export.stage import ExpertDims
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.triton.moe_config import Cut, Shape, Tiles, rule, using

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
DIMS = ExpertDims(
    hidden_size=1024,
    width=512,
    shared_width=512,
    num_experts=32,
    num_groups=4,
    num_kept_groups=2,
    num_chosen=4,
)


def only_shape(tokens: int, quantization: Quantization | None, dims: ExpertDims = DIMS) -> Shape:
    (shape,) = tuning.expert_shapes(dims, quantization, [tokens])
    return shape


@pytest.mark.parametrize("tokens", [1, 16, 100, 300, 1100])
@pytest.mark.parametrize("quantization", [None, "fp8", "int4"])
def test_every_candidate_gives_what_the_rules_cut_does(
    tokens: int, quantization: Quantization | None
) -> None:
    shape = only_shape(tokens, quantization)
    experts = RandomExperts(DIMS, shape.storage)
    (inputs,) = experts.inputs(tokens, 1)
    expected = experts.run(shape, inputs)
    tried = [cut for cut in candidates(shape) if fits(DIMS, shape, cut)]
    assert tried[0] == rule(shape)
    assert len(tried) >= 4
    for cut in tried:
        with using({shape: cut}):
            check_result(shape, cut, experts.run(shape, inputs), expected)
    if shape.kernel != "moe_gemv":
        with plain_torch():
            check_result(shape, tried[0], expected, experts.run(shape, inputs))


def test_a_cut_beyond_the_devices_shared_memory_does_not_fit() -> None:
    shape = only_shape(300, None)
    huge = Tiles(columns=256, depth=256, warps=8, stages=4)
    assert fits(DIMS, shape, rule(shape))
    assert not fits(DIMS, shape, replace(rule(shape), up=huge, down=huge))


def test_times_are_of_the_cuts_asked_for() -> None:
    shape = only_shape(16, None, replace(DIMS, hidden_size=4096, num_experts=256))
    slow = replace(rule(shape), up=Tiles(columns=16, depth=32, stages=1))
    trial = ShapeTrial(RandomExperts(replace(DIMS, hidden_size=4096, num_experts=256), shape.storage), shape)
    first, other, again = trial.time_us([rule(shape), slow, rule(shape)])
    assert 0 < first < other
    assert 0 < again < other


def test_a_cut_that_gives_another_result_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = only_shape(16, None)
    experts = RandomExperts(DIMS, shape.storage)
    trial = ShapeTrial(experts, shape)
    right, other = candidates(shape)[:2]
    trial.time_us([right])
    run = experts.run
    monkeypatch.setattr(experts, "run", lambda *call: 1.1 * run(*call))
    with pytest.raises(ExportError, match="gives other results than the usual one"):
        trial.time_us([other])


def test_choices_are_kept_and_taken_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = tuning.expert_shapes(DIMS, "fp8", [1, 16, 32, 128])
    records = tuning.tune(DIMS, shapes, jobs=4, cache=tmp_path)
    timed = [each.tokens for each in records]
    assert timed == [1, 16, 32, 128]
    for each in records:
        assert each.device == torch.cuda.get_device_name()
        is_default = tuning.cut_of(each) == rule(tuning.shape_of(each))
        assert each.us == each.default_us if is_default else each.us < each.default_us
    monkeypatch.setattr(tuning, "worker_pool", None)
    assert tuning.tune(DIMS, shapes, jobs=4, cache=tmp_path) == records


@pytest.mark.parametrize("is_chosen", [False, True])
def test_compiled_code_has_the_cut_in_use(is_chosen: bool) -> None:
    from torch._inductor.utils import run_and_get_code

    torch._dynamo.reset()
    shape = only_shape(16, None)
    experts = RandomExperts(DIMS, shape.storage)
    (inputs,) = experts.inputs(16, 1)
    cut = Cut(up=Tiles(columns=16, depth=64), down=Tiles(columns=64, depth=64, stages=2))
    expected = experts.run(shape, inputs)
    with (
        using({shape: cut} if is_chosen else {}),
        torch._functorch.config.patch(enable_autograd_cache=False),  # it knows the operation, not its tiles
        torch._inductor.config.patch(fx_graph_cache=False),
    ):
        given, sources = run_and_get_code(torch.compile(experts.run, fullgraph=True), shape, inputs)
    check_result(shape, cut, given, expected)
    assert ("'BN': 16" in "".join(sources)) == is_chosen
