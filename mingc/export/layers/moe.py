"""Feed-forward layers of a decoder: SwiGLU, and a mixture of SwiGLU experts with one router a modality.

Shape suffixes: T tokens, D hidden, F this rank's intermediate width, E experts, K experts a token.
Both modules return this rank's partial sum; the caller adds up the ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.kernels.moe_experts import moe_experts
from mingc.kernels.router import route

NUM_GATES = 3  # text, image, audio: the values of `embed_kind`


Routes = list[tuple[Tensor, Tensor]]  # expert ids and weights (T, K) of each expert layer


class SwiGlu(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one matrix."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * intermediate_size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(hidden_size, intermediate_size), requires_grad=False)

    def forward(
        self, x_TD: Tensor, gate_index_T: Tensor | None = None, routes: Routes | None = None
    ) -> Tensor:
        """(T, D) → (T, D). The other arguments are taken so that dense and expert layers are called alike."""
        gate_TF, up_TF = F.linear(x_TD, self.gate_up).chunk(2, dim=-1)
        return F.linear(F.silu(gate_TF) * up_TF, self.down)


class Router(nn.Module):
    """Scores all experts in float32 with the gate of each token's modality and picks K of them."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        num_groups: int,
        num_kept_groups: int,
        num_chosen: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(NUM_GATES, num_experts, hidden_size), requires_grad=False)
        self.bias = nn.Parameter(
            torch.empty(NUM_GATES, num_experts, dtype=torch.float32), requires_grad=False
        )
        self.num_groups = num_groups
        self.num_kept_groups = num_kept_groups
        self.num_chosen = num_chosen
        self.scale = scale

    def forward(self, x_TD: Tensor, gate_index_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Expert ids (T, K) int64 and weights (T, K) float32. Without `gate_index_T` all take the text gate."""
        wide_TD = x_TD.to(torch.float32)
        if gate_index_T is None:
            logits_TE = F.linear(wide_TD, self.weight[0].to(torch.float32))
            bias = self.bias[0]
        else:
            # One product with the three gates costs less than three and a merge; the unwanted two are dropped.
            num_experts = self.weight.shape[1]
            all_TGE = F.linear(wide_TD, self.weight.flatten(0, 1).to(torch.float32)).view(
                -1, NUM_GATES, num_experts
            )
            picked = gate_index_T[:, None, None].expand(-1, 1, num_experts)
            logits_TE = all_TGE.gather(1, picked).squeeze(1)
            bias = self.bias.index_select(0, gate_index_T)
        return route(
            logits_TE,
            bias,
            num_groups=self.num_groups,
            num_kept_groups=self.num_kept_groups,
            num_chosen=self.num_chosen,
            scale=self.scale,
        )


class MoeFeedForward(nn.Module):
    """Routed experts plus an always-on shared expert (spec: thinker.md §2.3)."""

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        shared_intermediate_size: int,
    ) -> None:
        super().__init__()
        self.router = router
        self.gate_up = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size), requires_grad=False
        )
        self.shared = SwiGlu(hidden_size, shared_intermediate_size) if shared_intermediate_size else None

    def forward(
        self, x_TD: Tensor, gate_index_T: Tensor | None = None, routes: Routes | None = None
    ) -> Tensor:
        """(T, D) → (T, D), this rank's share of routed and shared experts added up. Adds its choice to `routes`."""
        ids_TK, weights_TK = self.router(x_TD, gate_index_T)
        if routes is not None:
            routes.append((ids_TK, weights_TK))
        routed_TD = moe_experts(x_TD, ids_TK, weights_TK, self.gate_up, self.down)
        return routed_TD if self.shared is None else routed_TD + self.shared(x_TD)
