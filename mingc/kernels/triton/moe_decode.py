"""Triton kernels of `mingc.kernels.moe_experts` for the few tokens of a decode step: bound by reading weights once.

A program takes one (token, expert) pair and a tile of the expert's rows. It computes all tokens routed to the expert,
and exits at once unless its pair is the expert's first: every expert needed is read once, and nothing is sorted. A
single token runs as GEMVs without tensor cores, whose programs can be as small as a few rows. The shared expert is one
more expert, of all tokens. Sums have a fixed order; a token's result does not depend on the others of its batch.

Shape letters: T tokens, K experts per token, E experts, D hidden size, F this rank's intermediate size, R pairs: T K,
and T more when there is a shared expert.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.triton.moe_config import FP8, INT4, MoeProblem, kernel_for, select_config
from mingc.kernels.triton.pdl import enable_pdl
from mingc.kernels.triton.weight_formats import (
    FP16_SCALE,
    activate,
    as_operand,
    shift_to,
    unpack_int4,
    weight_format_of,
)

_ROWS = 16  # tokens of one GEMM: the least that tensor cores take
_SUM_COLUMNS = 512
_LOAD_BYTES = tl.constexpr(16)  # that a thread loads at once


@triton.jit
def _members(routed_ids, expert, pair, T, K: tl.constexpr, K_PADDED: tl.constexpr, TOKENS: tl.constexpr):
    """Tokens routed to `expert`, and each one's row among the pairs; `routed_ids` (TOKENS, K_PADDED) holds their ids.

    No token if `pair` is not the first pair of its expert. Pair T K stands for the shared expert. (The caller loads the
    ids: torch assumes that a tensor is written if a helper loads from it and a store's address depends on it.)
    """
    t = tl.arange(0, TOKENS)
    k = tl.arange(0, K_PADDED)
    is_shared = pair == T * K
    is_hit = (routed_ids == expert).to(tl.int32)
    is_member = tl.max(is_hit, 1)
    first = tl.min(tl.where(is_member > 0, t, TOKENS), 0)
    is_member = tl.where(first == pair // K, is_member, 0)
    row = t * K + tl.sum(is_hit * k[None, :], 1)
    is_member = tl.where(is_shared, (t < T).to(tl.int32), is_member)
    row = tl.where(is_shared, T * K + t, row)
    return is_member, row


@triton.jit
def _compact(is_member, row, done, TOKENS: tl.constexpr, ROWS: tl.constexpr):
    """The next ROWS members after the first `done`: their tokens, rows and whether they exist, (ROWS,) each."""
    t = tl.arange(0, TOKENS)
    wanted = tl.arange(0, ROWS) + done
    number = tl.cumsum(is_member, 0) - is_member
    is_it = (number[:, None] == wanted[None, :]) & (is_member > 0)[:, None]
    token = tl.sum(tl.where(is_it, t[:, None], 0), 0)
    place = tl.sum(tl.where(is_it, row[:, None], 0), 0)
    return token, place, wanted < tl.sum(is_member, 0)


@triton.jit
def _column(values, which: tl.constexpr, size: tl.constexpr):
    """Column `which` of (N, size) as float32."""
    j = tl.arange(0, size)
    return tl.sum(tl.where((j == which)[None, :], values.to(tl.float32), 0.0), 1)


@triton.jit
def mingc_moe_up(
    x, ids, gate_up, gate_up_scale, shared, shared_scale, hidden, T,
    K: tl.constexpr, K_PADDED: tl.constexpr, D: tl.constexpr, F: tl.constexpr, HAS_SHARED: tl.constexpr,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of every pair: x (T, D) → hidden (R, F).

    INT4: even columns come before odd ones in `x` and in `hidden`; D and BLOCK_K count bytes.
    """
    tile = tl.program_id(0)
    # The shared expert has the most tokens; it starts first so that it does not finish last.
    pair = tl.program_id(1) - 1 if HAS_SHARED else tl.program_id(1)
    pair = tl.where(pair < 0, T * K, pair)
    t = tl.arange(0, TOKENS)
    choice = tl.arange(0, K_PADDED)
    is_choice = (t < T)[:, None] & (choice < K)[None, :]
    expert = tl.load(ids + pair, mask=pair < T * K, other=-2)
    routed_ids = tl.load(ids + t[:, None] * K + choice[None, :], mask=is_choice, other=-1)
    is_member, row = _members(routed_ids, expert, pair, T, K, K_PADDED, TOKENS)
    count = tl.sum(is_member, 0)
    if count == 0:
        return
    is_shared = pair == T * K
    item: tl.constexpr = gate_up.dtype.element_ty.primitive_bitwidth // 8
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    start = shift_to(gate_up, shared, is_shared, expert * (2 * F * D), item)
    rows = gate_up + start + n * D
    groups: tl.constexpr = D // 64 if FORMAT == 2 else 1
    at_once: tl.constexpr = BLOCK_K // 64 if FORMAT == 2 else 1
    if FORMAT != 0:
        size: tl.constexpr = 4 if FORMAT == 1 else 2
        start = shift_to(gate_up_scale, shared_scale, is_shared, expert * (2 * F * groups), size)
        scales = gate_up_scale + start + n * groups
    for done in range(0, count, ROWS):
        token, place, is_live = _compact(is_member, row, done, TOKENS, ROWS)
        mask = is_live[:, None]
        gate = tl.zeros([ROWS, BLOCK_N], tl.float32)
        up = tl.zeros([ROWS, BLOCK_N], tl.float32)
        if FORMAT == 2:
            j = tl.arange(0, 64)
            xs = x + token[:, None] * (2 * D) + j[None, :]
            packed = rows[None, :] + j[:, None]
            scale_at = scales[:, None] + tl.arange(0, at_once)[None, :]
            # Prefetch scales one step ahead: the compiler pipelines only operands of tl.dot.
            gate_scale, up_scale = tl.load(scale_at), tl.load(scale_at + F * groups)
            for begin in range(0, groups, at_once):
                ahead = tl.minimum(begin + at_once, groups - at_once)
                next_gate_scale, next_up_scale = (
                    tl.load(scale_at + ahead),
                    tl.load(scale_at + F * groups + ahead),
                )
                for each in tl.static_range(at_once):
                    offset = (begin + each) * 64
                    even = tl.load(xs + offset, mask=mask, other=0.0)
                    odd = tl.load(xs + D + offset, mask=mask, other=0.0)
                    low, high = unpack_int4(tl.load(packed + offset))
                    part = tl.dot(odd, high.to(odd.dtype), tl.dot(even, low.to(even.dtype)))
                    gate += part * _column(gate_scale, each, at_once)[None, :]
                    low, high = unpack_int4(tl.load(packed + F * D + offset))
                    part = tl.dot(odd, high.to(odd.dtype), tl.dot(even, low.to(even.dtype)))
                    up += part * _column(up_scale, each, at_once)[None, :]
                gate_scale, up_scale = next_gate_scale, next_up_scale
        else:
            xs = x + token[:, None] * D + k[None, :]
            gates = rows[None, :] + k[:, None]
            ups = gates + F * D
            for begin in range(0, D, BLOCK_K):
                a = tl.load(xs + begin, mask=mask, other=0.0)
                gate = tl.dot(a, tl.load(gates + begin).to(a.dtype), gate)
                up = tl.dot(a, tl.load(ups + begin).to(a.dtype), up)
            if FORMAT == 1:
                gate *= tl.load(scales)[None, :] * FP16_SCALE
                up *= tl.load(scales + F)[None, :] * FP16_SCALE
        activated = activate(gate, up, tl.bfloat16 if FORMAT == 1 else x.dtype.element_ty)
        if FORMAT == 1:
            activated = tl.clamp(activated * (1 / FP16_SCALE), -65504.0, 65504.0)
        column = (n % 2) * (F // 2) + n // 2 if FORMAT == 2 else n
        tl.store(
            hidden + place[:, None] * F + column[None, :], activated.to(hidden.dtype.element_ty), mask=mask
        )


@triton.jit
def mingc_moe_down(
    hidden, ids, down, down_scale, shared, shared_scale, outputs, T,
    K: tl.constexpr, K_PADDED: tl.constexpr, D: tl.constexpr, F: tl.constexpr, HAS_SHARED: tl.constexpr,
    FORMAT: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    TILES: tl.constexpr,
):  # fmt: skip
    """The experts' second GEMM: hidden (R, F) → outputs (R, D). A program computes TILES tiles of columns.

    INT4: F and BLOCK_K count bytes.
    """
    pair = tl.program_id(1) - 1 if HAS_SHARED else tl.program_id(1)
    pair = tl.where(pair < 0, T * K, pair)
    t = tl.arange(0, TOKENS)
    choice = tl.arange(0, K_PADDED)
    is_choice = (t < T)[:, None] & (choice < K)[None, :]
    expert = tl.load(ids + pair, mask=pair < T * K, other=-2)
    routed_ids = tl.load(ids + t[:, None] * K + choice[None, :], mask=is_choice, other=-1)
    is_member, row = _members(routed_ids, expert, pair, T, K, K_PADDED, TOKENS)
    count = tl.sum(is_member, 0)
    if count == 0:
        return
    is_shared = pair == T * K
    item: tl.constexpr = down.dtype.element_ty.primitive_bitwidth // 8
    column = tl.program_id(0) * (TILES * BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    start = shift_to(down, shared, is_shared, expert * (D * F), item)
    rows = down + start + column * F + n * F
    groups: tl.constexpr = F // 64 if FORMAT == 2 else 1
    at_once: tl.constexpr = BLOCK_K // 64 if FORMAT == 2 else 1
    if FORMAT != 0:
        size: tl.constexpr = 4 if FORMAT == 1 else 2
        scales = down_scale + shift_to(down_scale, shared_scale, is_shared, expert * (D * groups), size)
        scales += (column + n) * groups
    steps: tl.constexpr = F // BLOCK_K
    for done in range(0, count, ROWS):
        _, place, is_live = _compact(is_member, row, done, TOKENS, ROWS)
        mask = is_live[:, None]
        total = tl.zeros([ROWS, BLOCK_N], tl.float32)
        if FORMAT == 2:
            j = tl.arange(0, 64)
            scale_at = scales[:, None] + tl.arange(0, at_once)[None, :]
            scale = tl.load(scale_at)
        # One loop over tiles and K, so that the next tile's weights load while this tile finishes.
        for step in range(0, TILES * steps):
            tile = step // steps
            begin = (step % steps) * BLOCK_K
            if FORMAT == 2:
                ahead = tl.minimum(step + 1, TILES * steps - 1)
                ahead = (ahead // steps) * (BLOCK_N * groups) + (ahead % steps) * at_once
                next_scale = tl.load(scale_at + ahead)
                for each in tl.static_range(at_once):
                    offset = begin + each * 64
                    hs = hidden + place[:, None] * (2 * F) + offset + j[None, :]
                    even = tl.load(hs, mask=mask, other=0.0)
                    odd = tl.load(hs + F, mask=mask, other=0.0)
                    low, high = unpack_int4(
                        tl.load(rows[None, :] + j[:, None] + tile * (BLOCK_N * F) + offset)
                    )
                    part = tl.dot(odd, high.to(odd.dtype), tl.dot(even, low.to(even.dtype)))
                    total += part * _column(scale, each, at_once)[None, :]
                scale = next_scale
            else:
                a = tl.load(hidden + place[:, None] * F + begin + k[None, :], mask=mask, other=0.0)
                w = tl.load(rows[None, :] + k[:, None] + tile * (BLOCK_N * F) + begin)
                total = tl.dot(a, w.to(a.dtype), total)
            if step % steps == steps - 1:
                if FORMAT == 1:
                    total *= tl.load(scales + tile * BLOCK_N)[None, :] * FP16_SCALE
                target = outputs + place[:, None] * D + column + tile * BLOCK_N + n[None, :]
                tl.store(target, total.to(outputs.dtype.element_ty), mask=mask)
                total = tl.zeros([ROWS, BLOCK_N], tl.float32)


@triton.jit
def mingc_moe_sum(
    outputs, weights, out, T,
    K: tl.constexpr, D: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Weighted sum in float32 over each token's pairs in the order of its experts, the shared one last."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for each in tl.static_range(K):
        pair = token * K + each
        total += tl.load(weights + pair) * tl.load(outputs + pair.to(tl.int64) * D + n).to(tl.float32)
    if HAS_SHARED:
        total += tl.load(outputs + (T * K + token).to(tl.int64) * D + n).to(tl.float32)
    tl.store(out + token.to(tl.int64) * D + n, total.to(out.dtype.element_ty))


@triton.jit
def _gate_up(gates, gate_weights, up_weights, x, D: tl.constexpr, F: tl.constexpr, BLOCK_K: tl.constexpr):
    """Gate and up values of some rows, whose first BLOCK_K weights are loaded."""
    k = tl.arange(0, BLOCK_K)
    a = tl.load(x + k).to(tl.float32)[None, :]
    gate = gate_weights.to(tl.float32) * a
    up = up_weights.to(tl.float32) * a
    for begin in tl.static_range(BLOCK_K, D, BLOCK_K):
        a = tl.load(x + begin + k).to(tl.float32)[None, :]
        gate += tl.load(gates + begin).to(tl.float32) * a
        up += tl.load(gates + F * D + begin).to(tl.float32) * a
    return tl.sum(gate, 1), tl.sum(up, 1)


@triton.jit
def mingc_expert_gemv_up_pdl(
    x, ids, gate_up, gate_up_scale, shared, shared_scale, hidden,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, HAS_SHARED: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """`mingc_moe_up` of one token; row K of `hidden` is the shared expert's.

    The shared expert's programs come first: they load weights before the wait.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    pair = tl.program_id(1) - (1 if HAS_SHARED else 0)
    tile = n[:, None] * D + k[None, :]
    expert = tl.zeros([], tl.int64)
    if pair < 0:
        gates = shared + tile
        gate_weights = tl.load(gates)
        up_weights = tl.load(gates + F * D)
        zero = enable_pdl(PDL)
        gate, up = _gate_up(gates, gate_weights, up_weights, x + zero, D, F, BLOCK_K)
    else:
        zero = enable_pdl(PDL)
        expert = tl.load(ids + zero + pair)
        routed = gate_up + expert * (2 * F * D) + tile
        gate, up = _gate_up(routed, tl.load(routed), tl.load(routed + F * D), x + zero, D, F, BLOCK_K)
    if FORMAT == 1:
        scales = gate_up_scale + shift_to(gate_up_scale, shared_scale, pair < 0, expert * (2 * F), 4) + n
        gate *= tl.load(scales)
        up *= tl.load(scales + F)
    activated = activate(gate, up, x.dtype.element_ty)
    row = tl.where(pair < 0, K, pair)
    tl.store(hidden + zero + row * F + n, activated.to(hidden.dtype.element_ty))


@triton.jit
def mingc_expert_gemv_down_pdl(
    hidden, ids, weights, down, down_scale, shared, shared_scale, out,
    K: tl.constexpr, D: tl.constexpr, F: tl.constexpr, HAS_SHARED: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second GEMV and weighted sum of one token: a program computes BLOCK_N columns over all experts.

    All weights are requested before the first is used, those of the shared expert before the wait.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    tile = n[:, None] * F + k[None, :]
    pieces: tl.constexpr = F // BLOCK_K
    shared_parts: tl.tuple = ()
    if HAS_SHARED:
        for begin in tl.static_range(0, F, BLOCK_K):
            part = tl.load(shared + tile + begin, eviction_policy="evict_first")
            shared_parts = shared_parts + (part,)  # noqa: RUF005 - Triton unpacks nothing
        shared_factor = tl.full([BLOCK_N], 1.0, tl.float32)
        if FORMAT == 1:
            shared_factor = tl.load(shared_scale + n)
    zero = enable_pdl(PDL)
    parts: tl.tuple = ()
    factors: tl.tuple = ()
    for pair in tl.static_range(K):
        expert = tl.load(ids + zero + pair)
        factor = tl.load(weights + zero + pair) + tl.zeros([BLOCK_N], tl.float32)
        for begin in tl.static_range(0, F, BLOCK_K):
            part = tl.load(down + expert * (D * F) + tile + begin, eviction_policy="evict_first")
            parts = parts + (part,)  # noqa: RUF005
        if FORMAT == 1:
            factor *= tl.load(down_scale + expert * D + n)
        factors = factors + (factor,)  # noqa: RUF005
    if HAS_SHARED:
        parts = parts + shared_parts
        factors = factors + (shared_factor,)  # noqa: RUF005
    count: tl.constexpr = (K + 1 if HAS_SHARED else K) * pieces
    rows: tl.tuple = ()
    for each in tl.static_range(count):
        rows = rows + (tl.load(hidden + zero + each * BLOCK_K + k),)  # noqa: RUF005
    # Values that one thread holds are summed before they are scaled.
    adjacent: tl.constexpr = _LOAD_BYTES * 8 // down.dtype.element_ty.primitive_bitwidth
    total = tl.zeros([BLOCK_N, BLOCK_K // adjacent], tl.float32)
    for each in tl.static_range(count):
        products = parts[each].to(tl.float32) * rows[each].to(tl.float32)[None, :]
        sums = tl.sum(tl.reshape(products, [BLOCK_N, BLOCK_K // adjacent, adjacent]), 2)
        total += sums * factors[each // pieces][:, None]
    tl.store(out + zero + n, tl.sum(total, 1).to(out.dtype.element_ty))


@torch.library.triton_op("mingc::moe_decode", mutates_args={})
def moe_decode(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    shared_gate_up: Tensor | None,
    shared_down: Tensor | None,
    shared_gate_up_scale: Tensor | None,
    shared_down_scale: Tensor | None,
) -> Tensor:
    """See `mingc.kernels.moe_experts`; (T, D), T at most `MAX_DECODE_TOKENS`. All weights are in one format."""
    (tokens, hidden_size), top_k = x.shape, ids.shape[1]
    intermediate_size = gate_up.shape[1] // 2
    weight_format = weight_format_of(gate_up)
    per_item = 2 if weight_format == INT4 else 1  # the kernels count bytes where two values share one
    has_shared = shared_gate_up is not None
    num_shared = int(has_shared)  # a bool would reach symbolic shapes, which cannot add it
    up_weights = (
        gate_up, x if gate_up_scale is None else gate_up_scale,
        gate_up if shared_gate_up is None else shared_gate_up,
        x if shared_gate_up_scale is None else shared_gate_up_scale,
    )  # fmt: skip
    down_weights = (
        down, x if down_scale is None else down_scale,
        down if shared_down is None else shared_down,
        x if shared_down_scale is None else shared_down_scale,
    )  # fmt: skip
    num_pairs = tokens * (top_k + num_shared)
    out = torch.empty_like(x)
    kernel = kernel_for(tokens, weight_format)
    config = select_config(
        MoeProblem(
            kernel=kernel, tokens=tokens, hidden_size=hidden_size, intermediate_size=intermediate_size,
            experts=gate_up.shape[0], top_k=top_k, weight_format=weight_format,
        )
    )  # fmt: skip
    if kernel == "expert_gemv":
        hidden = torch.empty(num_pairs, intermediate_size, dtype=x.dtype, device=x.device)
        gemm = config.up
        torch.library.wrap_triton(mingc_expert_gemv_up_pdl)[(intermediate_size // gemm.block_n, num_pairs)](
            x, ids, *up_weights, hidden, K=top_k, D=hidden_size, F=intermediate_size, HAS_SHARED=has_shared,
            FORMAT=weight_format, BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, PDL=True, num_warps=gemm.num_warps,
        )  # fmt: skip
        gemm = config.down
        torch.library.wrap_triton(mingc_expert_gemv_down_pdl)[(hidden_size // gemm.block_n,)](
            hidden, ids, weights, *down_weights, out, K=top_k, D=hidden_size, F=intermediate_size,
            HAS_SHARED=has_shared, FORMAT=weight_format, BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, PDL=True,
            num_warps=gemm.num_warps,
        )  # fmt: skip
        return out

    shared_args = {
        "K": top_k,
        "K_PADDED": triton.next_power_of_2(top_k),
        "HAS_SHARED": has_shared,
        "FORMAT": weight_format,
        "TOKENS": max(_ROWS, triton.next_power_of_2(tokens)),
        "ROWS": _ROWS,
    }
    num_programs = tokens * top_k + num_shared
    hidden_dtype = torch.float16 if weight_format == FP8 else x.dtype
    x = as_operand(x, weight_format)
    hidden = torch.empty(num_pairs, intermediate_size, dtype=hidden_dtype, device=x.device)
    gemm = config.up
    torch.library.wrap_triton(mingc_moe_up)[(intermediate_size // gemm.block_n, num_programs)](
        x, ids, *up_weights, hidden, tokens, **shared_args, D=hidden_size // per_item, F=intermediate_size,
        BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, num_warps=gemm.num_warps, num_stages=gemm.num_stages,
    )  # fmt: skip
    gemm = config.down
    outputs = torch.empty(num_pairs, hidden_size, dtype=out.dtype, device=x.device)
    grid = (hidden_size // (gemm.block_n * gemm.tiles_per_program), num_programs)
    torch.library.wrap_triton(mingc_moe_down)[grid](
        hidden, ids, *down_weights, outputs, tokens, **shared_args, D=hidden_size, F=intermediate_size // per_item,
        BLOCK_N=gemm.block_n, BLOCK_K=gemm.block_k, TILES=gemm.tiles_per_program, num_warps=gemm.num_warps,
        num_stages=gemm.num_stages,
    )  # fmt: skip
    columns = min(_SUM_COLUMNS, hidden_size & -hidden_size)
    torch.library.wrap_triton(mingc_moe_sum)[(hidden_size // columns, tokens)](
        outputs, weights, out, tokens, K=top_k, D=hidden_size, HAS_SHARED=has_shared, BLOCK_N=columns, num_warps=4,
    )  # fmt: skip
    return out
