"""The grouped matrix products of a prefill chunk's experts, over rows that `mingc.kernels.triton.moe_prefill` has
sorted.

A program takes a block of one expert's rows and some columns. With EXTRA a block may hold so many rows more than BM:
they share the weights that the others read, where a block of their own would read them again.

Shape letters: T tokens, K experts a token, E experts, D hidden, F this rank's expert width, R = T K pairs.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mingc.kernels.triton.float16_step import FP16_STEP
from mingc.kernels.triton.moe_decode import activate, nibbles


@triton.jit
def _product(
    xs, ws, scales, is_row,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Rows at `xs` (BM,) times weight rows at `ws` (BN,): (BM, BN) float32, scaled.

    SWAP puts the weights on the side that the matrix units take from registers, where narrow ones are widened.
    INT4: as in `moe_decode`, even columns of x come first and DEPTH counts bytes; it needs SWAP.
    """
    shape: tl.constexpr = [BN, BM] if SWAP else [BM, BN]
    total = tl.zeros(shape, tl.float32)
    mask = is_row[:, None]
    if FORMAT == 2:
        j = tl.arange(0, 64)
        xs = xs[:, None] + j[None, :]
        ws = ws[:, None] + j[None, :]
        for group in range(0, DEPTH // 64):
            even = tl.load(xs + group * 64, mask=mask, other=0.0)
            odd = tl.load(xs + DEPTH + group * 64, mask=mask, other=0.0)
            low, high = nibbles(tl.load(ws + group * 64))
            part = tl.dot(low.to(even.dtype), tl.trans(even))
            part = tl.dot(high.to(odd.dtype), tl.trans(odd), part)
            total += part * tl.load(scales + group).to(tl.float32)[:, None]
    else:
        k = tl.arange(0, BK)
        xs = xs[:, None] + k[None, :]
        ws = ws[:, None] + k[None, :]
        for begin in range(0, DEPTH, BK):
            a = tl.load(xs + begin, mask=mask, other=0.0)
            w = tl.load(ws + begin).to(a.dtype)
            total = tl.dot(w, tl.trans(a), total) if SWAP else tl.dot(a, tl.trans(w), total)
    total = tl.trans(total) if SWAP else total
    if FORMAT == 1:
        total *= tl.load(scales)[None, :] * FP16_STEP
    return total


@triton.jit
def _two_products(
    xs, extra_xs, ws, is_extra,
    DEPTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Rows at `xs` (BM,) and at `extra_xs` (EXTRA,) times weight rows at `ws` (BN,): float32 (BM, BN), (BN, EXTRA).

    The few rows are on the second side: the matrix units take 64 at least on the first.
    """
    total = tl.zeros([BM, BN], tl.float32)
    extra = tl.zeros([BN, EXTRA], tl.float32)
    k = tl.arange(0, BK)
    xs = xs[:, None] + k[None, :]
    extra_xs = extra_xs[:, None] + k[None, :]
    ws = ws[:, None] + k[None, :]
    for begin in range(0, DEPTH, BK):
        a = tl.load(xs + begin)
        w = tl.load(ws + begin)
        b = tl.load(extra_xs + begin, mask=is_extra[:, None], other=0.0)
        total = tl.dot(a, tl.trans(w), total)
        extra = tl.dot(w, tl.trans(b), extra)
    return total, extra


@triton.jit
def _rows_of(table, block, MAX_BLOCKS: tl.constexpr, BM: tl.constexpr):
    """A block's first row, the row behind its last, its rows (BM,) and which of these are its own."""
    first = tl.load(table + MAX_BLOCKS + block)
    end = tl.load(table + 2 * MAX_BLOCKS + block)
    row = first + tl.arange(0, BM)
    return first, end, row, row < end


@triton.jit
def mingc_moe_grouped_up(
    x, order, table, gate_up, gate_up_scale, hidden,
    K: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
    EXTRA: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of the sorted rows: x (T, D) → hidden (R, F). DEPTH is D as stored."""
    block = tl.program_id(1)
    expert = tl.load(table + block)
    if expert < 0:
        return
    first, end, row, is_row = _rows_of(table, block, MAX_BLOCKS, BM)
    token = tl.load(order + row, mask=is_row, other=0) // K
    # Gate and up rows alternate in the tile: a thread then holds both of a column.
    j = tl.arange(0, BN)
    n = tl.program_id(0) * (BN // 2) + j // 2 + (j % 2) * F
    column = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    dtype = hidden.dtype.element_ty
    groups: tl.constexpr = DEPTH // 64 if FORMAT == 2 else 1
    xs = x + token * D
    ws = gate_up + expert.to(tl.int64) * (2 * F * DEPTH) + n * DEPTH
    scales = gate_up_scale + (expert * (2 * F) + n) * groups
    if EXTRA > 0:
        if end - first > BM:
            extra_row = first + BM + tl.arange(0, EXTRA)
            is_extra = extra_row < end
            extra_token = tl.load(order + extra_row, mask=is_extra, other=0) // K
            total, extra = _two_products(xs, x + extra_token * D, ws, is_extra, DEPTH, BM, BN, BK, EXTRA)
            gate, up = tl.split(tl.reshape(tl.trans(extra), [EXTRA, BN // 2, 2]))
            extra_activated = activate(gate, up, dtype).to(dtype)
            tl.store(
                hidden + extra_row[:, None] * F + column[None, :], extra_activated, mask=is_extra[:, None]
            )
        else:
            total = _product(xs, ws, scales, is_row, DEPTH, FORMAT, BM, BN, BK, SWAP)
    else:
        total = _product(xs, ws, scales, is_row, DEPTH, FORMAT, BM, BN, BK, SWAP)
    gate, up = tl.split(tl.reshape(total, [BM, BN // 2, 2]))
    activated = activate(gate, up, tl.bfloat16 if FORMAT == 1 else dtype)
    if FORMAT == 1:
        activated = tl.clamp(activated * (1 / FP16_STEP), -65504.0, 65504.0)
    if FORMAT == 2:
        column = (column % 2) * (F // 2) + column // 2
    tl.store(hidden + row[:, None] * F + column[None, :], activated.to(dtype), mask=is_row[:, None])


@triton.jit
def mingc_moe_grouped_down(
    hidden, order, table, down, down_scale, outputs,
    D: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr, MAX_BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """hidden (R, F), sorted → outputs (R, D) in the order of the pairs. DEPTH is F as stored."""
    block = tl.program_id(1)
    expert = tl.load(table + block)
    if expert < 0:
        return
    first, end, row, is_row = _rows_of(table, block, MAX_BLOCKS, BM)
    pair = tl.load(order + row, mask=is_row, other=0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    dtype = outputs.dtype.element_ty
    groups: tl.constexpr = DEPTH // 64 if FORMAT == 2 else 1
    xs = hidden + row * F
    ws = down + expert.to(tl.int64) * (D * DEPTH) + n * DEPTH
    scales = down_scale + (expert * D + n) * groups
    if EXTRA > 0:
        if end - first > BM:
            extra_row = first + BM + tl.arange(0, EXTRA)
            is_extra = extra_row < end
            extra_pair = tl.load(order + extra_row, mask=is_extra, other=0)
            total, extra = _two_products(xs, hidden + extra_row * F, ws, is_extra, DEPTH, BM, BN, BK, EXTRA)
            extra_target = outputs + extra_pair.to(tl.int64)[:, None] * D + n[None, :]
            tl.store(extra_target, tl.trans(extra).to(dtype), mask=is_extra[:, None])
        else:
            total = _product(xs, ws, scales, is_row, DEPTH, FORMAT, BM, BN, BK, SWAP)
    else:
        total = _product(xs, ws, scales, is_row, DEPTH, FORMAT, BM, BN, BK, SWAP)
    target = outputs + pair.to(tl.int64)[:, None] * D + n[None, :]
    tl.store(target, total.to(dtype), mask=is_row[:, None])
