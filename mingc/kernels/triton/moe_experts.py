"""`mingc.kernels.moe_experts` on CUDA, launched: decode steps here, prefill chunks in `moe_prefill`."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from mingc.kernels.triton import moe_config
from mingc.kernels.triton import moe_decode as kernels
from mingc.kernels.triton.moe_decode import as_operand, storage_of
from mingc.kernels.triton.moe_prefill import moe_prefill

__all__ = ["moe_decode", "moe_prefill"]

_ROWS = 16  # tokens of one matrix product: what the matrix units take at least
_SUM_COLUMNS = 512


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
    (tokens, hidden_size), chosen = x.shape, ids.shape[1]
    width = gate_up.shape[1] // 2
    storage = storage_of(gate_up)
    bytes_each = 2 if storage == moe_config.INT4 else 1  # the kernels count bytes where two values share one
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
    num_pairs = tokens * (chosen + num_shared)
    out = torch.empty_like(x)
    kernel = moe_config.kernel_of(tokens, storage)
    cut = moe_config.cut(
        moe_config.Shape(
            kernel=kernel, tokens=tokens, hidden_size=hidden_size, width=width, experts=gate_up.shape[0],
            chosen=chosen, storage=storage,
        )
    )  # fmt: skip
    if kernel == "row":
        hidden = torch.empty(num_pairs, width, dtype=x.dtype, device=x.device)
        tiles = cut.up
        torch.library.wrap_triton(kernels.mingc_moe_row_up)[(width // tiles.columns, num_pairs)](
            x, ids, *up_weights, hidden, K=chosen, D=hidden_size, F=width, FORMAT=storage,
            BN=tiles.columns, BK=tiles.depth, num_warps=tiles.warps,
        )  # fmt: skip
        tiles = cut.down
        torch.library.wrap_triton(kernels.mingc_moe_row_down)[(hidden_size // tiles.columns,)](
            hidden, ids, weights, *down_weights, out, K=chosen, D=hidden_size, F=width, HAS_SHARED=has_shared,
            FORMAT=storage, BN=tiles.columns, BK=tiles.depth, num_warps=tiles.warps,
        )  # fmt: skip
        return out

    shape = {
        "K": chosen,
        "K_PADDED": triton.next_power_of_2(chosen),
        "HAS_SHARED": has_shared,
        "FORMAT": storage,
        "TOKENS": max(_ROWS, triton.next_power_of_2(tokens)),
        "ROWS": _ROWS,
    }
    num_experts_read = tokens * chosen + num_shared
    hidden_dtype = torch.float16 if storage == moe_config.FP8 else x.dtype
    x = as_operand(x, storage)
    hidden = torch.empty(num_pairs, width, dtype=hidden_dtype, device=x.device)
    tiles = cut.up
    torch.library.wrap_triton(kernels.mingc_moe_up)[(width // tiles.columns, num_experts_read)](
        x, ids, *up_weights, hidden, tokens, **shape, D=hidden_size // bytes_each, F=width,
        BN=tiles.columns, BK=tiles.depth, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    tiles = cut.down
    outputs = torch.empty(num_pairs, hidden_size, dtype=out.dtype, device=x.device)
    grid = (hidden_size // (tiles.columns * tiles.repeats), num_experts_read)
    torch.library.wrap_triton(kernels.mingc_moe_down)[grid](
        hidden, ids, *down_weights, outputs, tokens, **shape, D=hidden_size, F=width // bytes_each,
        BN=tiles.columns, BK=tiles.depth, TILES=tiles.repeats, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    columns = min(_SUM_COLUMNS, hidden_size & -hidden_size)
    torch.library.wrap_triton(kernels.mingc_moe_sum)[(hidden_size // columns, tokens)](
        outputs, weights, out, tokens, K=chosen, D=hidden_size, HAS_SHARED=has_shared, BN=columns, num_warps=4,
    )  # fmt: skip
    return out
