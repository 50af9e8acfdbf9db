"""Feed-forward halves of a decoder layer: SwiGLU, and a mixture of SwiGLU experts with one router a modality.

Shape suffixes: T tokens, D hidden, F this rank's intermediate width, E experts, K experts a token.
Both halves add up the residual stream, norm it, and return it with this rank's partial sum (see
`mingc.export.layers.decoder`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.kernels.linear import linear
from mingc.kernels.moe_experts import moe_experts
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.router import route

NUM_GATES = 3  # text, image, audio: the values of `embed_kind`


class SwiGlu(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up as one matrix. Quantized matrices have scales."""

    gate_up_scale: Tensor | None
    down_scale: Tensor | None

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(2 * intermediate_size, hidden_size), requires_grad=False)
        self.down = nn.Parameter(torch.empty(hidden_size, intermediate_size), requires_grad=False)
        self.register_parameter("gate_up_scale", None)
        self.register_parameter("down_scale", None)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) → (T, D)."""
        gate_TF, up_TF = linear(x_TD, self.gate_up, None, self.gate_up_scale).chunk(2, dim=-1)
        return linear(F.silu(gate_TF) * up_TF, self.down, None, self.down_scale)


class DenseFeedForward(nn.Module):
    """The half of a layer without experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, norm_eps: float) -> None:
        super().__init__()
        self.eps = norm_eps
        self.norm = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.mlp = SwiGlu(hidden_size, intermediate_size)

    def forward(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """New residual and partial sum, both (T, D)."""
        x_TD = residual_TD + delta_TD
        return x_TD, self.mlp(rms_norm(x_TD, self.norm, self.eps))


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
    """The half of a layer with routed experts and an always-on shared one (spec: thinker.md §2.3)."""

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        num_experts: int,
        intermediate_size: int,
        shared_intermediate_size: int,
        norm_eps: float,
    ) -> None:
        super().__init__()
        self.eps = norm_eps
        self.norm = nn.Parameter(torch.empty(hidden_size), requires_grad=False)
        self.router = router
        self.gate_up = nn.Parameter(
            torch.empty(num_experts, 2 * intermediate_size, hidden_size), requires_grad=False
        )
        self.down = nn.Parameter(
            torch.empty(num_experts, hidden_size, intermediate_size), requires_grad=False
        )
        self.shared = SwiGlu(hidden_size, shared_intermediate_size) if shared_intermediate_size else None

    def prefill(self, residual_TD: Tensor, delta_TD: Tensor, embed_kind: Tensor) -> tuple[Tensor, Tensor]:
        """New residual and partial sum, both (T, D); `embed_kind` (T,) names each token's gate."""
        return self._run(residual_TD, delta_TD, embed_kind)[:2]

    def prefill_routed(
        self, residual_TD: Tensor, delta_TD: Tensor, embed_kind: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`prefill` that also tells the experts: ids (T, K) int32 and weights (T, K) float32."""
        x_TD, partial_TD, ids_TK, weights_TK = self._run(residual_TD, delta_TD, embed_kind)
        return x_TD, partial_TD, ids_TK.to(torch.int32), weights_TK

    def decode_routed(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`decode` that also tells the experts."""
        return self._run(residual_TD, delta_TD, None)

    def decode(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """`prefill` of tokens that all take the text gate (spec: thinker.md §2.3)."""
        return self._run(residual_TD, delta_TD, None)[:2]

    def _run(
        self, residual_TD: Tensor, delta_TD: Tensor, gate_index_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual, this rank's share of routed and shared experts added up, expert ids and weights."""
        x_TD = residual_TD + delta_TD
        normed_TD = rms_norm(x_TD, self.norm, self.eps)
        ids_TK, weights_TK = self.router(normed_TD, gate_index_T)
        partial_TD = moe_experts(normed_TD, ids_TK, weights_TK, self.gate_up, self.down)
        if self.shared is not None:
            partial_TD = partial_TD + self.shared(normed_TD)
        return x_TD, partial_TD, ids_TK, weights_TK
