"""Preflight check: requirements of an export on this host, checked before reading a checkpoint."""

from __future__ import annotations

import tempfile

import torch

from mingc.errors import ConfigError
from mingc.export.recipe import ExportRecipe


def check_host(recipe: ExportRecipe) -> None:
    """Check the device of the target and the cache folder.

    Raises: ConfigError when there is no such device, or the folder is not writable.
    """
    if recipe.target == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no CUDA device, which compiling and checking CUDA engines needs",
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
                f"{recipe.cache} is not a writable folder: {error.strerror}",
                where="--cache",
                fix="pass another folder, or omit --cache",
            ) from error
