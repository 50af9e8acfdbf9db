"""Where the weights of an export come from."""

from __future__ import annotations

from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.recipe import ExportRecipe
from mingc.export.weights.synthetic import open_synthetic


def open_source(recipe: ExportRecipe) -> Checkpoint:
    """The checkpoint that `recipe` names, or random weights over its configs.

    Raises: CheckpointError.
    """
    if recipe.synthetic:
        return open_synthetic(recipe.checkpoint, recipe.target)
    return open_checkpoint(recipe.checkpoint)
