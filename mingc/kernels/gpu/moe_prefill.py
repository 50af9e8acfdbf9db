"""`mingc.kernels.moe_experts` on CUDA for prefill chunks: pairs sorted by expert, then grouped matrix products.

A counting sort puts the (token, expert) pairs in the order of their experts (those of one expert in token order), and a
table says which expert and which rows each block of the products works on. All of it stays on the device; grids are
static, blocks that the routing does not need leave at once.

Shape letters: T tokens, K experts a token, E experts, D hidden, F this rank's expert width, R = T K pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.gpu import moe_tiles
from mingc.kernels.gpu.float16_step import FP16_STEP
from mingc.kernels.gpu.moe_decode import (
    activate,
    as_operand,
    mingc_moe_sum,
    nibbles,
    storage_of,
)
from mingc.kernels.gpu.moe_tiles import FP8, INT4

_SORT_TOKENS = 16
_SUM_COLUMNS = 1024


@triton.jit
def mingc_moe_count(ids, counts, T, K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr):
    """How many tokens of each block chose each expert: counts (blocks, E)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, E)
    is_chosen = tl.zeros([TOKENS, E], tl.int32)
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        is_chosen += (expert[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * E + e, tl.sum(is_chosen, 0))


@triton.jit
def mingc_moe_plan(
    counts, table, NUM: tl.constexpr, E: tl.constexpr, BM: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """Turns counts into the row at which each block's pairs of each expert begin, and makes the block table.

    table (3, MAX_BLOCKS): expert (-1: no such block), first row, end of the expert's rows.
    """
    e = tl.arange(0, E)
    step = tl.arange(0, STEP)
    total = tl.zeros([E], tl.int32)
    for begin in range(0, NUM, STEP):
        block = begin + step
        each = tl.load(counts + block[:, None] * E + e[None, :], mask=(block < NUM)[:, None], other=0)
        total += tl.sum(each, 0)
    start = tl.cumsum(total, 0) - total
    running = start
    for begin in range(0, NUM, STEP):
        block = begin + step
        mask = (block < NUM)[:, None]
        places = counts + block[:, None] * E + e[None, :]
        each = tl.load(places, mask=mask, other=0)
        tl.store(places, running[None, :] + tl.cumsum(each, 0) - each, mask=mask)
        running += tl.sum(each, 0)
    num_blocks = (total + (BM - 1)) // BM
    first = tl.cumsum(num_blocks, 0) - num_blocks
    empty = tl.arange(0, MAX_BLOCKS)
    tl.store(table + empty, -1, mask=empty >= tl.sum(num_blocks, 0))
    for number in range(0, tl.max(num_blocks, 0)):
        mask = number < num_blocks
        tl.store(table + first + number, e, mask=mask)
        tl.store(table + MAX_BLOCKS + first + number, start + number * BM, mask=mask)
        tl.store(table + 2 * MAX_BLOCKS + first + number, start + total, mask=mask)


@triton.jit
def mingc_moe_place(ids, starts, order, T, K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr):
    """order (R,): the pair in each sorted row."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, E)
    # As in `mingc_moe_count`, but no helper: the compiler takes what one loads and an address depends on for written.
    is_chosen = tl.zeros([TOKENS, E], tl.int32)
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        is_chosen += (expert[:, None] == e[None, :]).to(tl.int32)
    row = tl.load(starts + tl.program_id(0) * E + e)[None, :] + tl.cumsum(is_chosen, 0) - is_chosen
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        own = tl.sum(tl.where(expert[:, None] == e[None, :], row, 0), 1)
        tl.store(order + own, t * K + each, mask=t < T)


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
def mingc_moe_grouped_up(
    x, order, table, gate_up, gate_up_scale, hidden,
    K: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of the sorted rows: x (T, D) → hidden (R, F). DEPTH is D as stored."""
    block = tl.program_id(1)
    expert = tl.load(table + block)
    if expert < 0:
        return
    row = tl.load(table + MAX_BLOCKS + block) + tl.arange(0, BM)
    is_row = row < tl.load(table + 2 * MAX_BLOCKS + block)
    token = tl.load(order + row, mask=is_row, other=0) // K
    # Gate and up rows alternate in the tile: a thread then holds both of a column.
    j = tl.arange(0, BN)
    n = tl.program_id(0) * (BN // 2) + j // 2 + (j % 2) * F
    groups: tl.constexpr = DEPTH // 64 if FORMAT == 2 else 1
    total = _product(
        x + token * D, gate_up + expert.to(tl.int64) * (2 * F * DEPTH) + n * DEPTH,
        gate_up_scale + (expert * (2 * F) + n) * groups, is_row, DEPTH, FORMAT, BM, BN, BK, SWAP,
    )  # fmt: skip
    gate, up = tl.split(tl.reshape(total, [BM, BN // 2, 2]))
    dtype = hidden.dtype.element_ty
    activated = activate(gate, up, tl.bfloat16 if FORMAT == 1 else dtype)
    if FORMAT == 1:
        activated = tl.clamp(activated * (1 / FP16_STEP), -65504.0, 65504.0)
    n = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    column = (n % 2) * (F // 2) + n // 2 if FORMAT == 2 else n
    tl.store(hidden + row[:, None] * F + column[None, :], activated.to(dtype), mask=is_row[:, None])


@triton.jit
def mingc_moe_grouped_down(
    hidden, order, table, down, down_scale, outputs,
    D: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr, MAX_BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr,
):  # fmt: skip
    """hidden (R, F), sorted → outputs (R, D) in the order of the pairs. DEPTH is F as stored."""
    block = tl.program_id(1)
    expert = tl.load(table + block)
    if expert < 0:
        return
    row = tl.load(table + MAX_BLOCKS + block) + tl.arange(0, BM)
    is_row = row < tl.load(table + 2 * MAX_BLOCKS + block)
    pair = tl.load(order + row, mask=is_row, other=0)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    groups: tl.constexpr = DEPTH // 64 if FORMAT == 2 else 1
    total = _product(
        hidden + row * F, down + expert.to(tl.int64) * (D * DEPTH) + n * DEPTH,
        down_scale + (expert * D + n) * groups, is_row, DEPTH, FORMAT, BM, BN, BK, SWAP,
    )  # fmt: skip
    target = outputs + pair.to(tl.int64)[:, None] * D + n[None, :]
    tl.store(target, total.to(outputs.dtype.element_ty), mask=is_row[:, None])


@torch.library.triton_op("mingc::moe_prefill", mutates_args={})
def moe_prefill(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
) -> Tensor:
    """See `mingc.kernels.moe_experts`, without a shared expert."""
    (tokens, hidden_size), chosen = x.shape, ids.shape[1]
    experts, width = gate_up.shape[0], gate_up.shape[1] // 2
    storage = storage_of(gate_up)
    per_item = 2 if storage == INT4 else 1
    hidden_dtype = torch.float16 if storage == FP8 else x.dtype
    pairs = tokens * chosen
    cut = moe_tiles.grouped(pairs, experts, width, hidden_size, storage)
    sort_blocks = triton.cdiv(tokens, _SORT_TOKENS)
    max_blocks = min(pairs, triton.cdiv(pairs, cut.rows) + experts)
    out = torch.empty_like(x)
    x = as_operand(x, storage)
    counts = torch.empty(sort_blocks, experts, dtype=torch.int32, device=x.device)
    table = torch.empty(3, triton.next_power_of_2(max_blocks), dtype=torch.int32, device=x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    torch.library.wrap_triton(mingc_moe_count)[(sort_blocks,)](
        ids, counts, tokens, K=chosen, E=experts, TOKENS=_SORT_TOKENS, num_warps=4
    )
    torch.library.wrap_triton(mingc_moe_plan)[(1,)](
        counts,
        table,
        NUM=sort_blocks,
        E=experts,
        BM=cut.rows,
        MAX_BLOCKS=table.shape[1],
        STEP=16,
        num_warps=8,
    )
    torch.library.wrap_triton(mingc_moe_place)[(sort_blocks,)](
        ids, counts, order, tokens, K=chosen, E=experts, TOKENS=_SORT_TOKENS, num_warps=4
    )
    hidden = torch.empty(pairs, width, dtype=hidden_dtype, device=x.device)
    torch.library.wrap_triton(mingc_moe_grouped_up)[(2 * width // cut.up.columns, max_blocks)](
        x, order, table, gate_up, x if gate_up_scale is None else gate_up_scale, hidden,
        K=chosen, D=hidden_size, DEPTH=hidden_size // per_item, F=width, MAX_BLOCKS=table.shape[1],
        FORMAT=storage,
        BM=cut.rows, BN=cut.up.columns, BK=cut.up.depth, SWAP=cut.swap,
        num_warps=cut.up.warps, num_stages=cut.up.stages,
    )  # fmt: skip
    outputs = torch.empty(pairs, hidden_size, dtype=out.dtype, device=x.device)
    torch.library.wrap_triton(mingc_moe_grouped_down)[(hidden_size // cut.down.columns, max_blocks)](
        hidden, order, table, down, x if down_scale is None else down_scale, outputs,
        D=hidden_size, DEPTH=width // per_item, F=width, MAX_BLOCKS=table.shape[1], FORMAT=storage,
        BM=cut.rows, BN=cut.down.columns, BK=cut.down.depth, SWAP=cut.swap,
        num_warps=cut.down.warps, num_stages=cut.down.stages,
    )  # fmt: skip
    columns = min(_SUM_COLUMNS, hidden_size & -hidden_size)
    torch.library.wrap_triton(mingc_moe_sum)[(hidden_size // columns, tokens)](
        outputs, weights, out, tokens, K=chosen, D=hidden_size, HAS_SHARED=False, BN=columns, num_warps=4
    )
    return out
