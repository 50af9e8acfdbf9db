"""Variable-length attention: every query sees one contiguous range of keys, such as a video frame or an audio clip.

On a GPU one kernel walks the ranges and needs no mask. The torch reference builds the dense mask once for all layers.

Shape letters: B rows, Q queries, K keys, W width, H heads, d head size, S = Q, or 1 when all queries share one range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from mingc.kernels.dispatch import use_triton

# Head sizes of the kernel: with 16-byte rows, and accumulators that fit into registers. Triton 3.6 compiles heads of 40
# dims, 32 and 16, to code that reads beyond its shared memory.
_MIN_SIZE, _MAX_SIZE, _SIZE_MULTIPLE = 64, 128, 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Key ranges of a batch, built once for all layers of an encoder.

    `bounds`: (B, S, 2) int32, `[start, end)` of the keys visible to a query. `mask`: (B, 1, S, K), 0 where visible
    and -inf elsewhere, in the dtype of the queries; None where the kernel runs, which needs the bounds alone.
    """

    bounds: Tensor
    mask: Tensor | None


def make_segments(bounds_BS2: Tensor, x_KW: Tensor, num_heads: int) -> Segments:
    """Key ranges `bounds_BS2` (integer) over the K rows of the layers' input `x_KW` (…, K, W) with `num_heads` heads.

    Every range must contain at least one key. The mask is additive because SDPA would convert a boolean one to this
    form in every layer.
    """
    num_keys, width = x_KW.shape[-2:]
    bounds_BS2 = bounds_BS2.int()
    if _use_kernel(x_KW, width // num_heads):
        # A running sum of starts and lengths, as Inductor would compute an elementwise expression again in every layer.
        lengths_BS2 = torch.stack((bounds_BS2[..., 0], bounds_BS2[..., 1] - bounds_BS2[..., 0]), dim=-1)
        return Segments(bounds=lengths_BS2.cumsum(-1, dtype=torch.int32), mask=None)
    key_K = torch.arange(num_keys, device=bounds_BS2.device, dtype=torch.int32)
    start_BS1, end_BS1 = bounds_BS2[..., :1], bounds_BS2[..., 1:]
    hidden_BSK = (key_K < start_BS1) | (key_K >= end_BS1)
    mask_BSK = x_KW.new_zeros(num_keys).masked_fill(hidden_BSK, float("-inf"))
    return Segments(bounds=bounds_BS2, mask=mask_BSK.unsqueeze(1))


def varlen_attention(q_BQHd: Tensor, k_BKHd: Tensor, v_BKHd: Tensor, segments: Segments) -> Tensor:
    """Attend with each query to its visible keys: softmax(q·kᵀ/√d)·v, not causal.

    Args:
        q_BQHd: (B, Q, H, d) floating point. Heads must be adjacent and rows evenly spaced, as in a packed projection.
        k_BKHd: (B, K, H, d), same dtype.
        v_BKHd: (B, K, H, d), same dtype.
        segments: from `make_segments` for K keys in that dtype.

    Returns:
        (B, Q, H, d) in the dtype of `q_BQHd`.
    """
    if segments.mask is None:
        from mingc.kernels.triton import varlen_attention as gpu

        out: Tensor = gpu.varlen_attention(q_BQHd, k_BKHd, v_BKHd, segments.bounds)
        return out
    out_BHQd = F.scaled_dot_product_attention(
        q_BQHd.transpose(1, 2), k_BKHd.transpose(1, 2), v_BKHd.transpose(1, 2), attn_mask=segments.mask
    )
    return out_BHQd.transpose(1, 2)


def _use_kernel(x_KW: Tensor, head_size: int) -> bool:
    is_size = _MIN_SIZE <= head_size <= _MAX_SIZE and head_size % _SIZE_MULTIPLE == 0
    return is_size and use_triton(x_KW)
