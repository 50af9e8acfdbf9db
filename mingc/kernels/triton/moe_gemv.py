"""`mingc.kernels.moe_gemv` in Triton: the kernels of router and experts as one operation of four kernels.

The first computes residual sum, norm and router logits, the second selects the experts.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mingc.kernels.triton.gemv import mingc_gemv_pdl
from mingc.kernels.triton.moe_config import MoeProblem, select_config
from mingc.kernels.triton.moe_decode import mingc_expert_gemv_down_pdl, mingc_expert_gemv_up_pdl
from mingc.kernels.triton.router import mingc_router_topk_pdl
from mingc.kernels.triton.weight_formats import weight_format_of

_ROUTER_BLOCK_N = 2  # experts of a program: there are few


@torch.library.triton_op("mingc::moe_gemv", mutates_args={})
def moe_gemv(
    residual: Tensor,
    delta: Tensor,
    norm: Tensor,
    gate: Tensor,
    bias: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down_scale: Tensor | None,
    eps: float,
    num_groups: int,
    num_kept_groups: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """See `mingc.kernels.moe_gemv`; residual (1, D), gate (G, E, D), of which the first is used."""
    hidden_size, experts = residual.shape[1], gate.shape[1]
    intermediate_size, weight_format = gate_up.shape[1] // 2, weight_format_of(gate_up)
    has_shared = shared_gate_up is not None
    num_pairs = top_k + int(has_shared)
    device, dtype = residual.device, residual.dtype
    stream, normed, out = (torch.empty_like(residual) for _ in range(3))
    logits = torch.empty(experts, dtype=torch.float32, device=device)
    programs = experts // _ROUTER_BLOCK_N
    torch.library.wrap_triton(mingc_gemv_pdl)[(programs,)](
        residual, delta, norm, gate, residual, stream, normed, logits,
        EPS=eps, N=experts, K=hidden_size, HAS_NORM=True, HAS_SCALE=False, KEEPS_NORMED=True,
        BLOCK_N=_ROUTER_BLOCK_N, BLOCK_K=hidden_size, PROGRAMS=programs, PDL=True,
        num_warps=4,
    )  # fmt: skip
    ids = torch.empty(1, top_k, dtype=torch.int64, device=device)
    weights = torch.empty(1, top_k, dtype=torch.float32, device=device)
    hidden = torch.empty(num_pairs, intermediate_size, dtype=dtype, device=device)
    config = select_config(
        MoeProblem(
            kernel="moe_gemv", tokens=1, hidden_size=hidden_size, intermediate_size=intermediate_size, experts=experts,
            top_k=top_k, weight_format=weight_format,
        )
    )  # fmt: skip
    torch.library.wrap_triton(mingc_router_topk_pdl)[(1,)](
        logits, bias, bias, ids, weights, 1, scale,
        E=experts, GATES=1, GROUPS=num_groups, KEPT=num_kept_groups, K=top_k, K_PADDED=triton.next_power_of_2(top_k),
        SPLITS=1, ROWS=1, PDL=True, num_warps=1,
    )  # fmt: skip
    gemm = config.up
    torch.library.wrap_triton(mingc_expert_gemv_up_pdl)[(intermediate_size // gemm.block_n, num_pairs)](
        normed, ids, gate_up, residual if gate_up_scale is None else gate_up_scale,
        gate_up if shared_gate_up is None else shared_gate_up,
        residual if shared_gate_up_scale is None else shared_gate_up_scale, hidden,
        K=top_k, D=hidden_size, F=intermediate_size, HAS_SHARED=has_shared, FORMAT=weight_format,
        BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, PDL=True, num_warps=gemm.num_warps,
    )  # fmt: skip
    gemm = config.down
    torch.library.wrap_triton(mingc_expert_gemv_down_pdl)[(hidden_size // gemm.block_n,)](
        hidden, ids, weights, down, residual if down_scale is None else down_scale,
        down if shared_down is None else shared_down, residual if shared_down_scale is None else shared_down_scale,
        out, K=top_k, D=hidden_size, F=intermediate_size, HAS_SHARED=has_shared, FORMAT=weight_format,
        BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, PDL=True, num_warps=gemm.num_warps,
    )  # fmt: skip
    return stream, out, ids, weights
