"""Autotuning of the mixture-of-experts kernels on the GPU of an export: what to time, the cache, the records."""

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
from mingc.artifacts.manifest import TunedKernel
from mingc.artifacts.spec import Quantization
from mingc.artifacts.work_folder import work_folder
from mingc.errors import CompileError, ManifestError
from mingc.export.autotune.moe_benchmark import fits, time_problems
from mingc.export.autotune.search_space import search_space
from mingc.export.autotune.selection import Selection, group_by_default
from mingc.export.compile.engine_cache import writing_cache
from mingc.export.compile.kernel_sources import kernel_sources
from mingc.export.process_pool import result_of, worker_pool
from mingc.export.recipe import ExportRecipe
from mingc.export.stage import ExpertDims, GraphDef, Shard, Stage
from mingc.host.machine import gpu_target
from mingc.kernels.moe_experts import has_int4_kernel, has_kernel
from mingc.kernels.moe_gemv import has_gemv_kernel
from mingc.kernels.triton.moe_config import (
    BF16,
    FP8,
    INT4,
    MoeConfig,
    MoeProblem,
    default_config,
    kernel_for,
)

_FORMAT_NAMES: dict[int, Literal["bfloat16", "fp8", "int4"]] = {BF16: "bfloat16", FP8: "fp8", INT4: "int4"}
_FORMATS: dict[str, int] = {name: number for number, name in _FORMAT_NAMES.items()}
_WORKER_BYTES = 1 << 30  # GPU memory of a process beside the weights: its context and a chunk's outputs


def problems_to_tune(
    recipe: ExportRecipe, stage: Stage, config: Any, graphs: Iterable[GraphDef]
) -> tuple[ExpertDims, tuple[MoeProblem, ...]] | None:
    """Problems of a stage that are worth timing, from its graphs; None if there are none."""
    if not recipe.autotune or recipe.target != "cuda" or recipe.dtype != "bfloat16":
        return None
    if "triton" not in gpu_target().kernels:
        return None
    dims = stage.experts(config, Shard(world_size=recipe.world_size))
    if dims is None:
        return None
    routed = (graph.spec for graph in graphs if graph.routing is not None)
    tokens = [count for spec in routed for sizes in spec.bucket_sizes() for count in sizes.values()]
    problems = with_choice(moe_problems(dims, recipe.quantization(stage.name), tokens))
    return (dims, problems) if problems else None


def with_choice(problems: Iterable[MoeProblem]) -> tuple[MoeProblem, ...]:
    """Those of `problems` that Triton runs on the current GPU: CUDA C++ has no configuration to choose."""
    has_clusters = "clusters" in gpu_target().kernels
    return tuple(
        each
        for each in problems
        if each.weight_format != INT4
        or not has_clusters
        or not has_int4_kernel(each.tokens, each.hidden_size, each.intermediate_size)
    )


def moe_problems(
    dims: ExpertDims, quantization: Quantization | None, tokens: Iterable[int]
) -> tuple[MoeProblem, ...]:
    """Problems of the kernels for steps and chunks of these token counts; empty where plain torch runs instead."""
    weight_format = _FORMATS[quantization or "bfloat16"]
    if not has_kernel(dims.hidden_size, dims.intermediate_size, dims.num_experts):
        return ()
    has_moe_gemv = (
        weight_format != INT4
        and dims.shared_intermediate_size in (0, dims.intermediate_size)
        and has_gemv_kernel(dims.hidden_size, dims.num_experts, dims.num_groups, dims.intermediate_size)
    )
    return tuple(
        MoeProblem(
            kernel="moe_gemv" if count == 1 and has_moe_gemv else kernel_for(count, weight_format),
            tokens=count,
            hidden_size=dims.hidden_size,
            intermediate_size=dims.intermediate_size,
            experts=dims.num_experts,
            top_k=dims.top_k,
            weight_format=weight_format,
        )
        for count in sorted({*tokens})
    )


def autotune(
    dims: ExpertDims, problems: Sequence[MoeProblem], *, jobs: int, cache: Path | None
) -> tuple[TunedKernel, ...]:
    """Time configurations for `problems` on this machine's GPU, or read earlier results from `cache`.

    Among problems with the same default configuration, the problems with the fewest and the most tokens are timed. If
    both select the default, the others use it too and have no record. If both select the same other configuration, the
    others are timed with it and the default only.

    Raises: ExportError, CompileError.
    """
    known = {problem: record for problem in problems if (record := _read_cache(cache, problem)) is not None}
    groups = group_by_default(problems)
    with ExitStack() as stack:
        # Started once, and only when the cache lacks something.
        pool = functools.cache(lambda: stack.enter_context(worker_pool(_num_jobs(jobs, dims, problems[0]))))

        def time_missing(configs: Mapping[MoeProblem, tuple[MoeConfig, ...]]) -> None:
            missing = {problem: each for problem, each in configs.items() if problem not in known}
            if missing:
                known.update(_time(pool(), dims, missing, cache))

        time_missing(
            {problem: search_space(problem) for group in groups for problem in (group[0], group[-1])}
        )
        between: dict[MoeProblem, tuple[MoeConfig, ...]] = {}
        for group in groups:
            winners = {config_of(known[group[0]]), config_of(known[group[-1]])}
            default = default_config(group[0])
            if winners == {default}:
                continue
            for problem in group[1:-1]:
                between[problem] = (default, *winners) if len(winners) == 1 else search_space(problem)
        time_missing(between)
    return tuple(known[problem] for problem in problems if problem in known)


def tuned_table(records: Iterable[TunedKernel], tokens: int) -> dict[MoeProblem, MoeConfig]:
    """Configurations of an engine for `tokens` tokens, for `mingc.kernels.triton.moe_config.use_tuned_configs`."""
    return {problem_of(each): config_of(each) for each in records if each.tokens == tokens}


def problem_of(record: TunedKernel) -> MoeProblem:
    """The problem a record was timed for."""
    return MoeProblem(
        kernel=record.kernel,
        tokens=record.tokens,
        hidden_size=record.hidden_size,
        intermediate_size=record.intermediate_size,
        experts=record.experts,
        top_k=record.top_k,
        weight_format=_FORMATS[record.weight_format],
    )


def config_of(record: TunedKernel) -> MoeConfig:
    """The configuration a record selected."""
    return MoeConfig(
        up=record.up,
        down=record.down,
        block_m=record.block_m,
        swap_operands=record.swap_operands,
        extra_rows=record.extra_rows,
    )


def record_of(selection: Selection, device: str) -> TunedKernel:
    """A selection as the manifest stores it."""
    problem, config = selection.problem, selection.config
    return TunedKernel(
        kernel=problem.kernel,
        tokens=problem.tokens,
        hidden_size=problem.hidden_size,
        intermediate_size=problem.intermediate_size,
        experts=problem.experts,
        top_k=problem.top_k,
        weight_format=_FORMAT_NAMES[problem.weight_format],
        up=config.up,
        down=config.down,
        block_m=config.block_m,
        swap_operands=config.swap_operands,
        extra_rows=config.extra_rows,
        us=round(selection.us, 2),
        default_us=round(selection.default_us, 2),
        device=device,
    )


def _time(
    pool: Executor, dims: ExpertDims, configs: Mapping[MoeProblem, tuple[MoeConfig, ...]], cache: Path | None
) -> dict[MoeProblem, TunedKernel]:
    """Records of all `configs`, also written to the cache."""
    fitting = _compile(pool, dims, configs)
    # One process at a time: compilation beside it would disturb the timings.
    selections = result_of(pool.submit(time_problems, dims, [*fitting.items()]), "autotuning")
    device = torch.cuda.get_device_name()
    records = {selection.problem: record_of(selection, device) for selection in selections}
    for problem, record in records.items():
        _write_cache(cache, problem, record)
    return records


def _compile(
    pool: Executor, dims: ExpertDims, configs: Mapping[MoeProblem, tuple[MoeConfig, ...]]
) -> dict[MoeProblem, tuple[MoeConfig, ...]]:
    """Compile all `configs` into Triton's cache, defaults first; drop configurations that do not fit the device."""
    pairs = sorted(
        ((problem, config) for problem, each in configs.items() for config in each),
        key=lambda pair: pair[1] != default_config(pair[0]),
    )
    futures = {pair: pool.submit(fits, dims, *pair) for pair in pairs}
    is_fitting = {pair: result_of(future, "autotuning") for pair, future in futures.items()}
    for problem in configs:
        if not is_fitting[problem, default_config(problem)]:
            raise CompileError(
                f"the mixture-of-experts kernels for {problem.tokens} tokens need more shared memory or registers than "
                "this GPU has",
                where=f"{problem.kernel} kernels, {default_config(problem)}",
                fix="export on another GPU, or choose other batch and chunk sizes",
            )
    return {
        problem: tuple(config for config in each if is_fitting[problem, config])
        for problem, each in configs.items()
    }


def _num_jobs(requested: int, dims: ExpertDims, problem: MoeProblem) -> int:
    """Number of processes: each needs GPU memory for the weights of all experts, and one also for random values."""
    values = 3 * dims.intermediate_size * dims.hidden_size * (dims.num_experts + 1)
    bytes_each = values * 2 if problem.weight_format == BF16 else values
    free, _ = torch.cuda.mem_get_info()
    return max(1, min(requested, (free - bytes_each) // (bytes_each + _WORKER_BYTES)))


def _read_cache(cache: Path | None, problem: MoeProblem) -> TunedKernel | None:
    """The record of an earlier export; an unreadable one counts as missing."""
    if cache is None:
        return None
    try:
        return decode(TunedKernel, json.loads(_cache_file(cache, problem).read_text(encoding="utf-8")))
    except (OSError, ValueError, ManifestError):
        return None


def _write_cache(cache: Path | None, problem: MoeProblem, record: TunedKernel) -> None:
    if cache is None:
        return
    path = _cache_file(cache, problem)
    with writing_cache(cache), work_folder(cache, "autotune-") as folder:
        part = folder / path.name
        part.write_text(json.dumps(encode(record)), encoding="utf-8")
        os.replace(part, path)


def _cache_file(cache: Path, problem: MoeProblem) -> Path:
    """Keyed by all that affects a timing: problem, GPU, torch (which brings the compiler) and the kernels' code."""
    digest = hashlib.sha256(f"{problem}\0{torch.cuda.get_device_name()}\0{torch.__version__}\0".encode())
    digest.update(kernel_sources())
    return cache / f"autotune-{digest.hexdigest()}.json"
