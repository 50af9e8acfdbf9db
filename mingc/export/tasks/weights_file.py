"""Weights files of an artifact: one per rank and stage, written by any worker process."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from mingc.export.checkpoint import Checkpoint
from mingc.export.process_pool import gives_memory_back, peak_rss_bytes
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stage import Shard, Stage
from mingc.export.stages import find
from mingc.export.weights.loading import write_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsFile:
    """One weights file: a rank's weights without the submodules at the paths `omitted`."""

    stage: str
    shard: Shard
    name: str  # thinker.rank2; talker for a stage that is not sharded
    omitted: tuple[str, ...]

    @property
    def path(self) -> str:
        """Relative to the artifact."""
        return f"weights/{self.name}.safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """Time that writing a file took, and the peak memory of the process that wrote it."""

    seconds: float
    peak_rss_bytes: int


def weights_files(stage: Stage, recipe: ExportRecipe, omitted: Collection[str]) -> tuple[WeightsFile, ...]:
    """One file per rank of `stage`, in rank order."""
    ranks = first_shard(stage, recipe).world_size
    return tuple(
        WeightsFile(
            stage=stage.name,
            shard=Shard(rank=rank, world_size=ranks),
            name=f"{stage.name}.rank{rank}" if stage.is_sharded else stage.name,
            omitted=tuple(omitted),
        )
        for rank in range(ranks)
    )


@gives_memory_back()
def write_file(file: WeightsFile, recipe: ExportRecipe, checkpoint: Checkpoint, folder: Path) -> WrittenFile:
    """Write `file` into the artifact under construction in `folder`.

    Raises: CheckpointError, ExportError.
    """
    started = time.perf_counter()
    stage = find(file.stage)
    write_weights(
        checkpoint,
        stage,
        stage.config(checkpoint),
        file.shard,
        stage_options(recipe).dtype,
        folder / file.path,
        recipe.quantization(file.stage),
        omitted=file.omitted,
        device=torch.device(recipe.device),
    )
    return WrittenFile(seconds=time.perf_counter() - started, peak_rss_bytes=peak_rss_bytes())


def write_in_worker(file: WeightsFile, recipe: ExportRecipe, folder: Path) -> WrittenFile:
    """`write_file` for a worker process, which opens the checkpoint itself."""
    return write_file(file, recipe, open_source(recipe), folder)
