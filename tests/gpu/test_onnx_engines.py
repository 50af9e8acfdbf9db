"""ONNX Runtime's engines on a GPU, compared with their modules; needs the distribution `onnxruntime-gpu`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mingc_command import CHECKPOINT
from sliding_window import Sliding
from torch import Tensor

from mingc.export.checkpoint import open_checkpoint
from mingc.export.compile.backends.onnx import BACKEND
from mingc.export.compile.trace import trace_graph
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages import find
from mingc.export.weights.loading import float32_module
from mingc.host.onnx_library import has_cuda_provider
from mingc.numerics.relative_error import relative_error
from mingc.runtime.engines.backends.onnx import load

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not has_cuda_provider(), reason="needs onnxruntime-gpu"),
]
# Of each stage one, at one size: state in rings and slots, attention with masks, a solver, Fourier transforms.
GRAPHS = {
    "audio_encoder.encode": {"N": 1, "T4": 25},
    "cfm.sample": {"B": 2},
    "talker.step": {"B": 2},
    "audio_vae.stream": {"B": 2},
}


def arguments(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(4)
    x, window, rows = (
        torch.randn(size, 3, generator=generator).to(device=device, dtype=dtype) for size in (3, 4, 9)
    )
    return x, window, rows, torch.randperm(9, generator=generator)[:3].to(device)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_calls_follow_torchs_work_and_precede_it(
    dtype: torch.dtype, tolerance: float, tmp_path: Path
) -> None:
    """Every call reads the state that the one before has written, and inputs that torch has just computed."""
    device = torch.device("cuda", 0)
    torch.manual_seed(3)
    module = Sliding().to(device=device, dtype=dtype)
    path = tmp_path / "sliding.onnx"
    with torch.no_grad():
        program = torch.export.export(module, arguments(dtype, device), strict=False)
    BACKEND.compile(program, path, device="cuda", cache=None, where="test.graph")
    engine = load(path, device)
    engine.bind(module.model.state_dict())
    mine, theirs = arguments(dtype, device), arguments(dtype, device)
    for _ in range(20):
        with torch.no_grad():
            expected = module(*theirs)
        got = engine.run(mine)
        for inputs in (mine, theirs):
            inputs[0].mul_(0.9)  # on its stream
    for value, reference in zip((*got, *mine), (*expected, *theirs), strict=True):
        assert relative_error(value.float(), reference.float()) < tolerance


@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_agrees_with_its_module(name: str, tmp_path: Path) -> None:
    device, checkpoint = torch.device("cuda", 0), open_checkpoint(CHECKPOINT)
    stage_name, _, graph = name.partition(".")
    stage = find(stage_name)
    config = stage.config(checkpoint)
    options = StageOptions(device="cuda", static_buckets=True)
    (plan,) = [each for each in stage.graphs(config, Shard(), options) if each.spec.name == graph]
    module = float32_module(stage, config, checkpoint).float().to(device)
    sizes = GRAPHS[name]
    backend = BACKEND.for_graph(plan, sizes, "cuda")
    program = trace_graph(backend, plan, module, stage=stage_name, sizes=sizes, device="cuda")
    path = tmp_path / "graph.onnx"
    backend.compile(program, path, device="cuda", cache=None, where=name)
    engine = load(path, device)
    engine.bind(module.state_dict())
    pools = {each.name: 9 for each in plan.spec.dims if not each.buckets}
    example = plan.example({**plan.check_dims, **pools, **sizes}, torch.Generator().manual_seed(3))
    tensors = (*plan.spec.inputs, *plan.spec.state)
    mine, theirs = ([example[each.name].to(device, copy=True) for each in tensors] for _ in range(2))
    with torch.no_grad():
        expected = getattr(module, plan.method)(*theirs)
    outputs = [*engine.run(mine), *mine]
    del engine  # while its work is queued
    for value, reference in zip(outputs, (*expected, *theirs), strict=True):
        assert relative_error(value, reference) < 1e-4
