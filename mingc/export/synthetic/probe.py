"""Recipe and output folder of the export that `mingc probe --synthetic` runs first."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from mingc.artifacts.work_folder import work_folder
from mingc.errors import ConfigError
from mingc.export.checkpoint import Checkpoint
from mingc.export.recipe import ExportRecipe, stage_options
from mingc.export.stage import Shard
from mingc.export.stages import discover
from mingc.export.synthetic.checkpoint import open_synthetic

_PATCH_EMBED = "patch-embed"


def synthetic_recipe(
    configs: Path,
    output: Path,
    engines: Sequence[str] | None,
    batch_sizes: Sequence[int] | None,
    *,
    jobs: int,
    cache: Path | None,
    compare: str | None = None,
) -> ExportRecipe:
    """The recipe for random weights with `engines` (stages, or graphs such as `cfm.sample`) at `batch_sizes`.

    It exports in bfloat16 on a GPU if there is one, else in float32 on the CPU. No engines means all stages except
    sharded ones, whose weights may be larger than the disk; no batch sizes means the defaults. Raises: CheckpointError;
    ConfigError when the export would not contain an engine, or what `compare` needs.
    """
    checkpoint, has_gpu = open_synthetic(configs), torch.cuda.is_available()
    known = {name: stage for name, stage in discover().items() if stage.is_present(checkpoint)}
    asked = dict.fromkeys(name.partition(".")[0] for name in engines or ())
    _check(asked, known, "stages")
    stages = [*asked] or [name for name, stage in known.items() if not stage.is_sharded]
    if compare == _PATCH_EMBED and "vision_encoder" not in stages:
        raise ConfigError(
            "the vision encoder would not be exported",
            where=f"--compare {_PATCH_EMBED}",
            fix="leave --compare out, or name vision_encoder in --engine",
        )
    recipe = ExportRecipe(
        checkpoint=configs,
        output=output,
        target="cuda" if has_gpu else "cpu",
        dtype="bfloat16" if has_gpu else "float32",
        stages=tuple(stages),
        jobs=jobs,
        cache=cache,
        synthetic=True,
    )
    if batch_sizes is not None:
        recipe = replace(recipe, batch_sizes=tuple(sorted({*batch_sizes})))
    graphs = [name for stage in stages for name in (stage, *_graphs(stage, checkpoint, recipe))]
    _check(engines or (), graphs, "stages and graphs")
    return recipe


@contextmanager
def probe_folder(requested: Path | None) -> Iterator[Path]:
    """The folder for the artifact of a probe: `requested`, or a temporary one.

    Leftovers of killed probes are removed. Raises: ConfigError when `requested` already exists.
    """
    if requested is not None:
        if requested.exists() or requested.is_symlink():
            raise ConfigError(
                f"{requested} exists",
                where="--synthetic",
                fix="leave --synthetic out to probe it, or name a folder that is not there yet",
            )
        yield requested
        return
    with work_folder(Path(tempfile.gettempdir()), "mingc-probe-", mode=0o700) as folder:
        yield folder / "artifact"


def _graphs(stage: str, checkpoint: Checkpoint, recipe: ExportRecipe) -> list[str]:
    """The graphs of `stage` as `--engine` names them."""
    found = discover()[stage]
    plans = found.graphs(found.config(checkpoint), Shard(), stage_options(recipe))
    return [f"{stage}.{plan.spec.name}" for plan in plans]


def _check(asked: Iterable[str], known: Collection[str], what: str) -> None:
    unknown = [name for name in asked if name not in known]
    if unknown:
        raise ConfigError(
            f"the configs have no {', '.join(unknown)}",
            where="--engine",
            fix=f"their {what}: {', '.join(known)}",
        )
