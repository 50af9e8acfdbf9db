"""Weight source of an export: a checkpoint, or synthetic weights."""

from __future__ import annotations

from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.recipe import ExportRecipe
from mingc.export.synthetic.checkpoint import open_synthetic


def open_source(recipe: ExportRecipe) -> Checkpoint:
    """The checkpoint of `recipe`, or random weights with the shapes of its configs.

    Raises: CheckpointError.
    """
    if recipe.synthetic:
        return open_synthetic(recipe.checkpoint, recipe.device)
    return open_checkpoint(recipe.checkpoint)
