"""Attention in which every query sees one contiguous range of keys: frames of a video, clips of a batch.

Only the torch reference, which builds the dense mask once for all layers; a kernel that walks the ranges
needs `Segments.bounds` alone. Not here: projections, rotary embedding, the choice of the ranges.

Shape letters: B rows, Q queries, K keys, H heads, d head width, S = Q, or 1 when all queries share one range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """The key ranges of a batch, prepared once for all layers of an encoder.

    `bounds`: (B, S, 2) integer, `[start, end)` of the keys a query sees. `mask`: (B, 1, S, K), 0 where
    visible and -inf elsewhere, in the dtype of the queries.
    """

    bounds: Tensor
    mask: Tensor


def make_segments(bounds_BS2: Tensor, num_keys: int, dtype: torch.dtype) -> Segments:
    """The ranges `bounds_BS2` over `num_keys` keys; every range must hold at least one key.

    The mask is additive, not boolean: SDPA would turn a boolean one into this form again in every layer.
    """
    key_K = torch.arange(num_keys, device=bounds_BS2.device, dtype=bounds_BS2.dtype)
    start_BS1, end_BS1 = bounds_BS2[..., :1], bounds_BS2[..., 1:]
    hidden_BSK = (key_K < start_BS1) | (key_K >= end_BS1)
    mask_BSK = torch.zeros_like(hidden_BSK, dtype=dtype).masked_fill(hidden_BSK, float("-inf"))
    return Segments(bounds=bounds_BS2, mask=mask_BSK.unsqueeze(1))


def varlen_attention(q_BQHd: Tensor, k_BKHd: Tensor, v_BKHd: Tensor, segments: Segments) -> Tensor:
    """softmax(q·kᵀ/√d)·v over the visible keys of each query, not causal.

    Args:
        q_BQHd: (B, Q, H, d) floating point.
        k_BKHd: (B, K, H, d), same dtype.
        v_BKHd: (B, K, H, d), same dtype.
        segments: made by `make_segments` for K keys in that dtype.

    Returns:
        (B, Q, H, d) in the dtype of `q_BQHd`.
    """
    out_BHQd = F.scaled_dot_product_attention(
        q_BQHd.transpose(1, 2), k_BKHd.transpose(1, 2), v_BKHd.transpose(1, 2), attn_mask=segments.mask
    )
    return out_BHQd.transpose(1, 2)
