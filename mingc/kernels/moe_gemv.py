"""A whole half of a layer with experts for one token: sum, norm, router and experts in few kernels, on CUDA only."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from mingc.kernels.dispatch import use_triton
from mingc.kernels.moe_experts import ExpertWeights
from mingc.kernels.quantized import INT4

_MAX_WIDTH = 8192  # a row is kept in registers


class RouterWeights(NamedTuple):
    """The router: weight (G, E, D) and bias (G, E) float32, and how it chooses (`mingc.kernels.router.route`)."""

    weight: Tensor
    bias: Tensor
    num_groups: int
    num_kept_groups: int
    top_k: int
    scale: float


def has_moe_gemv(
    x: Tensor, gates: RouterWeights, experts: ExpertWeights, shared: ExpertWeights | None
) -> bool:
    """Whether `moe_gemv` takes a stream `x` (T, D): one row on CUDA, sizes in powers of two, one format."""
    if not use_triton(x) or x.shape[0] != 1 or experts.gate_up.dtype == INT4:
        return False
    if shared is not None and (shared.gate_up.dtype, shared.intermediate_size) != (
        experts.gate_up.dtype,
        experts.intermediate_size,
    ):
        return False
    return has_gemv_kernel(x.shape[1], gates.weight.shape[1], gates.num_groups, experts.intermediate_size)


def has_gemv_kernel(hidden_size: int, num_experts: int, num_groups: int, width: int) -> bool:
    """Whether the kernels of one row take such sizes."""
    is_power = all(size & (size - 1) == 0 for size in (hidden_size, num_experts, num_groups))
    return is_power and 128 <= hidden_size <= _MAX_WIDTH and num_experts >= 16 and width % 128 == 0


def moe_gemv(
    residual: Tensor,
    delta: Tensor,
    norm: Tensor,
    eps: float,
    gates: RouterWeights,
    experts: ExpertWeights,
    shared: ExpertWeights | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One token with the first gate. Only where `has_moe_gemv` says so.

    Args:
        residual, delta: (1, D); their sum is the stream, its norm with `norm` (D,) goes to router and experts.

    Returns: the stream (1, D); the experts' weighted sum and the shared expert (1, D); ids (1, K) int64 and weights
    (1, K) float32 of the experts, as `mingc.kernels.router.route` gives them.
    """
    from mingc.kernels.triton import moe_gemv as gpu

    common = shared if shared is not None else (None, None, None, None)
    made: tuple[Tensor, Tensor, Tensor, Tensor] = gpu.moe_gemv(
        residual, delta, norm, gates.weight, gates.bias, *experts, *common, eps,
        gates.num_groups, gates.num_kept_groups, gates.top_k, gates.scale,
    )  # fmt: skip
    return made
