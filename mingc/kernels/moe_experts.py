"""Experts of a mixture-of-experts layer: each token's routed experts, and the shared expert of all tokens.

The torch reference has two forms, because which experts have rows is known only at run time: eager code visits expert
by expert; a captured graph, whose shapes are fixed, makes every (token, expert) pair a row. In both a token's result
does not depend on the other tokens of its batch. Half precision on a GPU of the table runs Triton kernels instead; on a
GPU with cluster kernels (`mingc.artifacts.target`) CUDA C++ multiplies INT4 weights for some numbers of tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from mingc.kernels.cuda import int4_experts
from mingc.kernels.dispatch import use_clusters, use_triton
from mingc.kernels.linear import linear
from mingc.kernels.quantized import INT4, dequantize
from mingc.kernels.triton.moe_config import MAX_DECODE_TOKENS

# Rows of one eager GEMM. A GEMM with another number of rows may sum in another order, so blocks always have this size,
# padded with zeros.
_BLOCK_ROWS = 16
# Tokens for which CUDA C++ replaces Triton (benchmarks/NOTES-thinker.md#int4-in-cuda-c). With fewer its gain may not
# pay for the shared expert, which then runs separately instead of inside Triton's decode kernels.
_MIN_INT4_TOKENS, _MAX_INT4_TOKENS = 32, 256


class ExpertWeights(NamedTuple):
    """Experts (E, …), or one expert without that axis: gate_up (E, 2F, D), gate rows then up rows; down (E, D, F).

    With scales the matrices are in one of the formats of `mingc.kernels.quantized`, else in the dtype of the tokens.
    The torch reference also takes routed experts in a narrower dtype and converts one expert at a time.
    """

    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor | None = None
    down_scale: Tensor | None = None

    @property
    def intermediate_size(self) -> int:
        """F, this rank's share of the intermediate size."""
        return self.gate_up.shape[-2] // 2


def moe_experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    *,
    shared: ExpertWeights | None = None,
) -> Tensor:
    """Sum `down(silu(gate(x)) * up(x))` over each token's experts by weight, and add the shared expert.

    Args:
        x: (T, D).
        ids: (T, K) int64, the experts of each token.
        weights: (T, K) float32.
        gate_up, down, gate_up_scale, down_scale: the experts, see `ExpertWeights`.
        shared: the shared expert, if there is one.

    Returns: (T, D) in the dtype of `x`. Expert outputs are weighted and summed in float32, in the order of `ids`
    (spec: thinker.md §2.3).

    Raises: KernelError if the kernel in CUDA C++ cannot be compiled.
    """
    experts = ExpertWeights(gate_up, down, gate_up_scale, down_scale)
    if use_triton(x) and has_kernel(x.shape[1], experts.intermediate_size, experts.gate_up.shape[0]):
        return _launch(x, ids, weights, experts, shared)
    is_captured = torch.compiler.is_compiling() or torch.compiler.is_exporting()
    outputs = (_pair_rows if is_captured else _visit_experts)(x, ids, experts)
    routed = (outputs.to(torch.float32) * weights.unsqueeze(-1)).sum(1).to(x.dtype)
    return routed if shared is None else routed + swiglu(x, shared)


def swiglu(x: Tensor, expert: ExpertWeights) -> Tensor:
    """Run one expert, `down(silu(gate(x)) * up(x))`, for all tokens: (T, D) → (T, D)."""
    gate, up = linear(x, expert.gate_up, None, expert.gate_up_scale).chunk(2, dim=-1)
    return linear(F.silu(gate) * up, expert.down, None, expert.down_scale)


def has_kernel(hidden_size: int, intermediate_size: int, num_experts: int) -> bool:
    """Whether the Triton kernels support these sizes: whole tiles, and a power of two of experts to sort by."""
    is_power = num_experts & (num_experts - 1) == 0
    return hidden_size % 128 == 0 and intermediate_size % 128 == 0 and is_power


def has_int4_kernel(tokens: int, hidden_size: int, intermediate_size: int) -> bool:
    """Whether CUDA C++ multiplies INT4 weights for so many tokens, on a GPU with cluster kernels."""
    is_faster = _MIN_INT4_TOKENS <= tokens <= _MAX_INT4_TOKENS
    return is_faster and int4_experts.fits(hidden_size, intermediate_size)


def _launch(
    x: Tensor, ids: Tensor, weights: Tensor, experts: ExpertWeights, shared: ExpertWeights | None
) -> Tensor:
    from mingc.kernels.triton.moe_decode import moe_decode
    from mingc.kernels.triton.moe_prefill import moe_prefill

    is_cuda = (
        use_clusters(x)
        and experts.gate_up.dtype == INT4
        and has_int4_kernel(x.shape[0], x.shape[1], experts.intermediate_size)
    )
    if is_cuda or x.shape[0] > MAX_DECODE_TOKENS:
        shared_out = None if shared is None else swiglu(x, shared)
        code = int4_experts.machine_code(x.device) if is_cuda else None
        summed: Tensor = moe_prefill(x, ids, weights, *experts, shared_out, code)
        return summed
    if shared is None:
        routed: Tensor = moe_decode(x, ids, weights, *experts, None, None, None, None)
        return routed
    if (
        shared.gate_up.dtype == experts.gate_up.dtype
        and shared.intermediate_size == experts.intermediate_size
    ):
        together: Tensor = moe_decode(x, ids, weights, *experts, *shared)
        return together
    return _launch(x, ids, weights, experts, None) + swiglu(x, shared)


def _pair_rows(x: Tensor, ids: Tensor, experts: ExpertWeights) -> Tensor:
    """Outputs (T, K, D) of all (token, expert) pairs, as gathers that feed sums.

    The compiler fuses gather, multiplication and sum into one loop that reads the experts in place; eager execution
    would copy an expert for every pair.
    """
    gate_up = _gather(experts.gate_up, experts.gate_up_scale, ids, x.dtype)
    hidden = (gate_up.to(torch.float32) * x[:, None, None].to(torch.float32)).sum(-1).to(x.dtype)
    gate, up = hidden.chunk(2, dim=-1)
    activated = (F.silu(gate) * up).unsqueeze(2).to(torch.float32)
    down = _gather(experts.down, experts.down_scale, ids, x.dtype)
    return (down.to(torch.float32) * activated).sum(-1).to(x.dtype)


def _visit_experts(x: Tensor, ids: Tensor, experts: ExpertWeights) -> Tensor:
    """Outputs (T, K, D) of all (token, expert) pairs, expert by expert; reads only experts that have tokens."""
    top_k = ids.shape[1]
    pair_ids = ids.reshape(-1)
    order = pair_ids.argsort(stable=True)
    outputs = x.new_empty(pair_ids.shape[0], x.shape[1])
    start = 0
    num_experts = experts.gate_up.shape[0]
    for number, count in enumerate(torch.bincount(pair_ids, minlength=num_experts).tolist()):
        if count == 0:
            continue
        expert = ExpertWeights(
            _gather(experts.gate_up, experts.gate_up_scale, number, x.dtype),
            _gather(experts.down, experts.down_scale, number, x.dtype),
        )
        for first in range(start, start + count, _BLOCK_ROWS):
            places = order[first : min(first + _BLOCK_ROWS, start + count)]
            block = x.new_zeros(_BLOCK_ROWS, x.shape[1])
            block[: len(places)] = x[places // top_k]
            outputs[places] = swiglu(block, expert)[: len(places)]
        start += count
    return outputs.view(ids.shape[0], top_k, x.shape[1])


def _gather(weight: Tensor, scale: Tensor | None, ids: Tensor | int, dtype: torch.dtype) -> Tensor:
    if scale is not None:
        return dequantize(weight[ids], scale[ids], dtype)
    gathered = weight[ids]
    # No conversion in a captured graph, where there is nothing to convert.
    return gathered if gathered.dtype == dtype else gathered.to(dtype)
