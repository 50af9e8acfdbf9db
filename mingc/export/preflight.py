"""Preflight checks: requirements of an export on this host, checked before any work that would fail without them."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mingc.artifacts.target import cuda_capability, sm_name
from mingc.errors import ConfigError
from mingc.export.checkpoint import Checkpoint
from mingc.export.recipe import BACKEND, ExportRecipe
from mingc.export.stage import Shard, Stage
from mingc.host.cxx_compiler import INSTALL, compiler, compiler_problem
from mingc.host.machine import gpu

_DTYPE_BYTES = {"float32": 4.0, "bfloat16": 2.0}
_QUANTIZED_BYTES = {"fp8": 1.0, "int4": 0.5}
_ENGINE_BYTES = 1 << 20  # least size of a compiled engine; engines of the tiny checkpoint take 3 MiB and more


def resolve_target(target: str) -> str:
    """`cuda` for `cuda:smNN`, which names the GPU that must be in this machine; any other target unchanged.

    Raises: ConfigError when the name is invalid, or this machine has another GPU. `check_host` handles a missing GPU.
    """
    try:
        wanted = cuda_capability(target)
    except ValueError as error:
        raise ConfigError(
            f"--target {target}: {error}", where="mingc export", fix="see mingc export --help"
        ) from error
    if wanted is not None and torch.cuda.is_available() and (here := gpu().capability) != wanted:
        raise ConfigError(
            f"the GPU here is {sm_name(here)} ({gpu().name}); CUDA engines are compiled and checked on the GPU "
            "that they are for",
            where=f"--target {target}",
            fix=f"export on a machine with {sm_name(wanted)}, or pass --target cuda for this GPU",
        )
    return target if wanted is None else "cuda"


def check_host(recipe: ExportRecipe) -> None:
    """Check the device of the target, the C++ compiler and the cache folder.

    Raises: ConfigError when the device is missing, the compiler is missing or unfit, or the folder is not writable.
    """
    if recipe.target == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "torch finds no CUDA device, which compiling and checking CUDA engines needs",
            where="--target cuda",
            fix="export on a machine with a GPU and a CUDA build of torch (mingc doctor), or pass --target cpu",
        )
    if BACKEND in {word.partition(":")[0] for word in recipe.backend}:
        name = compiler()
        problem = ("there is no C++ compiler", INSTALL) if name is None else compiler_problem(name)
        if problem is not None:
            raise ConfigError(problem[0], where=f"--backend {' '.join(recipe.backend)}", fix=problem[1])
    if recipe.cache is not None:
        try:
            recipe.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=recipe.cache):
                pass
        except OSError as error:
            raise ConfigError(
                f"{recipe.cache} is not a writable folder: {error.strerror}",
                where="--cache",
                fix="pass another folder with --cache, or pass --no-cache",
            ) from error


def check_space(
    recipe: ExportRecipe,
    checkpoint: Checkpoint,
    stages: Sequence[Stage],
    configs: Mapping[str, Any],
    num_engines: int,
) -> None:
    """Compare the free space at the output with a lower bound of the artifact's size.

    Raises: ConfigError when the artifact cannot fit.
    """
    needed = num_engines * _ENGINE_BYTES
    if not recipe.synthetic:  # random weights are stored for a few layers
        needed += sum(_weight_bytes(recipe, checkpoint, stage, configs[stage.name]) for stage in stages)
    folder = recipe.output.absolute().parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise ConfigError(
            f"the artifact needs at least {_size(needed)}, {folder} has {_size(free)} free",
            where="--output",
            fix="free some space there, pass a folder on another disk, or store weights in fewer bits (--quantize)",
        )


def _weight_bytes(recipe: ExportRecipe, checkpoint: Checkpoint, stage: Stage, config: Any) -> int:
    """Lower bound for the weights of `stage`, in bytes: if some are quantized, all count as quantized."""
    quantization = recipe.quantization(stage.name)
    size = _DTYPE_BYTES[recipe.dtype] if quantization is None else _QUANTIZED_BYTES[quantization]
    used = {(source.part, name) for source in stage.weights(config, Shard()) for name in source.tensors}
    count = sum(math.prod(checkpoint.parts[part].tensors[name].shape) for part, name in used)
    return int(count * size)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.0f} MiB"
