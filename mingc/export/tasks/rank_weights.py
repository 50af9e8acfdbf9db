"""The weights of an artifact: of each stage and rank one folder of files, written by any worker process."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from mingc.export.process_pool import gives_memory_back, peak_rss_bytes
from mingc.export.recipe import ExportRecipe, first_shard, stage_options
from mingc.export.source import open_source
from mingc.export.stage import Shard, Stage
from mingc.export.stages import find
from mingc.export.weights.loading import write_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class RankWeights:
    """A rank's weights of a stage, without the submodules at the paths `omitted`."""

    stage: str
    shard: Shard
    name: str  # thinker.rank2; talker for a stage that is not sharded
    omitted: tuple[str, ...]

    @property
    def path(self) -> str:
        """Their folder, relative to the artifact."""
        return f"weights/{self.name}"


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenWeights:
    """Time that writing took, and the peak memory of the process that wrote."""

    seconds: float
    peak_rss_bytes: int


def rank_weights(stage: Stage, recipe: ExportRecipe, omitted: Collection[str]) -> tuple[RankWeights, ...]:
    """The weights of each rank of `stage`, in rank order."""
    ranks = first_shard(stage, recipe).world_size
    return tuple(
        RankWeights(
            stage=stage.name,
            shard=Shard(rank=rank, world_size=ranks),
            name=f"{stage.name}.rank{rank}" if stage.is_sharded else stage.name,
            omitted=tuple(omitted),
        )
        for rank in range(ranks)
    )


@gives_memory_back()
def write_rank(weights: RankWeights, recipe: ExportRecipe, folder: Path) -> WrittenWeights:
    """Write `weights` into the artifact under construction in `folder`.

    Raises: CheckpointError, ExportError.
    """
    started = time.perf_counter()
    checkpoint, stage = open_source(recipe), find(weights.stage)
    write_weights(
        checkpoint,
        stage,
        stage.config(checkpoint),
        weights.shard,
        stage_options(recipe).dtype,
        folder / weights.path,
        recipe.quantization(weights.stage),
        omitted=weights.omitted,
        device=torch.device(recipe.device),
    )
    return WrittenWeights(seconds=time.perf_counter() - started, peak_rss_bytes=peak_rss_bytes())
