"""The routed experts of a mixture-of-experts layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Weighted sum over each token's experts of `down(silu(gate(x)) * up(x))`.

    Args:
        x: (T, D).
        ids: (T, K) int64, the experts of each token.
        weights: (T, K) float32.
        gate_up: (E, 2F, D), gate rows then up rows, in the dtype of `x`.
        down: (E, D, F).

    Returns: (T, D) in the dtype of `x`. Expert outputs are weighted and summed in float32 in the order of `ids`
    (spec: thinker.md §2.3), so the sum does not depend on which tokens share a batch.

    Tokens are sorted by expert and every expert is one matrix product over its own rows: memory is
    T * K rows, never a copy of the experts, and the work is that of the chosen experts only.
    """
    num_tokens, num_chosen = ids.shape
    sorted_ids, order = ids.reshape(-1).sort(stable=True)
    experts = torch.arange(gate_up.shape[0], device=ids.device)
    ends = (sorted_ids.unsqueeze(0) <= experts.unsqueeze(1)).sum(1, dtype=torch.int32)
    rows = x.index_select(0, order // num_chosen)
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
    outputs = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    per_token = outputs.index_select(0, place).view(num_tokens, num_chosen, -1)
    return (per_token.to(torch.float32) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
