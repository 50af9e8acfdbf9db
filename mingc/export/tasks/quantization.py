"""Task of a worker process: the end-to-end error of a stage's quantized weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from mingc.artifacts.manifest import QuantizationError
from mingc.export.process_pool import gives_memory_back
from mingc.export.recipe import ExportRecipe
from mingc.export.source import open_source
from mingc.export.stage import Stage
from mingc.export.stages import find
from mingc.export.tasks.graph_task import shards_of
from mingc.export.weights.loading import float32_module, load_module
from mingc.export.weights.quantization import in_float32


@gives_memory_back()
def measure_quantization_error(
    recipe: ExportRecipe, stage_name: str, folder: Path, weights: tuple[str, ...]
) -> QuantizationError | None:
    """End-to-end error of the quantized weights of a stage; None when the stage does not measure it."""
    stage = find(stage_name)
    checkpoint = open_source(recipe)
    config = stage.config(checkpoint)

    def exact(submodule: str) -> nn.Module:
        return float32_module(stage, config, checkpoint, submodule=submodule)

    def stored(submodule: str) -> list[nn.Module]:
        return stored_modules(recipe, stage, config, folder, weights, submodule)

    return stage.quantization_error(config, exact, stored)


def stored_modules(
    recipe: ExportRecipe, stage: Stage, config: Any, folder: Path, weights: tuple[str, ...], submodule: str
) -> list[nn.Module]:
    """The module of every rank, or its part `submodule`, computing in float32 over its weights in `folder`."""
    quantization = recipe.quantization(stage.name)
    return [
        in_float32(load_module(stage, config, shard, folder / path, quantization, submodule=submodule))
        for shard, path in zip(shards_of(weights), weights, strict=True)
    ]
