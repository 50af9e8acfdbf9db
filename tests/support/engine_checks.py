"""Compare graphs of a stage with its float32 eager module: compiled for the CPU, and in bfloat16."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import is_zipfile

import pytest
import torch
from eager_backend import BACKEND as EAGER
from mingc_command import CACHE
from torch import nn
from torch.nn import functional as F

from mingc.artifacts.artifact import open_artifact
from mingc.export.checkpoint import Checkpoint
from mingc.export.compile.backend import Backend
from mingc.export.compile.backends.aoti import BACKEND as AOTI
from mingc.export.compile.backends.onnx import BACKEND as ONNX
from mingc.export.compile.trace import capture, check_example
from mingc.export.stage import GraphDef, Shard, Stage, StageOptions
from mingc.export.weights.loading import float32_module, load_module, write_weights
from mingc.numerics.relative_error import relative_error
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.base import Engine

CPU = torch.device("cpu")
needs_torch_tensorrt = pytest.mark.skipif(
    importlib.util.find_spec("torch_tensorrt") is None, reason="torch-tensorrt is not installed"
)


def compiled_file(artifact: Path, stage: str, graph: str) -> Path:
    """The package of a graph that the backend `partly` compiles."""
    opened = open_artifact(artifact)
    (engine,) = opened.manifest.stages[stage].graphs[graph].engines
    return opened.path(engine.file)


def compiled_engine(artifact: Path, stage: str, graph: str) -> Engine:
    """The engine of a graph of the artifact `compiled_artifact`, without weights."""
    path = compiled_file(artifact, stage, graph)
    return load_engine("aoti" if is_zipfile(path) else "eager", path, CPU)


def _backends(*slow: Backend) -> pytest.MarkDecorator:
    marks = [pytest.mark.exhaustive, pytest.mark.timeout(600)]
    given = [EAGER, *(pytest.param(backend, marks=marks) for backend in slow)]
    return pytest.mark.parametrize("backend", given, ids=lambda backend: backend.name)


# For graphs whose kinds tests/artifact has compiled, as `backend` of a test.
BACKENDS, BACKENDS_AND_ONNX = _backends(AOTI), _backends(AOTI, ONNX)


def check_engine(
    module: nn.Module,
    plan: GraphDef,
    sizes: Sequence[Mapping[str, int]],
    folder: Path,
    tolerance: float,
    backend: Backend = AOTI,
) -> None:
    """Compare outputs and state of one engine with dynamic dims with those of `module` at all `sizes`."""
    program = capture(plan, module, stage="test", static_shapes=None, device=CPU)
    path = folder / f"{plan.spec.name}{backend.suffix}"
    backend.compile(program, path, device="cpu", cache=CACHE, where=plan.spec.name)
    engine = load_engine(backend.name, path, CPU)
    engine.bind(module.state_dict())
    for size in sizes:
        full = {**plan.check_dims, **size}
        example = plan.example(full, torch.Generator().manual_seed(3))
        check_example(plan.spec, example, full, "test")
        names = [spec.name for spec in (*plan.spec.inputs, *plan.spec.state)]
        eager = {name: example[name].clone() for name in names}
        compiled = {name: example[name].clone() for name in names}
        with torch.no_grad():
            expected = getattr(module, plan.method)(*eager.values())
        got = engine.run([*compiled.values(), *(module.state_dict()[name] for name in plan.spec.weights)])
        for spec, value, reference in zip(plan.spec.outputs, got, expected, strict=True):
            assert value.shape == spec.shape_at(full), f"{spec.name} at {size}"
            assert relative_error(value, reference) < tolerance, f"{spec.name} at {size}"
        for spec in plan.spec.state:
            assert relative_error(compiled[spec.name], eager[spec.name]) < tolerance, f"{spec.name} at {size}"


def check_bfloat16(stage: Stage, checkpoint: Checkpoint, folder: Path, similarity: float) -> None:
    """Run every graph on the weights file of a bfloat16 recipe and compare it with the float32 module."""
    config = stage.config(checkpoint)
    write_weights(checkpoint, stage, config, Shard(), torch.bfloat16, folder / "weights")
    bfloat16 = load_module(stage, config, Shard(), folder / "weights")
    float32 = float32_module(stage, config, checkpoint)
    bfloat16_graphs = stage.graphs(config, Shard(), StageOptions(dtype=torch.bfloat16))
    for plan, reference in zip(bfloat16_graphs, stage.graphs(config, Shard(), StageOptions()), strict=True):
        outputs = []
        for whole, each in ((bfloat16, plan), (float32, reference)):
            module = whole.get_submodule(each.spec.layer_instances[0])
            example = each.example(each.check_dims, torch.Generator().manual_seed(2))
            check_example(each.spec, example, each.check_dims, stage.name)
            with torch.no_grad():
                outputs.append(getattr(module, each.method)(*example.values()))
        for spec, got, expected in zip(plan.spec.outputs, *outputs, strict=True):
            assert str(got.dtype) == f"torch.{spec.dtype}", f"{plan.spec.name}: {spec.name}"
            cosine = F.cosine_similarity(got.float().flatten(), expected.flatten(), dim=0).item()
            assert cosine > similarity, f"{plan.spec.name}: {spec.name} has cosine {cosine}"
