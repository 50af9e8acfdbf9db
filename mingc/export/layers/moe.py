"""Feed-forward halves of a decoder layer: SwiGLU, and a mixture of SwiGLU experts with one router per modality.

Shape suffixes: T tokens, D hidden, K experts per token. Both halves update the residual stream, normalize it, and
return it with this rank's partial sum (see `mingc.export.layers.decoder`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mingc.export.layers.linear import empty_weight
from mingc.kernels.moe_experts import ExpertWeights, moe_experts, swiglu
from mingc.kernels.moe_gemv import RouterWeights, has_moe_gemv, moe_gemv
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.router import route_hidden

NUM_ROUTERS = 3  # text, image, audio: the values of `embed_kind`


class SwiGlu(nn.Module):
    """`down(silu(gate(x)) * up(x))`, gate and up packed in one matrix; scales are None if not quantized."""

    gate_up_scale: Tensor | None
    down_scale: Tensor | None

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_up = empty_weight(2 * intermediate_size, hidden_size)
        self.down = empty_weight(hidden_size, intermediate_size)
        self.register_parameter("gate_up_scale", None)
        self.register_parameter("down_scale", None)

    def forward(self, x_TD: Tensor) -> Tensor:
        """(T, D) → (T, D)."""
        return swiglu(x_TD, self.weights())

    def weights(self) -> ExpertWeights:
        """The weights in the form of a shared expert."""
        return ExpertWeights(self.gate_up, self.down, self.gate_up_scale, self.down_scale)


class DenseFeedForward(nn.Module):
    """Feed-forward half of a layer without experts."""

    def __init__(self, hidden_size: int, intermediate_size: int, norm_eps: float) -> None:
        super().__init__()
        self.eps = norm_eps
        self.norm = empty_weight(hidden_size)
        self.mlp = SwiGlu(hidden_size, intermediate_size)

    def forward(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """New residual and partial sum, both (T, D)."""
        x_TD = residual_TD + delta_TD
        return x_TD, self.mlp(rms_norm(x_TD, self.norm, self.eps))


class Router(nn.Module):
    """Scores all experts in float32 with the router weights of each token's modality and selects the top K."""

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        *,
        num_groups: int,
        num_kept_groups: int,
        top_k: int,
        scale: float,
    ) -> None:
        super().__init__()
        self.weight = empty_weight(NUM_ROUTERS, num_experts, hidden_size)
        self.bias = empty_weight(NUM_ROUTERS, num_experts, dtype=torch.float32)
        self.num_groups = num_groups
        self.num_kept_groups = num_kept_groups
        self.top_k = top_k
        self.scale = scale

    def forward(self, x_TD: Tensor, gate_index_T: Tensor | None) -> tuple[Tensor, Tensor]:
        """Expert ids (T, K) int64 and weights (T, K) float32. Without `gate_index_T` all use the text weights."""
        return route_hidden(
            x_TD,
            self.weight,
            self.bias,
            gate_index_T,
            num_groups=self.num_groups,
            num_kept_groups=self.num_kept_groups,
            top_k=self.top_k,
            scale=self.scale,
        )

    def weights(self) -> RouterWeights:
        """Parameters for kernels that fuse the router."""
        return RouterWeights(
            self.weight, self.bias, self.num_groups, self.num_kept_groups, self.top_k, self.scale
        )


class MoeFeedForward(nn.Module):
    """Feed-forward half of a layer with routed experts and a shared one (spec: thinker.md §2.3).

    Scales are None for experts that are not quantized.
    """

    gate_up_scale: Tensor | None
    down_scale: Tensor | None

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
        self.norm = empty_weight(hidden_size)
        self.router = router
        self.gate_up = empty_weight(num_experts, 2 * intermediate_size, hidden_size)
        self.down = empty_weight(num_experts, hidden_size, intermediate_size)
        self.register_parameter("gate_up_scale", None)
        self.register_parameter("down_scale", None)
        self.shared = SwiGlu(hidden_size, shared_intermediate_size) if shared_intermediate_size else None

    def prefill(self, residual_TD: Tensor, delta_TD: Tensor, embed_kind: Tensor) -> tuple[Tensor, Tensor]:
        """New residual and partial sum, both (T, D); `embed_kind` (T,) selects each token's router weights."""
        return self._run(residual_TD, delta_TD, embed_kind)[:2]

    def prefill_routed(
        self, residual_TD: Tensor, delta_TD: Tensor, embed_kind: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`prefill` that also returns the expert ids (T, K) int32 and weights (T, K) float32."""
        x_TD, partial_TD, ids_TK, weights_TK = self._run(residual_TD, delta_TD, embed_kind)
        return x_TD, partial_TD, ids_TK.to(torch.int32), weights_TK

    def decode_routed(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """`decode` that also returns the expert ids and weights."""
        return self._run(residual_TD, delta_TD, None)

    def decode(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor, Tensor]:
        """`prefill` of tokens that all use the text router weights (spec: thinker.md §2.3)."""
        return self._run(residual_TD, delta_TD, None)[:2]

    def _run(
        self, residual_TD: Tensor, delta_TD: Tensor, gate_index_T: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual, this rank's partial sum of routed and shared experts, expert ids and weights."""
        experts = ExpertWeights(self.gate_up, self.down, self.gate_up_scale, self.down_scale)
        shared = None if self.shared is None else self.shared.weights()
        if gate_index_T is None and isinstance(self.router, Router):
            router = self.router.weights()
            if has_moe_gemv(residual_TD, router, experts, shared):
                return moe_gemv(residual_TD, delta_TD, self.norm, self.eps, router, experts, shared)
        x_TD = residual_TD + delta_TD
        normed_TD = rms_norm(x_TD, self.norm, self.eps)
        ids_TK, weights_TK = self.router(normed_TD, gate_index_T)
        partial_TD = moe_experts(normed_TD, ids_TK, weights_TK, *experts, shared=shared)
        return x_TD, partial_TD, ids_TK, weights_TK
