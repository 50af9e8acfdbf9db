"""Search space of mixture-of-experts kernel configurations: the few worth timing besides the default.

These configurations were fastest, or close to it, in large sweeps
(`benchmarks/results/moe-configs-h200-2026-11-21.json`). Each is tried with the default for the other GEMM.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from mingc.artifacts.target import KernelConfig
from mingc.kernels.triton.moe_config import (
    BF16,
    FP8,
    INT4,
    MoeConfig,
    MoeProblem,
    default_config,
    fit_to,
    grouped_config,
)

_GEMV_UPS = (
    KernelConfig(block_n=4, block_k=4096, num_warps=4),
    KernelConfig(block_n=4, block_k=4096, num_warps=8),
    KernelConfig(block_n=2, block_k=4096, num_warps=4),
    KernelConfig(block_n=4, block_k=2048, num_warps=4),
    KernelConfig(block_n=2, block_k=2048, num_warps=4),
)
_GEMV_DOWNS = (
    KernelConfig(block_n=2, block_k=1024, num_warps=4),
    KernelConfig(block_n=4, block_k=1024, num_warps=4),
    KernelConfig(block_n=8, block_k=1024, num_warps=8),
    KernelConfig(block_n=8, block_k=512, num_warps=4),
)
# By weight format. block_k of INT4 counts bytes.
_BATCH_UPS = {
    BF16: (
        KernelConfig(block_n=32, block_k=256),
        KernelConfig(block_n=64, block_k=256),
        KernelConfig(block_n=64, block_k=128),
        KernelConfig(block_n=32, block_k=128, num_stages=4),
    ),
    FP8: (
        KernelConfig(block_n=64, block_k=256),
        KernelConfig(block_n=32, block_k=256),
        KernelConfig(block_n=32, block_k=256, num_stages=4),
    ),
    INT4: (
        KernelConfig(block_n=64, block_k=256),
        KernelConfig(block_n=32, block_k=256),
        KernelConfig(block_n=64, block_k=128),
    ),
}
_BATCH_DOWNS = {
    BF16: (
        KernelConfig(block_n=128, block_k=128),
        KernelConfig(block_n=128, block_k=128, num_stages=4),
        KernelConfig(block_n=64, block_k=128),
        KernelConfig(block_n=64, block_k=256, tiles_per_program=4),
    ),
    FP8: (
        KernelConfig(block_n=64, block_k=256, tiles_per_program=4),
        KernelConfig(block_n=128, block_k=256),
        KernelConfig(block_n=64, block_k=256),
    ),
    INT4: (
        KernelConfig(block_n=128, block_k=128),
        KernelConfig(block_n=64, block_k=128),
        KernelConfig(block_n=64, block_k=128, tiles_per_program=4),
    ),
}
_MIN_BLOCK_M, _MAX_BLOCK_M = 16, 128  # of grouped GEMMs
# By whether block_m is 64 or more.
_GROUPED = {
    False: (
        KernelConfig(block_n=128, block_k=128, num_stages=4),
        KernelConfig(block_n=256, block_k=128, num_warps=8),
    ),
    True: (
        KernelConfig(block_n=128, block_k=64, num_stages=4),
        KernelConfig(block_n=256, block_k=64, num_warps=8),
        KernelConfig(block_n=256, block_k=64, num_warps=8, num_stages=4),
    ),
}
_GROUPED_FP8 = (  # block_m of 64 or more
    KernelConfig(block_n=256, block_k=128, num_stages=2),
    KernelConfig(block_n=256, block_k=128, num_warps=8),
    KernelConfig(block_n=256, block_k=64, num_warps=8, num_stages=4),
    KernelConfig(block_n=128, block_k=128, num_warps=8, num_stages=2),
)


def search_space(problem: MoeProblem) -> tuple[MoeConfig, ...]:
    """The default configuration, then others, each once. Some may need more shared memory than the GPU has."""
    return tuple(dict.fromkeys((default_config(problem), *_others(problem))))


def _others(problem: MoeProblem) -> Iterator[MoeConfig]:
    default = default_config(problem)
    ups, downs = _gemm_configs(problem, default)
    size, hidden = problem.intermediate_size, problem.hidden_size
    per_item = 2 if problem.weight_format == INT4 and problem.kernel == "batch" else 1
    up_rows = 2 * size if problem.kernel == "grouped" else size
    for config in ups:
        yield replace(default, up=fit_to(config, up_rows, hidden // per_item))
    for config in downs:
        if hidden % (config.block_n * config.tiles_per_program) == 0:
            yield replace(default, down=fit_to(config, hidden, size // per_item))
    if problem.kernel == "grouped":
        for block_m in (default.block_m // 2, 2 * default.block_m):
            if _MIN_BLOCK_M <= block_m <= _MAX_BLOCK_M:
                yield grouped_config(problem, block_m)


def _gemm_configs(
    problem: MoeProblem, default: MoeConfig
) -> tuple[tuple[KernelConfig, ...], tuple[KernelConfig, ...]]:
    """Configurations for the first GEMM and for the second."""
    match problem.kernel:
        case "moe_gemv" | "expert_gemv":
            return _GEMV_UPS, _GEMV_DOWNS
        case "batch":
            return _BATCH_UPS[problem.weight_format], _BATCH_DOWNS[problem.weight_format]
        case "grouped":
            is_large = default.block_m >= 64
            both = _GROUPED_FP8 if is_large and problem.weight_format == FP8 else _GROUPED[is_large]
            if default.block_m == _MAX_BLOCK_M:
                # Four warps have too few registers for blocks of that size.
                both = (*both[1:], KernelConfig(block_n=128, block_k=64, num_warps=8))
            return both, both
