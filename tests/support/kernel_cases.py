"""Calls of every family of kernels at sizes that its kernel takes, and at odd ones, for which plain torch must run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mingc.kernels import linear as linears
from mingc.kernels.contiguous_kv_attention import contiguous_kv_attention
from mingc.kernels.contiguous_kv_prefill_attention import contiguous_kv_prefill_attention
from mingc.kernels.decode_attention import decode_attention
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.gemv import gemv, sum_norm_linear
from mingc.kernels.layer_norm import add_layer_norm
from mingc.kernels.moe_experts import ExpertWeights, moe_experts
from mingc.kernels.moe_gemv import RouterWeights, has_moe_gemv, moe_gemv
from mingc.kernels.mrope import apply_rope, mrope_cos_sin
from mingc.kernels.norm_rope_write import norm_rope_write
from mingc.kernels.paged_attention import paged_decode_attention, paged_prefill_attention
from mingc.kernels.quantized import quantize_fp8, quantize_int4
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.rotate_packed import rotate_packed
from mingc.kernels.router import route_hidden
from mingc.kernels.sample_tokens import sample_tokens
from mingc.kernels.sliding_window_attention import sliding_window_attention
from mingc.kernels.small_sequence_attention import small_sequence_attention
from mingc.kernels.varlen_attention import make_segments, varlen_attention

_PAGE = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One call: `run` makes its inputs and returns its results, `has_kernel` is whether a kernel takes the sizes."""

    run: Callable[[], Sequence[Tensor]]
    has_kernel: bool


class _Inputs:
    """Random inputs on `device`, in `dtype` unless it is said."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self._device).to(dtype or self._dtype)

    def weight(self, *shape: int) -> Tensor:
        return (torch.randn(shape, device=self._device) * shape[-1] ** -0.5).to(self._dtype)

    def turns(self, *shape: int) -> tuple[Tensor, Tensor]:
        angles = self.normal(*shape, dtype=torch.float32)
        return angles.cos(), angles.sin()

    def ints(self, *values: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(self._device)

    def stored(self, kind: str, *shape: int) -> tuple[Tensor, Tensor | None]:
        """A weight and its scale; `kind` is plain, fp8 or int4."""
        weight = self.weight(*shape)
        if kind == "plain":
            return weight, None
        return (quantize_fp8 if kind == "fp8" else quantize_int4)(weight)


def cases(device: str, dtype: torch.dtype) -> dict[str, Case]:
    """All cases, in half precision of either `dtype`; they make their inputs on `device`."""
    make = _Inputs(device, dtype)
    found: dict[str, Case] = {}

    def add(family: str, has_kernel: bool, run: Callable[..., Sequence[Tensor]], *sizes: Any) -> None:
        found[f"{family} {' '.join(map(str, sizes))}"] = Case(
            run=lambda: run(make, *sizes), has_kernel=has_kernel
        )

    for rows in (1, 2, 5, 40):
        for hidden, inner in ((48, 64), (24, 64), (40, 40), (48, 40)):
            # Two rows are a GEMV of any size, and some GEMM of a layer fits all but the two hidden sizes.
            add("layer", rows <= 2 or (rows == 5 and hidden == 48), _layer, rows, hidden, inner, "plain")
    for rows, hidden, fits in ((5, 48, True), (5, 40, False), (1, 40, True)):
        add("layer", fits, _layer, rows, hidden, 64, "fp8")
    for size in ((32, 128), (24, 128), (32, 136)):
        add("gemv", size == (32, 128), lambda m, n, k: [gemv(m.normal(1, k), m.weight(n, k))], *size)
        add("sum_norm_linear", size == (32, 128), _sum_norm_linear, *size)
    for tokens in (1, 3, 70):
        for sizes in ((128, 128, 4), (96, 128, 4), (128, 40, 4), (128, 128, 6), (24, 40, 4)):
            fits = sizes == (128, 128, 4)
            for kind in ("plain", "fp8", "int4") if fits or sizes[0] == 24 else ("plain",):
                add("moe_experts", fits, _moe_experts, tokens, *sizes, kind)
    for hidden, experts, groups in (
        (128, 16, 4),
        (128, 16, 16),
        (128, 12, 4),
        (100, 16, 4),
        (128, 8, 4),
        (24, 16, 4),
    ):
        fits = (hidden, experts, groups) == (128, 16, 4)
        add("router", fits, _route, 5, hidden, experts, groups)
        for kind in ("plain", "plain alone", "fp8") if fits else ("plain",):
            add("moe_gemv", fits, _moe_gemv, hidden, experts, groups, kind)
    for heads, kv_heads, size in ((4, 2, 32), (6, 2, 64), (4, 2, 48), (3, 1, 24), (2, 1, 256)):
        for operation in (_paged_decode, _paged_prefill, _norm_rope_write):
            add(operation.__name__[1:], size in (32, 64), operation, heads, kv_heads, size)
        for lengths in ((5, 20), (128, 129), (1, 300)):
            add("decode_attention", size in (32, 64), _decode_attention, heads, kv_heads, size, *lengths)
        for operation in (_slots_decode, _slots_prefill):
            add(operation.__name__[1:], size in (32, 64), operation, heads, kv_heads, size)
    for frames, size, rows in ((5, 32, 40), (5, 40, 40), (70, 32, 100), (5, 32, 300), (5, 256, 40)):
        add("sliding_window_attention", (frames, size, rows) == (5, 32, 40), _sliding, frames, size, rows)
    for tokens, size in ((5, 32), (37, 64), (37, 24), (140, 32), (5, 256)):
        add("small_sequence_attention", tokens < 40 and size in (32, 64), _small_sequence, tokens, size)
    for width in (24, 40, 1153, 20_000):
        add("add_layer_norm", width < 20_000, _add_layer_norm, width)
    for size in (24, 40, 72):
        add(
            "rotate_packed", True, lambda m, d: rotate_packed(m.normal(9, 3, 2, d), *m.turns(9, d // 2)), size
        )
    for size in (64, 72, 128, 40, 68, 136):
        add("varlen_attention", size in (64, 72, 128), _varlen, size)
    for vocab in (24, 2100):
        add("sample_tokens", True, _sample, vocab)
    add("rms_norm", False, lambda m, d: [rms_norm(m.normal(3, d), m.normal(d), 1e-6)], 24)
    add("mrope", False, _mrope, 24)
    return found


def _layer(make: _Inputs, rows: int, hidden: int, inner: int, kind: str) -> Sequence[Tensor]:
    """Both GEMMs of an MLP between norms, as the speech LLM chains them, of rows that are apart."""
    x, norm = make.normal(rows, 2, hidden)[:, 1], 1 + make.weight(hidden)
    up, up_scale = make.stored(kind, 2 * inner, hidden)
    down, down_scale = make.stored(kind, hidden, inner)
    state = linears.begin_residual(x, norm, 1e-6)
    middle = linears.normed_linear(state, up, None, 1e-6, "swiglu", up_scale)
    state = linears.add_linear(middle, down, make.normal(hidden), state, norm, 1e-6, down_scale)
    head, head_scale = make.stored(kind, hidden, hidden)
    return state.values, linears.normed_linear(state, head, make.normal(hidden), 1e-6, "gelu", head_scale)


def _sum_norm_linear(make: _Inputs, n: int, k: int) -> Sequence[Tensor]:
    return sum_norm_linear(make.normal(1, k), make.normal(1, k), 1 + make.weight(k), make.weight(n, k), 1e-6)


def _experts(make: _Inputs, kind: str, hidden: int, inner: int, count: int) -> ExpertWeights:
    gate_up, gate_up_scale = make.stored(kind, count, 2 * inner, hidden)
    down, down_scale = make.stored(kind, count, hidden, inner)
    return ExpertWeights(gate_up, down, gate_up_scale, down_scale)


def _moe_experts(
    make: _Inputs, tokens: int, hidden: int, inner: int, count: int, kind: str
) -> Sequence[Tensor]:
    experts = _experts(make, kind, hidden, inner, count)
    # Its GEMM of many FP8 rows overflows in float16, which the interpreter needs and no export has.
    is_shared = kind == "plain" or (kind == "fp8" and tokens < 40)
    shared = ExpertWeights(*(None if each is None else each[0] for each in experts)) if is_shared else None
    ids = torch.stack([torch.arange(2) + token for token in range(tokens)]).to(experts.down.device) % count
    weights = make.normal(tokens, 2, dtype=torch.float32).abs()
    return [moe_experts(make.normal(tokens, hidden), ids, weights, *experts, shared=shared)]


def _route(make: _Inputs, tokens: int, hidden: int, experts: int, groups: int) -> Sequence[Tensor]:
    bias = make.normal(3, experts, dtype=torch.float32)
    ids, weights = route_hidden(
        make.normal(tokens, hidden), make.weight(3, experts, hidden), bias, make.ints(0, 2, 1, 0, 2),
        num_groups=groups, num_kept_groups=groups // 2, top_k=3, scale=2.5,
    )  # fmt: skip
    return ids.float(), weights


def _moe_gemv(make: _Inputs, hidden: int, experts: int, groups: int, kind: str) -> Sequence[Tensor]:
    """With a shared expert, unless `kind` ends in "alone"."""
    weights, x = _experts(make, kind.split()[0], hidden, 128, experts), make.normal(1, hidden)
    shared = (
        None
        if kind.endswith("alone")
        else ExpertWeights(*(None if each is None else each[0] for each in weights))
    )
    bias = make.normal(1, experts, dtype=torch.float32)
    router = RouterWeights(make.weight(1, experts, hidden), bias, groups, groups // 2, 3, 2.5)
    delta, norm = make.normal(1, hidden), 1 + make.weight(hidden)
    if has_moe_gemv(x, router, weights, shared):
        return moe_gemv(x, delta, norm, 1e-6, router, weights, shared)
    with plain_torch():  # what is tested is the choice above
        stream = x + delta
        normed = rms_norm(stream, norm, 1e-6)
        ids, chosen = route_hidden(
            normed,
            router.weight,
            bias,
            None,
            num_groups=groups,
            num_kept_groups=groups // 2,
            top_k=3,
            scale=2.5,
        )
        return stream, moe_experts(normed, ids, chosen, *weights, shared=shared), ids, chosen


def _paged(make: _Inputs, kv_heads: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Key and value pools of five pages, and the pages of two requests."""
    pools = [make.normal(5 * _PAGE, kv_heads, size) for _ in range(2)]
    return pools[0], pools[1], make.ints(1, 3, 2, 4, dtype=torch.int32).view(2, 2)


def _paged_decode(make: _Inputs, heads: int, kv_heads: int, size: int) -> Sequence[Tensor]:
    k, v, table = _paged(make, kv_heads, size)
    return [paged_decode_attention(make.normal(2, heads, size), k, v, table, make.ints(5, 20), _PAGE)]


def _paged_prefill(make: _Inputs, heads: int, kv_heads: int, size: int) -> Sequence[Tensor]:
    k, v, table = _paged(make, kv_heads, size)
    index, segment = make.ints(*range(3, 28)), make.ints(*[1] * 25)
    return [paged_prefill_attention(make.normal(25, heads, size), k, v, table, segment, index, _PAGE)]


def _norm_rope_write(make: _Inputs, heads: int, kv_heads: int, size: int) -> Sequence[Tensor]:
    k, v, _ = _paged(make, kv_heads, size)
    qkv, norms = make.normal(3, heads + 2 * kv_heads, size), [1 + make.weight(size) for _ in range(2)]
    turns = make.turns(3, size // 4)
    return norm_rope_write(qkv, *norms, *turns, make.ints(7, 33, 70), k, v, 1e-6), k, v


def _decode_attention(make: _Inputs, heads: int, kv_heads: int, size: int, *lengths: int) -> Sequence[Tensor]:
    """Tables that hold the longer request; whatever is behind a request's tokens must not matter."""
    width = -(-max(lengths) // _PAGE)
    pages = 1 + torch.arange(len(lengths) * width, dtype=torch.int32).view(width, -1).T
    k, v = (make.normal((1 + pages.numel()) * _PAGE, kv_heads, size) for _ in range(2))
    qkv, norms = make.normal(2, heads + 2 * kv_heads, size), [1 + make.weight(size) for _ in range(2)]
    table = pages.contiguous().to(k.device)
    turns = make.turns(2, size // 4)
    return decode_attention(qkv, *norms, *turns, k, v, table, make.ints(*lengths), 1e-6, _PAGE), k, v


def _slots_decode(make: _Inputs, heads: int, kv_heads: int, size: int) -> Sequence[Tensor]:
    k, v = (make.normal(3, 20, kv_heads, size) for _ in range(2))
    qkv = make.normal(2, (heads + 2 * kv_heads) * size)
    turns = make.turns(2, size // 2)
    return contiguous_kv_attention(qkv, *turns, k, v, make.ints(2, 1), make.ints(4, 17), 9), k, v


def _slots_prefill(make: _Inputs, heads: int, kv_heads: int, size: int) -> Sequence[Tensor]:
    k, v = (make.normal(3, 20, kv_heads, size) for _ in range(2))
    qkv, turns = make.normal(7, (heads + 2 * kv_heads) * size), make.turns(7, size // 2)
    slots, prompts, places = make.ints(2), make.ints(0, 0, 0, 0, 0, 0, -1), make.ints(4, 5, 6, 7, 8, 9, 0)
    out = contiguous_kv_prefill_attention(qkv, *turns, k, v, slots, prompts, places, None)
    return out[:6], k[1:], v[1:]  # row 6 is padding, written to slot 0


def _sliding(make: _Inputs, frames: int, size: int, rows: int) -> Sequence[Tensor]:
    k, v = (make.normal(3, rows, 1, size) for _ in range(2))
    qkv, turns = make.normal(2, frames, 4 * size), make.turns(2, frames, size // 2)
    return sliding_window_attention(qkv, *turns, k, v, make.ints(2, 1), make.ints(0, 60), 8), k, v


def _small_sequence(make: _Inputs, tokens: int, size: int) -> Sequence[Tensor]:
    return [small_sequence_attention(make.normal(2, tokens, 6 * size), *make.turns(tokens, size // 2))]


def _add_layer_norm(make: _Inputs, width: int) -> Sequence[Tensor]:
    return add_layer_norm(
        make.normal(3, width), make.normal(3, width), make.normal(width), make.normal(width), 1e-6
    )


def _varlen(make: _Inputs, size: int) -> Sequence[Tensor]:
    bounds = make.ints(*[0, 11] * 11, *[11, 30] * 19).view(1, 30, 2)
    segments = make_segments(bounds, make.normal(30, 2 * size), 2)
    q, k, v = (make.normal(1, 30, 2, size) for _ in range(3))
    return [varlen_attention(q, k, v, segments)]


def _sample(make: _Inputs, vocab: int) -> Sequence[Tensor]:
    rules = make.ints(*[1, 5, 1, 0, 1, 0]).float()
    sampling = torch.cat((rules, rules.new_zeros(20))).expand(4, -1).contiguous()
    seen = rules.new_zeros(4, vocab, dtype=torch.bool)
    return [sample_tokens(make.normal(4, vocab, dtype=torch.float32), sampling, seen).float()]


def _mrope(make: _Inputs, size: int) -> Sequence[Tensor]:
    rows = make.ints(*(index % 3 for index in range(size // 2)))
    frequencies = make.normal(size // 2, dtype=torch.float32)
    cos, sin = mrope_cos_sin(make.ints(*range(15)).view(3, 5), frequencies, rows)
    return [apply_rope(make.normal(5, 2, size + 4), cos, sin)]
