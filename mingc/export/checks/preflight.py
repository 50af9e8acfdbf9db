"""What an export needs of this machine, told before it reads a checkpoint."""

from __future__ import annotations

import tempfile

import torch

from mingc.errors import ConfigError
from mingc.export.recipe import ExportRecipe


def check_host(recipe: ExportRecipe) -> None:
    """Raises: ConfigError when the target's device is not there, or the cache's folder cannot be written."""
    if recipe.target == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no CUDA device here, and engines for CUDA are compiled and checked on one",
            where="--target cuda",
            fix="export on a machine with a GPU and a CUDA build of torch (mingc doctor), or pass --target cpu",
        )
    if recipe.cache is not None:
        try:
            recipe.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=recipe.cache):
                pass
        except OSError as error:
            raise ConfigError(
                f"{recipe.cache} is no folder that can be written: {error.strerror}",
                where="--cache",
                fix="pass another folder, or leave --cache out",
            ) from error
