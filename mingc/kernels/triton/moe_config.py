"""Block sizes of the mixture-of-experts kernels, by problem: the configuration that every launch uses.

An export may have timed configurations on its device and selected some (`use_tuned_configs`). Every other problem gets
`default_config`: the best or nearly the best of many timed on an H200 at hidden size 4096 with 256 experts, 8 per
token, of intermediate size 1024 and a quarter of it. A size that a block does not divide gets the largest power of two
that does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

from mingc.artifacts.target import KernelConfig

BF16, FP8, INT4 = 0, 1, 2  # weight formats, as the kernels' FORMAT argument
_GEMV_DOWN_BYTES = 9 * 4096  # of weights in a program's registers
MAX_DECODE_TOKENS = 64  # of the kernels that do not sort tokens by expert

Kernel = Literal["moe_gemv", "expert_gemv", "batch", "grouped"]
"""One token including its routing; one routed token; a few tokens; a prefill chunk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeConfig:
    """Configuration of an expert's first GEMM, `up`, and of its second, `down`.

    The rest is for grouped GEMMs: `block_m` (token, expert) pairs per block, and up to `extra_rows` more in an expert's
    last block; `swap_operands` makes the weights the first operand of the tensor cores. Their `up.block_n` counts gate
    rows and up rows.
    """

    up: KernelConfig
    down: KernelConfig
    block_m: int = 0
    swap_operands: bool = False
    extra_rows: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MoeProblem:
    """Sizes that a configuration is chosen for; `intermediate_size` is this rank's share."""

    kernel: Kernel
    tokens: int
    hidden_size: int
    intermediate_size: int
    experts: int
    top_k: int
    weight_format: int


_tuned: Mapping[MoeProblem, MoeConfig] = {}


@contextmanager
def use_tuned_configs(table: Mapping[MoeProblem, MoeConfig]) -> Iterator[None]:
    """Use the configurations in `table` inside the context. Not thread-safe."""
    global _tuned
    before, _tuned = _tuned, table
    try:
        yield
    finally:
        _tuned = before


def tuned_configs() -> Mapping[MoeProblem, MoeConfig]:
    """The table in use."""
    return _tuned


def select_config(problem: MoeProblem) -> MoeConfig:
    """The tuned configuration of `problem`, or its default."""
    if not _tuned:  # while a graph of dynamic size is traced, `tokens` is symbolic and cannot be looked up
        return default_config(problem)
    return _tuned.get(problem) or default_config(problem)


def kernel_for(tokens: int, weight_format: int) -> Kernel:
    """The kernels that run this many tokens once they are routed."""
    if tokens == 1 and weight_format != INT4:
        return "expert_gemv"
    return "batch" if tokens <= MAX_DECODE_TOKENS else "grouped"


def default_config(problem: MoeProblem) -> MoeConfig:
    """The configuration of a problem that was not timed."""
    size, hidden = problem.intermediate_size, problem.hidden_size
    if problem.kernel == "grouped":
        return grouped_config(problem, _block_m(problem))
    if problem.kernel == "batch":
        per_item = 2 if problem.weight_format == INT4 else 1
        return MoeConfig(
            up=_batch_up(size, hidden // per_item, problem.weight_format),
            down=_batch_down(size // per_item, hidden, problem.weight_format),
        )
    return MoeConfig(up=_expert_gemv_up(size, hidden), down=_expert_gemv_down(size, hidden, problem))


def grouped_config(problem: MoeProblem, block_m: int) -> MoeConfig:
    """Configuration of grouped GEMMs with blocks of `block_m` pairs."""
    size, weight_format = problem.intermediate_size, problem.weight_format
    extra_rows, down = 0, None
    if weight_format == BF16 and block_m == 128:
        extra_rows, config = 32, KernelConfig(block_n=256, block_k=64, num_warps=8, num_stages=4)
        if size <= 256:
            # A tile takes few steps: of two programs on a multiprocessor one then stores while the other loads.
            down = KernelConfig(block_n=128, block_k=64, num_warps=8, num_stages=3)
    elif weight_format == FP8 and block_m == 128:
        extra_rows, config = 32, KernelConfig(block_n=256, block_k=128, num_warps=8, num_stages=3)
        down = KernelConfig(block_n=256, block_k=64, num_warps=8, num_stages=4)
    elif weight_format == FP8 and block_m == 64:
        config = KernelConfig(block_n=256, block_k=128, num_stages=2)
    elif block_m == 128:
        config = KernelConfig(block_n=128, block_k=64, num_warps=8, num_stages=4)
    elif block_m == 64:
        config = KernelConfig(block_n=128, block_k=64)
    else:
        config = KernelConfig(block_n=128, block_k=128)
    return MoeConfig(
        block_m=block_m,
        up=fit_to(config, 2 * size, problem.hidden_size),
        down=fit_to(down or config, problem.hidden_size, size),
        swap_operands=weight_format == INT4 or block_m < 64,
        extra_rows=extra_rows,
    )


def fit_to(config: KernelConfig, n: int, k: int) -> KernelConfig:
    """`config`, with blocks made smaller until they divide a weight of `n` rows and `k` inputs."""
    return replace(config, block_n=_divisor(n, config.block_n), block_k=_divisor(k, config.block_k))


def _block_m(problem: MoeProblem) -> int:
    """By the mean number of pairs of an expert."""
    mean = problem.tokens * problem.top_k // problem.experts
    if mean >= (128 if problem.weight_format == FP8 else 64):
        return 64 if problem.weight_format == INT4 else 128
    if mean < 16:
        return 16
    return 32 if problem.weight_format == INT4 else 64


def _expert_gemv_up(n: int, k: int) -> KernelConfig:
    block_n, num_warps = (2, 4) if n > 512 else (4, 8)
    return KernelConfig(block_n=_divisor(n, block_n), block_k=_divisor(k, 4096), num_warps=num_warps)


def _expert_gemv_down(k: int, n: int, problem: MoeProblem) -> KernelConfig:
    """A program's weights of all experts are in registers at once."""
    row_bytes = (problem.top_k + 1) * k * (2 if problem.weight_format == BF16 else 1)
    block_n = max(1, min(8, _GEMV_DOWN_BYTES // row_bytes))
    return KernelConfig(block_n=_divisor(n, 1 << (block_n.bit_length() - 1)), block_k=_divisor(k, 1024))


def _batch_up(n: int, k: int, weight_format: int) -> KernelConfig:
    is_large = weight_format != BF16 and n > 128
    return KernelConfig(block_n=_divisor(n, 64 if is_large else 32), block_k=_divisor(k, 256))


def _batch_down(k: int, n: int, weight_format: int) -> KernelConfig:
    """`k` counts stored elements."""
    if weight_format == FP8 and k > 512:
        return KernelConfig(
            block_n=_divisor(n, 64), block_k=_divisor(k, 256), tiles_per_program=_tiles_per_program(n, 64, 4)
        )
    if k >= 512:
        return KernelConfig(block_n=_divisor(n, 128), block_k=_divisor(k, 128), num_stages=4)
    return KernelConfig(
        block_n=_divisor(n, 128), block_k=_divisor(k, 128), tiles_per_program=_tiles_per_program(n, 128, 2)
    )


def _divisor(size: int, at_most: int) -> int:
    """The largest power of two up to `at_most` that divides `size`."""
    return min(at_most, size & -size)


def _tiles_per_program(n: int, block_n: int, at_most: int) -> int:
    """The largest number of tiles per program for `n` columns in blocks of `block_n`."""
    return _divisor(n // _divisor(n, block_n), at_most)
