"""Cost rules of custom kernels: the least FLOPs and state elements accessed, by the shapes of their arguments.

Attention over slots or pages reads only the tokens of a request's context. Their number is in no shape: it is the
symbol `CONTEXT`, in which every rule is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import sympy

Size = Any  # a sympy integer or expression over the trace's symbols; sympy has no types
# Shapes of arguments by name, or of the members of a list; empty for arguments that are not tensors.
Shapes = Mapping[str, Sequence[Size]]

CONTEXT = sympy.Symbol("context", integer=True, nonnegative=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelCost:
    """Operations of one call, and elements of state that it reads or writes.

    `weight_shares` says how often a call reads an argument, unless it reads it once.
    """

    flops: Size = 0
    state_elements: Size = 0
    weight_shares: Mapping[str, Size] = field(default_factory=dict)


Rule = Callable[[Shapes, Mapping[str, Any]], KernelCost]


def _linear(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """x (M, K), weight (N, K) with gate and up rows for swiglu."""
    return KernelCost(flops=2 * shapes["x"][0] * math.prod(shapes["weight"]))


def _gemv(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """One row times weight (N, K)."""
    return KernelCost(flops=2 * math.prod(shapes["weight"]))


def _contiguous_kv_attention(shapes: Shapes, arguments: Mapping[str, Any]) -> KernelCost:
    """qkv (B, (Hq + 2 Hk) d), k_slots (S, N, Hk, d): each query attends to the context, up to a window, and itself."""
    (batch, width), (_, rows, kv_heads, size) = shapes["qkv"], shapes["k_slots"]
    seen = CONTEXT + 1 if arguments["window"] >= rows else arguments["window"]
    return _one_token_each(batch, width - 2 * kv_heads * size, kv_heads * size, seen)


def _contiguous_kv_prefill_attention(shapes: Shapes, arguments: Mapping[str, Any]) -> KernelCost:
    """qkv (T, (Hq + 2 Hk) d), k_slots (S, N, Hk, d), no window: query t attends to the context and t + 1 new tokens."""
    (tokens, width), (_, _, kv_heads, size) = shapes["qkv"], shapes["k_slots"]
    return _causal(tokens, width - 2 * kv_heads * size, kv_heads * size)


def _sliding_window_attention(shapes: Shapes, arguments: Mapping[str, Any]) -> KernelCost:
    """qkv (B, n, (Hq + 2 Hk) d), k_ring (S, R, Hk, d): queries attend to a window each, and together to the ring."""
    (batch, frames, width), (_, rows, kv_heads, size) = shapes["qkv"], shapes["k_ring"]
    return KernelCost(
        flops=4 * batch * frames * (width - 2 * kv_heads * size) * arguments["window"],
        state_elements=2 * batch * rows * kv_heads * size,
    )


def _small_sequence_attention(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """qkv (N, T, 3 H d): every query attends to every key."""
    batch, tokens, width = shapes["qkv"]
    return KernelCost(flops=4 * batch * tokens * tokens * (width // 3))


def _varlen_attention(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """q (B, Q, H, d), k (B, K, H, d), bounds (B, S, 2): a shared range has all keys, a query's own one half of them.

    No shape tells the ranges, so the example inputs of the graphs count: two frames, or one clip.
    """
    (rows, queries, heads, size), keys = shapes["q"], shapes["k"][1]
    share = 1 if shapes["bounds"][1] == 1 else sympy.Rational(1, 2)
    return KernelCost(flops=4 * rows * queries * heads * size * keys * share)


def _rotary_varlen_attention(shapes: Shapes, arguments: Mapping[str, Any]) -> KernelCost:
    """qkv (P, 3, H, d), bounds (1, S, 2)."""
    tokens, _, heads, size = shapes["qkv"]
    row = (1, tokens, heads, size)
    return _varlen_attention({"q": row, "k": row, "bounds": shapes["bounds"]}, arguments)


def _paged_decode_attention(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """q (B, Hq, d), k_pages (KV, Hk, d): each query attends to the context and itself."""
    (batch, heads, size), (_, kv_heads, _) = shapes["q"], shapes["k_pages"]
    return _one_token_each(batch, heads * size, kv_heads * size)


def _paged_prefill_attention(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """q (T, Hq, d), k_pages (KV, Hk, d): query t attends to the context and t + 1 new tokens."""
    (tokens, heads, size), (_, kv_heads, _) = shapes["q"], shapes["k_pages"]
    return _causal(tokens, heads * size, kv_heads * size)


def _norm_rope_write(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """qkv (T, …), k_pages (KV, Hk, d): writes the keys and values of T tokens."""
    return KernelCost(state_elements=2 * shapes["qkv"][0] * math.prod(shapes["k_pages"][1:]))


def _decode_attention(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """qkv (B, Hq + 2 Hk, d), k_pages (KV, Hk, d): writes the new token, which attends to the context and itself."""
    (batch, packed, size), (_, kv_heads, _) = shapes["qkv"], shapes["k_pages"]
    return _one_token_each(batch, (packed - 2 * kv_heads) * size, kv_heads * size)


def _experts(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """x (T, D), ids (T, K), gate_up (E, 2F, …), optionally a shared expert.

    Only selected experts are read: their expected number, if tokens are routed uniformly.
    """
    (tokens, hidden), top_k = shapes["x"], shapes["ids"][1]
    experts, rows = shapes["gate_up"][:2]
    shared = shapes.get("shared_gate_up") or (0, 0)
    share = 1 - sympy.Float(1 - top_k / experts) ** tokens
    return KernelCost(
        flops=3 * tokens * hidden * (top_k * rows + shared[-2]),
        weight_shares={name: share for name in ("gate_up", "down", "gate_up_scale", "down_scale")},
    )


def _moe_gemv(shapes: Shapes, arguments: Mapping[str, Any]) -> KernelCost:
    """One token: the first router of `gate` (routers, E, D), and experts as in `_experts`."""
    routers, experts, hidden = shapes["gate"]
    token = {**shapes, "x": (1, hidden), "ids": (1, arguments["top_k"])}
    cost = _experts(token, arguments)
    return KernelCost(
        flops=cost.flops + 2 * experts * hidden,
        weight_shares={**cost.weight_shares, "gate": sympy.Rational(1, routers)},
    )


def _route_hidden(shapes: Shapes, arguments: Mapping[str, Any]) -> KernelCost:
    """x (T, D), weight (routers, E, D), of which one is read unless an index selects one per token."""
    routers, experts, hidden = shapes["weight"]
    share = 1 if arguments["gate_index"] is not None else sympy.Rational(1, routers)
    return KernelCost(flops=2 * shapes["x"][0] * experts * hidden, weight_shares={"weight": share})


def _one_token_each(batch: Size, query_width: Size, key_width: Size, seen: Size = CONTEXT + 1) -> KernelCost:
    """One new token for each of `batch` requests, which attends to `seen` tokens of its request."""
    return KernelCost(flops=4 * batch * query_width * seen, state_elements=2 * batch * key_width * seen)


def _flow_sample(shapes: Shapes, _: Mapping[str, Any]) -> KernelCost:
    """The sampler's steps, then the aggregator.

    noise (B, P, C), history (B, H, C), times (steps, D), embedding and projection of the DiT (`edges`), weights used
    once (`others`), blocks and RoPE tables (T, d/2) of DiT and aggregator.
    """
    steps, (requests, patch, _), history = shapes["times"][0], shapes["noise"], shapes["history"][1]
    embed, _bias, project, _bias = (math.prod(shape) for shape in shapes["edges"])
    condition, _bias, _sizes, stop, _bias, _query, aggregator_embed, _bias = (
        math.prod(shape) for shape in shapes["others"]
    )
    tokens, aggregated = shapes["cos"][0], shapes["aggregator_cos"][0]
    step = _blocks_flops(2 * tokens, tokens, shapes["blocks"]) + 2 * patch * (embed + 2 * project)
    before = 2 * (condition + stop + history * embed)
    after = 2 * patch * aggregator_embed + _blocks_flops(aggregated, aggregated, shapes["aggregator"])
    flops = requests * (before + steps * step + after)
    return KernelCost(flops=flops, weight_shares={"blocks": steps, "edges": steps})


def _blocks_flops(rows: Size, tokens: Size, blocks: Sequence[Any]) -> Size:
    """FLOPs of the GEMMs and attention of all blocks, over sequences of `tokens`."""
    matrices = [shape for shape in blocks if len(shape) == 2]
    width = blocks[0][0]  # size of the first norm
    attention = 4 * rows * tokens * (width * len(matrices) // 4)  # four matrices per block
    return 2 * rows * sum(math.prod(shape) for shape in matrices) + attention


def _causal(tokens: Size, query_width: Size, key_width: Size) -> KernelCost:
    """Causal attention of one request's chunk of `tokens` to the context and itself."""
    return KernelCost(
        flops=2 * query_width * tokens * (2 * CONTEXT + tokens + 1),
        state_elements=2 * key_width * (tokens + CONTEXT),
    )


def _elementwise(_: Shapes, __: Mapping[str, Any]) -> KernelCost:
    """No GEMM, no attention, no state."""
    return KernelCost()


KERNELS: Mapping[str, Rule] = {
    "add_gated": _elementwise,
    "add_gated_norm": _elementwise,
    "add_layer_norm": _elementwise,
    "add_linear": _linear,
    "decode_attention": _decode_attention,
    "flow_sample": _flow_sample,
    "moe_gemv": _moe_gemv,
    "fused_norm_gemv": _linear,
    "moe_decode": _experts,
    "modulated_norm": _elementwise,
    "moe_prefill": _experts,
    "norm_rotate_packed": _elementwise,
    "norm_rope_write": _norm_rope_write,
    "normed_linear": _linear,
    "paged_decode_attention": _paged_decode_attention,
    "paged_prefill_attention": _paged_prefill_attention,
    "sliding_window_attention": _sliding_window_attention,
    "quantize_rows": _elementwise,
    "rotary_varlen_attention": _rotary_varlen_attention,
    "rotate_packed": _elementwise,
    "route_hidden": _route_hidden,
    "sample_tokens": _elementwise,
    "silu_product": _elementwise,
    "gemv": _linear,
    "small_sequence_attention": _small_sequence_attention,
    "contiguous_kv_attention": _contiguous_kv_attention,
    "contiguous_kv_prefill_attention": _contiguous_kv_prefill_attention,
    "sum_norm_linear": _gemv,
    "varlen_attention": _varlen_attention,
}
