"""Expert routing: sigmoid scores, a selection bias, top-k experts within the best expert groups."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.dispatch import use_triton


def route_hidden(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    gate_index: Tensor | None,
    *,
    num_groups: int,
    num_kept_groups: int,
    top_k: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Score all experts in float32, each token with the gate of its modality, and `route`.

    Args:
        x: (T, D).
        weight: (G, E, D), one matrix per gate.
        bias: (G, E) float32.
        gate_index: (T,) int64; without it every token uses gate 0.
    """
    num_gates, num_experts, hidden_size = weight.shape
    if use_triton(x) and hidden_size % 128 == 0 and has_topk_kernel(num_experts, num_groups):
        from mingc.kernels.triton import router as gpu

        routed: tuple[Tensor, Tensor] = gpu.route_hidden(
            x, weight, bias, gate_index, num_groups, num_kept_groups, top_k, scale
        )
        return routed
    x32 = x.to(torch.float32)
    if gate_index is None:
        logits, own_bias = F.linear(x32, weight[0].to(torch.float32)), bias[0]
    else:
        # One GEMM with all gates costs less than one GEMM per gate and a merge.
        every = F.linear(x32, weight.flatten(0, 1).to(torch.float32)).view(-1, num_gates, num_experts)
        logits = every.gather(1, gate_index[:, None, None].expand(-1, 1, num_experts)).squeeze(1)
        own_bias = bias.index_select(0, gate_index)
    return route(
        logits,
        own_bias,
        num_groups=num_groups,
        num_kept_groups=num_kept_groups,
        top_k=top_k,
        scale=scale,
    )


def has_topk_kernel(num_experts: int, num_groups: int) -> bool:
    """Whether the kernels select among these experts: powers of two, and two experts for a group's score."""
    is_power = num_experts & (num_experts - 1) == 0 and num_groups & (num_groups - 1) == 0
    return is_power and num_experts >= max(16, 2 * num_groups)


def route(
    logits: Tensor, bias: Tensor, *, num_groups: int, num_kept_groups: int, top_k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Select `top_k` experts per token and their weights (spec: thinker.md §2.3).

    Args:
        logits: (T, E) float32.
        bias: (T, E) or (E,) float32; used for the selection only; weights come from the unbiased scores.
        num_groups: consecutive equal groups of experts; a group's score is the sum of its two best biased scores.
        num_kept_groups: number of best groups that experts are selected from.

    Returns: ids (T, top_k) int64, best first, and weights (T, top_k) float32 that sum to `scale`.
    """
    num_tokens, num_experts = logits.shape
    group_size = num_experts // num_groups
    scores = logits.sigmoid()
    biased = scores + bias
    if num_kept_groups < num_groups:
        grouped = biased.view(num_tokens, num_groups, group_size)
        group_scores = grouped.topk(min(2, group_size), dim=-1).values.sum(-1)
        kept = group_scores.topk(num_kept_groups, dim=-1).indices
        # Comparing with every group index is one fused elementwise pass; a scatter would be a separate kernel.
        is_kept = (kept.unsqueeze(-1) == torch.arange(num_groups, device=kept.device)).any(1)
        biased = grouped.masked_fill(~is_kept.unsqueeze(-1), float("-inf")).view(num_tokens, num_experts)
    ids = biased.topk(top_k, dim=-1).indices
    selected = scores.gather(1, ids)
    return ids, selected * (scale / (selected.sum(-1, keepdim=True) + 1e-20))
