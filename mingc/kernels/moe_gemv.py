"""The mixture-of-experts half of a layer for one token: residual sum, norm, router and experts in four kernels.

Runs only on GPUs with Triton kernels; elsewhere `mingc.export.layers.moe` composes it from other operations.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.moe_experts import ExpertWeights
from mingc.kernels.quantized import INT4
from mingc.kernels.router import has_topk_kernel

_MAX_HIDDEN_SIZE = 8192  # a row is kept in registers


class RouterWeights(NamedTuple):
    """A router: weight (G, E, D), bias (G, E) float32 and the parameters of `mingc.kernels.router.route`."""

    weight: Tensor
    bias: Tensor
    num_groups: int
    num_kept_groups: int
    top_k: int
    scale: float


def has_moe_gemv(
    x: Tensor, router: RouterWeights, experts: ExpertWeights, shared: ExpertWeights | None
) -> bool:
    """Whether `moe_gemv` supports a residual stream `x` (T, D): one row, sizes of a power of two, one weight format."""
    if not use_triton(x) or x.shape[0] != 1 or experts.gate_up.dtype == INT4:
        return False
    if shared is not None and (shared.gate_up.dtype, shared.intermediate_size) != (
        experts.gate_up.dtype,
        experts.intermediate_size,
    ):
        return False
    return has_gemv_kernel(x.shape[1], router.weight.shape[1], router.num_groups, experts.intermediate_size)


def has_gemv_kernel(hidden_size: int, num_experts: int, num_groups: int, intermediate_size: int) -> bool:
    """Whether the kernels of `moe_gemv` support these sizes."""
    is_row = hidden_size & (hidden_size - 1) == 0 and 128 <= hidden_size <= _MAX_HIDDEN_SIZE
    return is_row and intermediate_size % 128 == 0 and has_topk_kernel(num_experts, num_groups)


def moe_gemv(
    residual: Tensor,
    delta: Tensor,
    norm: Tensor,
    eps: float,
    router: RouterWeights,
    experts: ExpertWeights,
    shared: ExpertWeights | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run one token, routed by the first gate. Requires `has_moe_gemv`.

    Args:
        residual, delta: (1, D); their sum is the new residual stream. Its norm, with weight `norm` (D,), goes to router
            and experts.

    Returns: the residual stream (1, D); the weighted sum of the experts plus the shared expert (1, D); expert ids
    (1, K) int64 and weights (1, K) float32 as from `mingc.kernels.router.route`.
    """
    from mingc.kernels.triton import moe_gemv as gpu

    shared_weights = shared if shared is not None else (None, None, None, None)
    made: tuple[Tensor, Tensor, Tensor, Tensor] = gpu.moe_gemv(
        residual, delta, norm, router.weight, router.bias, *experts, *shared_weights, eps,
        router.num_groups, router.num_kept_groups, router.top_k, router.scale,
    )  # fmt: skip
    return made
