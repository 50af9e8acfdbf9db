"""How the experts' kernels are cut for the device at hand: timed before engines are compiled, kept, handed to them."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch

from mingc.artifacts.codec import decode, encode
from mingc.artifacts.manifest import KernelConfig, TunedKernel
from mingc.artifacts.work_folder import work_folder
from mingc.errors import CompileError, ManifestError
from mingc.export.autotune.moe_benchmark import fits, time_shapes
from mingc.export.autotune.search_space import candidates
from mingc.export.autotune.selection import Choice, families
from mingc.export.compile.backends.aoti import kernel_sources
from mingc.export.process_pool import result_of, worker_pool
from mingc.export.recipe import ExportRecipe, Quantization
from mingc.export.stage import ExpertDims, GraphDef, Shard, Stage
from mingc.kernels.moe_experts import has_kernel
from mingc.kernels.moe_gemv import has_row_kernel
from mingc.kernels.triton.moe_config import BF16, FP8, INT4, Cut, Shape, Tiles, kernel_of, rule

_STORAGE_NAMES: dict[int, Literal["bfloat16", "fp8", "int4"]] = {BF16: "bfloat16", FP8: "fp8", INT4: "int4"}
_STORAGES: dict[str, int] = {name: number for number, name in _STORAGE_NAMES.items()}
_WORKER_BYTES = 1 << 30  # of a process on the device, beside the weights: its context and a chunk's outputs


def to_tune(
    recipe: ExportRecipe, stage: Stage, config: Any, plans: Iterable[GraphDef]
) -> tuple[ExpertDims, tuple[Shape, ...]] | None:
    """What is there to time for a stage, by its graphs; None: nothing."""
    if not recipe.autotune or recipe.target != "cuda" or recipe.dtype != "bfloat16":
        return None
    dims = stage.experts(config, Shard(world_size=recipe.world_size))
    if dims is None:
        return None
    routed = (plan.spec for plan in plans if plan.routing is not None)
    tokens = [count for spec in routed for sizes in spec.bucket_sizes() for count in sizes.values()]
    shapes = expert_shapes(dims, recipe.quantization(stage.name), tokens)
    return (dims, shapes) if shapes else None


def expert_shapes(
    dims: ExpertDims, quantization: Quantization | None, tokens: Iterable[int]
) -> tuple[Shape, ...]:
    """The shapes that kernels work on in steps and chunks of so many tokens; none where plain torch does the work."""
    storage = _STORAGES[quantization or "bfloat16"]
    if not has_kernel(dims.hidden_size, dims.width, dims.num_experts):
        return ()
    has_row = (
        storage != INT4
        and dims.shared_width in (0, dims.width)
        and has_row_kernel(dims.hidden_size, dims.num_experts, dims.num_groups, dims.width)
    )
    return tuple(
        Shape(
            kernel="moe_gemv" if count == 1 and has_row else kernel_of(count, storage),
            tokens=count,
            hidden_size=dims.hidden_size,
            width=dims.width,
            experts=dims.num_experts,
            chosen=dims.num_chosen,
            storage=storage,
        )
        for count in sorted({*tokens})
    )


def tune(
    dims: ExpertDims, shapes: Sequence[Shape], *, jobs: int, cache: Path | None
) -> tuple[TunedKernel, ...]:
    """Time cuts of the kernels for `shapes` on this machine's CUDA device, or take what `cache` has of them.

    Of shapes that the rule cuts alike those with the fewest and the most tokens are timed. Where these two agree on the
    rule's cut the others are left to it, and have no record; on another one, only that is tried for the others.

    Raises: ExportError, CompileError.
    """
    known = {shape: record for shape in shapes if (record := _kept(cache, shape)) is not None}
    groups = families(shapes)
    with ExitStack() as stack:
        # Started once, and only when the cache lacks something.
        pool = functools.cache(lambda: stack.enter_context(worker_pool(_jobs(jobs, dims, shapes[0]))))

        def time_missing(cuts: Mapping[Shape, tuple[Cut, ...]]) -> None:
            missing = {shape: each for shape, each in cuts.items() if shape not in known}
            if missing:
                known.update(_time(pool(), dims, missing, cache))

        time_missing({shape: candidates(shape) for group in groups for shape in (group[0], group[-1])})
        between: dict[Shape, tuple[Cut, ...]] = {}
        for group in groups:
            winners = {cut_of(known[group[0]]), cut_of(known[group[-1]])}
            if winners == {rule(group[0])}:
                continue
            for shape in group[1:-1]:
                between[shape] = (rule(shape), *winners) if len(winners) == 1 else candidates(shape)
        time_missing(between)
    return tuple(known[shape] for shape in shapes if shape in known)


def engine_table(kernels: Iterable[TunedKernel], tokens: int) -> dict[Shape, Cut]:
    """What an engine for `tokens` tokens is to use, for `mingc.kernels.triton.moe_config.using`."""
    return {shape_of(each): cut_of(each) for each in kernels if each.tokens == tokens}


def shape_of(record: TunedKernel) -> Shape:
    """What a record was timed for."""
    return Shape(
        kernel=record.kernel,
        tokens=record.tokens,
        hidden_size=record.hidden_size,
        width=record.width,
        experts=record.experts,
        chosen=record.chosen,
        storage=_STORAGES[record.storage],
    )


def cut_of(record: TunedKernel) -> Cut:
    """The cut that was chosen."""
    return Cut(
        up=Tiles(**encode(record.up)),
        down=Tiles(**encode(record.down)),
        rows=record.rows,
        swap=record.swap,
        extra=record.extra,
    )


def record_of(choice: Choice, device: str) -> TunedKernel:
    """A choice as the manifest tells it."""
    shape, cut = choice.shape, choice.cut
    return TunedKernel(
        kernel=shape.kernel,
        tokens=shape.tokens,
        hidden_size=shape.hidden_size,
        width=shape.width,
        experts=shape.experts,
        chosen=shape.chosen,
        storage=_STORAGE_NAMES[shape.storage],
        up=KernelConfig(**encode(cut.up)),
        down=KernelConfig(**encode(cut.down)),
        rows=cut.rows,
        swap=cut.swap,
        extra=cut.extra,
        us=round(choice.us, 2),
        default_us=round(choice.default_us, 2),
        device=device,
    )


def _time(
    pool: Executor, dims: ExpertDims, cuts: Mapping[Shape, tuple[Cut, ...]], cache: Path | None
) -> dict[Shape, TunedKernel]:
    """Records of all of `cuts`, written to the cache as well."""
    fitting = _compile(pool, dims, cuts)
    # One process, alone: what compiles beside it would be in the times.
    choices = result_of(pool.submit(time_shapes, dims, [*fitting.items()]), "tiles")
    device = torch.cuda.get_device_name()
    records = {choice.shape: record_of(choice, device) for choice in choices}
    for shape, record in records.items():
        _keep(cache, shape, record)
    return records


def _compile(
    pool: Executor, dims: ExpertDims, cuts: Mapping[Shape, tuple[Cut, ...]]
) -> dict[Shape, tuple[Cut, ...]]:
    """Fill Triton's cache with all of `cuts`, the rules' first, and leave out those that do not fit."""
    pairs = sorted(
        ((shape, cut) for shape, each in cuts.items() for cut in each),
        key=lambda pair: pair[1] != rule(pair[0]),
    )
    futures = {pair: pool.submit(fits, dims, *pair) for pair in pairs}
    is_fitting = {pair: result_of(future, "tiles") for pair, future in futures.items()}
    for shape in cuts:
        if not is_fitting[shape, rule(shape)]:
            raise CompileError(
                f"the experts' kernels for {shape.tokens} tokens need more than this device has",
                where=f"{shape.kernel} kernels, {rule(shape)}",
                fix="export on another device, or other sizes",
            )
    return {shape: tuple(cut for cut in each if is_fitting[shape, cut]) for shape, each in cuts.items()}


def _jobs(wished: int, dims: ExpertDims, shape: Shape) -> int:
    """As many processes as have room on the device for the weights of all experts each, and one for drawn ones."""
    values = 3 * dims.width * dims.hidden_size * (dims.num_experts + 1)
    bytes_each = values * 2 if shape.storage == BF16 else values
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(wished, (free - bytes_each) // (bytes_each + _WORKER_BYTES)))


def _kept(cache: Path | None, shape: Shape) -> TunedKernel | None:
    """The record of an earlier export; what is not readable is timed anew."""
    if cache is None:
        return None
    try:
        return decode(TunedKernel, json.loads(_cache_file(cache, shape).read_text(encoding="utf-8")))
    except (OSError, ValueError, ManifestError):
        return None


def _keep(cache: Path | None, shape: Shape, record: TunedKernel) -> None:
    if cache is None:
        return
    kept = _cache_file(cache, shape)
    with work_folder(cache, "tiles-") as folder:
        part = folder / kept.name
        part.write_text(json.dumps(encode(record)), encoding="utf-8")
        os.replace(part, kept)


def _cache_file(cache: Path, shape: Shape) -> Path:
    """Named for all that decides a timing: shape, device, torch, which brings the compiler, and the kernels."""
    digest = hashlib.sha256(f"{shape}\0{torch.cuda.get_device_name()}\0{torch.__version__}\0".encode())
    digest.update(kernel_sources())
    return cache / f"tiles-{digest.hexdigest()}.json"
