"""Triton kernels of `mingc.kernels.moe_experts` for prefill chunks: pairs sorted by expert, then grouped GEMMs.

A counting sort orders the (token, expert) pairs by expert, then by token, and a table lists the expert and the rows of
each block of the grouped GEMMs. Everything stays on the device; grids are static, and blocks that the routing does not
need exit at once. With EXTRA an expert's last block may hold up to that many rows more than BLOCK_M: they share the
weights that the other rows read, which a separate block would read again.

FP8 weights are multiplied as they are stored, by rows whose numbers are split into two FP8 values each
(`mingc_split_rows`). The error is about that of eager bfloat16; with one FP8 value a number it would be nine times as
large. Two FP8 products take the tensor cores as long as one of bfloat16, but no weight is converted, and weights take
half the shared memory (benchmarks/NOTES-thinker.md).

The GEMMs of INT4 weights may be in CUDA C++ instead (`mingc.kernels.cuda.int4_experts`), also in large decode steps.

Shape letters: T tokens, K experts per token, E experts, D hidden size, F this rank's intermediate size, R = T K pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from mingc.kernels.cuda import int4_experts
from mingc.kernels.triton.moe_config import FP8, INT4, MoeConfig, MoeProblem, select_config
from mingc.kernels.triton.quantize_rows import split_rows
from mingc.kernels.triton.weight_formats import activate, as_operand, unpack_int4, weight_format_of

_SORT_TOKENS = 16
_OFFSET_EXPERTS = 8  # experts of a program, which keeps their counts of all blocks in registers
_SUM_COLUMNS = 1024


@triton.jit
def mingc_moe_count(ids, counts, T, K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr):
    """Count the tokens of each block that are routed to each expert: counts (blocks, E)."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    e = tl.arange(0, E)
    is_routed = tl.zeros([TOKENS, E], tl.int32)
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        is_routed += (expert[:, None] == e[None, :]).to(tl.int32)
    tl.store(counts + tl.program_id(0) * E + e, tl.sum(is_routed, 0))


@triton.jit
def mingc_moe_offsets(
    counts, totals, NUM: tl.constexpr, E: tl.constexpr, PADDED: tl.constexpr, BE: tl.constexpr
):
    """Replace counts (NUM, E) by their exclusive sums over blocks; totals (E,) are the sums over all blocks."""
    block = tl.arange(0, PADDED)[:, None]
    e = tl.program_id(0) * BE + tl.arange(0, BE)
    mask = block < NUM
    places = counts + block * E + e[None, :]
    each = tl.load(places, mask=mask, other=0)
    tl.store(places, tl.cumsum(each, 0) - each, mask=mask)
    tl.store(totals + e, tl.sum(each, 0))


@triton.jit
def mingc_moe_sort(
    ids, before, totals, order, table, T,
    K: tl.constexpr, E: tl.constexpr, TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, EXTRA: tl.constexpr,
    MAX_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Sort pairs by expert: order (R,) is the pair of each sorted row.

    table (3, MAX_BLOCKS): each block's expert (-1: unused), first row and end row. An expert's last block takes up to
    EXTRA rows more than BLOCK_M.
    """
    e = tl.arange(0, E)
    total = tl.load(totals + e)
    start = tl.cumsum(total, 0) - total
    if tl.program_id(0) == 0:
        num_blocks = tl.maximum((total - EXTRA + (BLOCK_M - 1)) // BLOCK_M, (total > 0).to(tl.int32))
        first = tl.cumsum(num_blocks, 0) - num_blocks
        empty = tl.arange(0, MAX_BLOCKS)
        tl.store(table + empty, -1, mask=empty >= tl.sum(num_blocks, 0))
        for number in range(0, tl.max(num_blocks, 0)):
            mask = number < num_blocks
            row = start + number * BLOCK_M
            end = tl.where(number + 1 == num_blocks, start + total, row + BLOCK_M)
            tl.store(table + first + number, e, mask=mask)
            tl.store(table + MAX_BLOCKS + first + number, row, mask=mask)
            tl.store(table + 2 * MAX_BLOCKS + first + number, end, mask=mask)
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    # As in `mingc_moe_count`, without a helper: torch would assume that what it loads is written (see `_members`).
    is_routed = tl.zeros([TOKENS, E], tl.int32)
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        is_routed += (expert[:, None] == e[None, :]).to(tl.int32)
    row = (start + tl.load(before + tl.program_id(0) * E + e))[None, :] + tl.cumsum(is_routed, 0) - is_routed
    for each in tl.static_range(K):
        expert = tl.load(ids + t * K + each, mask=t < T, other=-1).to(tl.int32)
        own = tl.sum(tl.where(expert[:, None] == e[None, :], row, 0), 1)
        tl.store(order + own, t * K + each, mask=t < T)


@triton.jit
def mingc_moe_pair_sum(
    outputs, weights, shared, out, K: tl.constexpr, D: tl.constexpr, HAS_SHARED: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    """Weighted sum in float32 over each token's pairs in the order of its experts, then the row of `shared`."""
    token = tl.program_id(1)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_N], tl.float32)
    for each in tl.static_range(K):
        pair = token * K + each
        total += tl.load(weights + pair) * tl.load(outputs + pair.to(tl.int64) * D + n).to(tl.float32)
    place = token.to(tl.int64) * D + n
    if HAS_SHARED:
        # Round where the reference rounds.
        routed = total.to(out.dtype.element_ty).to(tl.float32)
        total = routed + tl.load(shared + place).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty))


@triton.jit
def _gemm(
    xs, ws, scales, is_row,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SWAP: tl.constexpr,
):  # fmt: skip
    """Multiply rows at `xs` (BLOCK_M,) by weight rows at `ws` (BLOCK_N,): (BLOCK_M, BLOCK_N) float32.

    SWAP makes the weights the operand that tensor cores read from registers, where INT4 is unpacked.
    FP8: a row has two parts of DEPTH values; weights and rows are not yet scaled.
    INT4: as in `moe_decode`, even columns of x come first and DEPTH counts bytes; it needs SWAP.
    """
    shape: tl.constexpr = [BLOCK_N, BLOCK_M] if SWAP else [BLOCK_M, BLOCK_N]
    total = tl.zeros(shape, tl.float32)
    mask = is_row[:, None]
    if FORMAT == 2:
        j = tl.arange(0, 64)
        xs = xs[:, None] + j[None, :]
        ws = ws[:, None] + j[None, :]
        for group in range(0, DEPTH // 64):
            even = tl.load(xs + group * 64, mask=mask, other=0.0)
            odd = tl.load(xs + DEPTH + group * 64, mask=mask, other=0.0)
            low, high = unpack_int4(tl.load(ws + group * 64))
            part = tl.dot(low.to(even.dtype), tl.trans(even))
            part = tl.dot(high.to(odd.dtype), tl.trans(odd), part)
            total += part * tl.load(scales + group).to(tl.float32)[:, None]
    else:
        k = tl.arange(0, BLOCK_K)
        xs = xs[:, None] + k[None, :]
        ws = ws[:, None] + k[None, :]
        for begin in range(0, DEPTH, BLOCK_K):
            w = tl.load(ws + begin)
            for part in tl.static_range(2 if FORMAT == 1 else 1):
                a = tl.load(xs + part * DEPTH + begin, mask=mask, other=0.0)
                total = tl.dot(w, tl.trans(a), total) if SWAP else tl.dot(a, tl.trans(w), total)
    return tl.trans(total) if SWAP else total


@triton.jit
def _gemm_with_extra(
    xs, extra_xs, ws, is_extra,
    DEPTH: tl.constexpr, FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EXTRA: tl.constexpr,
):  # fmt: skip
    """Multiply rows at `xs` (BLOCK_M,) and at `extra_xs` (EXTRA,) by weight rows at `ws` (BLOCK_N,), as `_gemm` does.

    Returns float32 (BLOCK_M, BLOCK_N) and (BLOCK_N, EXTRA).

    The extra rows are the second operand: tensor cores need at least 64 rows in the first.
    """
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    extra = tl.zeros([BLOCK_N, EXTRA], tl.float32)
    k = tl.arange(0, BLOCK_K)
    xs = xs[:, None] + k[None, :]
    extra_xs = extra_xs[:, None] + k[None, :]
    ws = ws[:, None] + k[None, :]
    for begin in range(0, DEPTH, BLOCK_K):
        w = tl.load(ws + begin)
        for part in tl.static_range(2 if FORMAT == 1 else 1):
            a = tl.load(xs + part * DEPTH + begin)
            b = tl.load(extra_xs + part * DEPTH + begin, mask=is_extra[:, None], other=0.0)
            total = tl.dot(a, tl.trans(w), total)
            extra = tl.dot(w, tl.trans(b), extra)
    return total, extra


@triton.jit
def _rows_of(table, block, MAX_BLOCKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A block's first row, its end row, its rows (BLOCK_M,) and which of these it owns."""
    first = tl.load(table + MAX_BLOCKS + block)
    end = tl.load(table + 2 * MAX_BLOCKS + block)
    row = first + tl.arange(0, BLOCK_M)
    return first, end, row, row < end


@triton.jit
def _scaled(total, row_scales, scales, is_row):
    """Sums `total` (rows, BLOCK_N) of FP8 products times the scales of rows and of weight rows."""
    return total * tl.load(row_scales, mask=is_row, other=0.0)[:, None] * tl.load(scales)[None, :]


@triton.jit
def mingc_moe_grouped_up(
    x, x_scale, order, table, gate_up, gate_up_scale, hidden,
    K: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr, MAX_BLOCKS: tl.constexpr,
    FORMAT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr,
    EXTRA: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of the sorted rows: x (T, D) → hidden (R, F). DEPTH is D as stored.

    FP8: x (T, 2, D) and x_scale (T,) from `mingc_split_rows`.
    """
    block = tl.program_id(1)
    expert = tl.load(table + block)
    if expert < 0:
        return
    first, end, row, is_row = _rows_of(table, block, MAX_BLOCKS, BLOCK_M)
    token = tl.load(order + row, mask=is_row, other=0) // K
    # Gate and up rows alternate in the tile, so that a thread has both of a column.
    j = tl.arange(0, BLOCK_N)
    n = tl.program_id(0) * (BLOCK_N // 2) + j // 2 + (j % 2) * F
    column = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    dtype = hidden.dtype.element_ty
    groups: tl.constexpr = DEPTH // 64 if FORMAT == 2 else 1
    width: tl.constexpr = 2 * D if FORMAT == 1 else D
    xs = x + token * width
    ws = gate_up + expert.to(tl.int64) * (2 * F * DEPTH) + n * DEPTH
    scales = gate_up_scale + (expert * (2 * F) + n) * groups
    if EXTRA > 0:
        if end - first > BLOCK_M:
            extra_row = first + BLOCK_M + tl.arange(0, EXTRA)
            is_extra = extra_row < end
            extra_token = tl.load(order + extra_row, mask=is_extra, other=0) // K
            total, extra = _gemm_with_extra(
                xs, x + extra_token * width, ws, is_extra, DEPTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, EXTRA
            )
            extra = tl.trans(extra)
            if FORMAT == 1:
                extra = _scaled(extra, x_scale + extra_token, scales, is_extra)
            gate, up = tl.split(tl.reshape(extra, [EXTRA, BLOCK_N // 2, 2]))
            extra_activated = activate(gate, up, dtype).to(dtype)
            tl.store(
                hidden + extra_row[:, None] * F + column[None, :], extra_activated, mask=is_extra[:, None]
            )
        else:
            total = _gemm(xs, ws, scales, is_row, DEPTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, SWAP)
    else:
        total = _gemm(xs, ws, scales, is_row, DEPTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, SWAP)
    if FORMAT == 1:
        total = _scaled(total, x_scale + token, scales, is_row)
    gate, up = tl.split(tl.reshape(total, [BLOCK_M, BLOCK_N // 2, 2]))
    activated = activate(gate, up, dtype).to(dtype)
    if FORMAT == 2:
        column = (column % 2) * (F // 2) + column // 2
    tl.store(hidden + row[:, None] * F + column[None, :], activated, mask=is_row[:, None])


@triton.jit
def mingc_moe_grouped_down(
    hidden, hidden_scale, order, table, down, down_scale, outputs,
    D: tl.constexpr, DEPTH: tl.constexpr, F: tl.constexpr, MAX_BLOCKS: tl.constexpr, FORMAT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SWAP: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """hidden (R, F), sorted → outputs (R, D) in the order of the pairs. DEPTH is F as stored.

    FP8: hidden (R, 2, F) and hidden_scale (R,) from `mingc_split_rows`.
    """
    block = tl.program_id(1)
    expert = tl.load(table + block)
    if expert < 0:
        return
    first, end, row, is_row = _rows_of(table, block, MAX_BLOCKS, BLOCK_M)
    pair = tl.load(order + row, mask=is_row, other=0)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    dtype = outputs.dtype.element_ty
    groups: tl.constexpr = DEPTH // 64 if FORMAT == 2 else 1
    width: tl.constexpr = 2 * F if FORMAT == 1 else F
    xs = hidden + row * width
    ws = down + expert.to(tl.int64) * (D * DEPTH) + n * DEPTH
    scales = down_scale + (expert * D + n) * groups
    if EXTRA > 0:
        if end - first > BLOCK_M:
            extra_row = first + BLOCK_M + tl.arange(0, EXTRA)
            is_extra = extra_row < end
            extra_pair = tl.load(order + extra_row, mask=is_extra, other=0)
            total, extra = _gemm_with_extra(
                xs, hidden + extra_row * width, ws, is_extra, DEPTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, EXTRA
            )
            extra = tl.trans(extra)
            if FORMAT == 1:
                extra = _scaled(extra, hidden_scale + extra_row, scales, is_extra)
            extra_target = outputs + extra_pair.to(tl.int64)[:, None] * D + n[None, :]
            tl.store(extra_target, extra.to(dtype), mask=is_extra[:, None])
        else:
            total = _gemm(xs, ws, scales, is_row, DEPTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, SWAP)
    else:
        total = _gemm(xs, ws, scales, is_row, DEPTH, FORMAT, BLOCK_M, BLOCK_N, BLOCK_K, SWAP)
    if FORMAT == 1:
        total = _scaled(total, hidden_scale + row, scales, is_row)
    target = outputs + pair.to(tl.int64)[:, None] * D + n[None, :]
    tl.store(target, total.to(dtype), mask=is_row[:, None])


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
    int4_code: str | None,
) -> Tensor:
    """See `mingc.kernels.moe_experts`; `shared` (T, D) is the output of the shared expert, if there is one.

    With `int4_code`, from `mingc.kernels.cuda.int4_experts`, the GEMMs are that module's.
    """
    (tokens, hidden_size), top_k = x.shape, ids.shape[1]
    experts, intermediate_size = gate_up.shape[0], gate_up.shape[1] // 2
    pairs = tokens * top_k
    config = select_config(
        MoeProblem(
            kernel="grouped", tokens=tokens, hidden_size=hidden_size, intermediate_size=intermediate_size,
            experts=experts, top_k=top_k, weight_format=weight_format_of(gate_up),
        )
    )  # fmt: skip
    is_triton = int4_code is None
    block_m, extra = (config.block_m, config.extra_rows) if is_triton else (int4_experts.BLOCK_ROWS, 0)
    sort_blocks = triton.cdiv(tokens, _SORT_TOKENS)
    max_blocks = min(pairs, triton.cdiv(pairs, block_m) + experts)
    out = torch.empty_like(x)
    counts = torch.empty(sort_blocks, experts, dtype=torch.int32, device=x.device)
    table = torch.empty(3, triton.next_power_of_2(max_blocks), dtype=torch.int32, device=x.device)
    order = torch.empty(pairs, dtype=torch.int32, device=x.device)
    torch.library.wrap_triton(mingc_moe_count)[(sort_blocks,)](
        ids, counts, tokens, K=top_k, E=experts, TOKENS=_SORT_TOKENS, num_warps=4
    )
    totals = torch.empty(experts, dtype=torch.int32, device=x.device)
    planned = min(_OFFSET_EXPERTS, experts)
    torch.library.wrap_triton(mingc_moe_offsets)[(experts // planned,)](
        counts, totals, NUM=sort_blocks, E=experts, PADDED=triton.next_power_of_2(sort_blocks), BE=planned,
        num_warps=4,
    )  # fmt: skip
    torch.library.wrap_triton(mingc_moe_sort)[(sort_blocks,)](
        ids, counts, totals, order, table, tokens, K=top_k, E=experts, TOKENS=_SORT_TOKENS, BLOCK_M=block_m,
        EXTRA=extra, MAX_BLOCKS=table.shape[1], num_warps=4,
    )  # fmt: skip
    if int4_code is None:
        outputs = _multiply(x, order, table, gate_up, down, gate_up_scale, down_scale, max_blocks, config)
    else:
        assert gate_up_scale is not None and down_scale is not None
        outputs = torch.ops.mingc.int4_experts(
            x, order, table, gate_up, down, gate_up_scale, down_scale, max_blocks, int4_code
        )
    columns = min(_SUM_COLUMNS, hidden_size & -hidden_size)
    torch.library.wrap_triton(mingc_moe_pair_sum)[(hidden_size // columns, tokens)](
        outputs, weights, out if shared is None else shared, out, K=top_k, D=hidden_size,
        HAS_SHARED=shared is not None, BLOCK_N=columns, num_warps=4,
    )  # fmt: skip
    return out


def _multiply(
    x: Tensor,
    order: Tensor,
    table: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_scale: Tensor | None,
    down_scale: Tensor | None,
    max_blocks: int,
    config: MoeConfig,
) -> Tensor:
    """Outputs (R, D) of all pairs from tokens (T, D), with the plan of `mingc_moe_sort` for blocks of `config`."""
    (tokens, hidden_size), pairs, intermediate_size = x.shape, order.shape[0], gate_up.shape[1] // 2
    weight_format = weight_format_of(gate_up)
    per_item = 2 if weight_format == INT4 else 1
    rows, row_scales = _operand(x, weight_format)
    hidden = torch.empty(pairs, intermediate_size, dtype=x.dtype, device=x.device)
    shared_args = {"MAX_BLOCKS": table.shape[1], "BLOCK_M": config.block_m, "EXTRA": config.extra_rows}
    torch.library.wrap_triton(mingc_moe_grouped_up)[(2 * intermediate_size // config.up.block_n, max_blocks)](
        rows, row_scales, order, table, gate_up, x if gate_up_scale is None else gate_up_scale, hidden, **shared_args,
        K=pairs // tokens, D=hidden_size, DEPTH=hidden_size // per_item, F=intermediate_size, FORMAT=weight_format,
        SWAP=config.swap_operands, BLOCK_N=config.up.block_n, BLOCK_K=config.up.block_k,
        num_warps=config.up.num_warps, num_stages=config.up.num_stages,
    )  # fmt: skip
    # The first GEMM has stored INT4's columns in their order.
    rows, row_scales = (hidden, hidden) if weight_format == INT4 else _operand(hidden, weight_format)
    outputs = torch.empty(pairs, hidden_size, dtype=x.dtype, device=x.device)
    torch.library.wrap_triton(mingc_moe_grouped_down)[(hidden_size // config.down.block_n, max_blocks)](
        rows, row_scales, order, table, down, x if down_scale is None else down_scale, outputs, **shared_args,
        D=hidden_size, DEPTH=intermediate_size // per_item, F=intermediate_size, FORMAT=weight_format,
        SWAP=config.swap_operands, BLOCK_N=config.down.block_n, BLOCK_K=config.down.block_k,
        num_warps=config.down.num_warps, num_stages=config.down.num_stages,
    )  # fmt: skip
    return outputs


def _operand(x: Tensor, weight_format: int) -> tuple[Tensor, Tensor]:
    """Rows (M, K) for a GEMM with weights of this format, and their scales; without scales a tensor that is not read.

    FP8: float8_e4m3fn (M, 2, K) and float32 (M,), see `split_rows`.
    """
    return split_rows(x) if weight_format == FP8 else (as_operand(x, weight_format), x)
