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

from mingc.kernels.triton import moe_config
from mingc.kernels.triton.moe_config import FP8, INT4
from mingc.kernels.triton.moe_decode import as_operand, storage_of
from mingc.kernels.triton.moe_grouped_gemm import mingc_moe_grouped_down, mingc_moe_grouped_up

_SORT_TOKENS = 16
_PLAN_EXPERTS = 8  # a program; their counts in all blocks lie in its registers
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
    counts, totals, NUM: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr, BE: tl.constexpr
):
    """Turns counts (NUM, E) into how many tokens of earlier blocks chose each expert; totals (E,): of all blocks."""
    block = tl.arange(0, PADDED)[:, None]
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    mask = block < NUM
    places = counts + block * E + e[None, :]
    each = tl.load(places, mask=mask, other=0)
    tl.store(places, tl.cumsum(each, 0) - each, mask=mask)
    tl.store(totals + e, tl.sum(each, 0))


@triton.jit
def mingc_moe_place(
    ids, before, totals, order, table, T,
    K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, BM: tl.constexpr, EXTRA: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """order (R,): the pair in each sorted row. table (3, MAX_BLOCKS): each block's expert (-1: no such block), first
    row and the row behind its last. An expert's last block takes up to EXTRA rows more than BM.
    """
    e = tl.arange(0, E)
    total = tl.load(totals + e)
    start = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        num_blocks = tl.maximum((total - EXTRA + (BM - 1)) // BM, (total > 0).to(tl.int32))
        first = tl.cumsum(num_blocks, 0) - num_blocks
        empty = tl.arange(0, MAX_BLOCKS)
        tl.store(table + empty, -1, mask=empty >= tl.sum(num_blocks, 0))
        for number in range(0, tl.max(num_blocks, 0)):
            mask = number < num_blocks
            row = start + number * BM
            end = tl.where(number + 1 == num_blocks, start + total, row + BM)
            tl.store(table + first + number, e, mask=mask)
            tl.store(table + MAX_BLOCKS + first + number, row, mask=mask)
            tl.store(table + 2 * MAX_BLOCKS + first + number, end, mask=mask)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # As in `mingc_moe_count`, but no helper: the compiler takes what one loads and an address depends on for written.
    is_chosen = tl.zeros([TOKENS, E], tl.int32)
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        is_chosen += (expert[:, None] == e[None, :]).to(tl.int32)
    row = (start + tl.load(before + tl.program_id(0) * E + e))[None, :] + tl.cumsum(is_chosen, 0) - is_chosen
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        own = tl.sum(tl.where(expert[:, None] == e[None, :], row, 0), 1)
        tl.store(order + own, t * K + each, mask=t < T)


@triton.jit
def mingc_moe_pair_sum(
    outputs, weights, shared, out, K: tl.constexpr, D: tl.constexpr, HAS_SHARED: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """Weighted sum in float32 over each token's pairs in the order of its experts, then the row of `shared`."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN], tl.float32)
    for each in tl.static_range(K):
        pair = token * K + each
        total += tl.load(weights + pair) * tl.load(outputs + pair.to(tl.int64) * D + n).to(tl.float32)
    place = token.to(tl.int64) * D + n
    if HAS_SHARED:
        # Rounded where the reference rounds.
        routed = total.to(out.dtype.element_ty).to(tl.float32)
        total = routed + tl.load(shared + place).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty))


@torch.library.triton_op("mingc::moe_prefill", mutates_args={})
def moe_prefill(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    shared: Tensor | None,
) -> Tensor:
    """See `mingc.kernels.moe_experts`; `shared` (T, D) is what the shared expert adds, if there is one."""
    (tokens, hidden_size), chosen = x.shape, ids.shape[1]
    experts, width = gate_up.shape[0], gate_up.shape[1] // 2
    storage = storage_of(gate_up)
    per_item = 2 if storage == INT4 else 1
    hidden_dtype = torch.float16 if storage == FP8 else x.dtype
    pairs = tokens * chosen
    cut = moe_config.cut(
        moe_config.Shape(
            kernel="grouped", tokens=tokens, hidden_size=hidden_size, width=width, experts=experts,
            chosen=chosen, storage=storage,
        )
    )  # fmt: skip
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
    totals = torch.empty(experts, dtype=torch.int32, device=x.device)
    planned = min(_PLAN_EXPERTS, experts)
    torch.library.wrap_triton(mingc_moe_plan)[(experts // planned,)](
        counts, totals, NUM=sort_blocks, E=experts, PADDED=triton.next_power_of_2(sort_blocks), BE=planned,
        num_warps=4,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_moe_place)[(sort_blocks,)](
        ids, counts, totals, order, table, tokens, K=chosen, E=experts, TOKENS=_SORT_TOKENS, BM=cut.rows,
        EXTRA=cut.extra, MAX_BLOCKS=table.shape[1], num_warps=4,
    )  # fmt: skip
    hidden = torch.empty(pairs, width, dtype=hidden_dtype, device=x.device)
    shape = {"MAX_BLOCKS": table.shape[1], "BM": cut.rows, "EXTRA": cut.extra}
    torch.library.wrap_triton(mingc_moe_grouped_up)[(2 * width // cut.up.columns, max_blocks)](
        x, order, table, gate_up, x if gate_up_scale is None else gate_up_scale, hidden, **shape,
        K=chosen, D=hidden_size, DEPTH=hidden_size // per_item, F=width, FORMAT=storage, SWAP=cut.swap,
        BN=cut.up.columns, BK=cut.up.depth, num_warps=cut.up.warps, num_stages=cut.up.stages,
    )  # fmt: skip
    outputs = torch.empty(pairs, hidden_size, dtype=out.dtype, device=x.device)
    torch.library.wrap_triton(mingc_moe_grouped_down)[(hidden_size // cut.down.columns, max_blocks)](
        hidden, order, table, down, x if down_scale is None else down_scale, outputs, **shape,
        D=hidden_size, DEPTH=width // per_item, F=width, FORMAT=storage, SWAP=cut.swap,
        BN=cut.down.columns, BK=cut.down.depth, num_warps=cut.down.warps, num_stages=cut.down.stages,
    )  # fmt: skip
    columns = min(_SUM_COLUMNS, hidden_size & -hidden_size)
    torch.library.wrap_triton(mingc_moe_pair_sum)[(hidden_size // columns, tokens)](
        outputs, weights, out if shared is None else shared, out, K=chosen, D=hidden_size,
        HAS_SHARED=shared is not None, BN=columns, num_warps=4,
    )  # fmt: skip
    return out
