"""The routed experts of a mixture-of-experts layer.

Which experts have rows is known only when it runs, which tensor code of fixed shape cannot say. So there are two
forms of the same maths: eager, experts are visited one by one; in a captured graph every (token, expert) pair
is a row of its own. Neither lets a token's result depend on the tokens it shares a batch with.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

# Rows of one eager matrix product. Products with another number of rows may add up in another order, so blocks
# are always this large (filled up with zeros).
_BLOCK_ROWS = 16


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Weighted sum over each token's experts of `down(silu(gate(x)) * up(x))`.

    Args:
        x: (T, D).
        ids: (T, K) int64, the experts of each token.
        weights: (T, K) float32.
        gate_up: (E, 2F, D), gate rows then up rows, in the dtype of `x`.
        down: (E, D, F).

    Returns: (T, D) in the dtype of `x`. Expert outputs are weighted and summed in float32 in the order of `ids`
    (spec: thinker.md §2.3).
    """
    is_captured = torch.compiler.is_compiling() or torch.compiler.is_exporting()
    outputs = (_pair_rows if is_captured else _visit_experts)(x, ids, gate_up, down)
    return (outputs.to(torch.float32) * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _pair_rows(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Outputs (T, K, D) of all pairs, as gathers that feed sums.

    The compiler makes one loop of gather, product and sum that reads the chosen experts where they lie; run
    eagerly this would copy an expert for every pair.
    """
    hidden = (gate_up[ids].to(torch.float32) * x[:, None, None].to(torch.float32)).sum(-1).to(x.dtype)
    gate, up = hidden.chunk(2, dim=-1)
    activated = (F.silu(gate) * up).unsqueeze(2).to(torch.float32)
    return (down[ids].to(torch.float32) * activated).sum(-1).to(x.dtype)


def _visit_experts(x: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Outputs (T, K, D) of all pairs; only the chosen experts are read, and nothing larger is kept."""
    num_chosen = ids.shape[1]
    pair_ids = ids.reshape(-1)
    order = pair_ids.argsort(stable=True)
    outputs = x.new_empty(pair_ids.shape[0], x.shape[1])
    start = 0
    for expert, count in enumerate(torch.bincount(pair_ids, minlength=gate_up.shape[0]).tolist()):
        for first in range(start, start + count, _BLOCK_ROWS):
            places = order[first : min(first + _BLOCK_ROWS, start + count)]
            block = x.new_zeros(_BLOCK_ROWS, x.shape[1])
            block[: len(places)] = x[places // num_chosen]
            gate, up = F.linear(block, gate_up[expert]).chunk(2, dim=-1)
            outputs[places] = F.linear(F.silu(gate) * up, down[expert])[: len(places)]
        start += count
    return outputs.view(ids.shape[0], num_chosen, x.shape[1])
