"""Variable-length attention: every query sees one contiguous range of keys, such as a video frame or an audio clip.

Torch only; it builds the dense mask once for all layers. A kernel that walks the ranges would need `Segments.bounds`
alone.

Shape letters: B rows, Q queries, K keys, H heads, d head size, S = Q, or 1 when all queries share one range.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Segments:
    """Key ranges of a batch, built once for all layers of an encoder.

    `bounds`: (B, S, 2) integer, `[start, end)` of the keys visible to a query. `mask`: (B, 1, S, K), 0 where visible
    and -inf elsewhere, in the dtype of the queries.
    """

    bounds: Tensor
    mask: Tensor


def make_segments(bounds_BS2: Tensor, num_keys: int, dtype: torch.dtype) -> Segments:
    """Key ranges `bounds_BS2` over `num_keys` keys; every range must contain at least one key.

    The mask is additive because SDPA would convert a boolean one to this form in every layer.
    """
    key_K = torch.arange(num_keys, device=bounds_BS2.device, dtype=bounds_BS2.dtype)
    start_BS1, end_BS1 = bounds_BS2[..., :1], bounds_BS2[..., 1:]
    hidden_BSK = (key_K < start_BS1) | (key_K >= end_BS1)
    mask_BSK = torch.zeros_like(hidden_BSK, dtype=dtype).masked_fill(hidden_BSK, float("-inf"))
    return Segments(bounds=bounds_BS2, mask=mask_BSK.unsqueeze(1))


def varlen_attention(q_BQHd: Tensor, k_BKHd: Tensor, v_BKHd: Tensor, segments: Segments) -> Tensor:
    """Attend with each query to its visible keys: softmax(q·kᵀ/√d)·v, not causal.

    Args:
        q_BQHd: (B, Q, H, d) floating point.
        k_BKHd: (B, K, H, d), same dtype.
        v_BKHd: (B, K, H, d), same dtype.
        segments: from `make_segments` for K keys in that dtype.

    Returns:
        (B, Q, H, d) in the dtype of `q_BQHd`.
    """
    out_BHQd = F.scaled_dot_product_attention(
        q_BQHd.transpose(1, 2), k_BKHd.transpose(1, 2), v_BKHd.transpose(1, 2), attn_mask=segments.mask
    )
    return out_BHQd.transpose(1, 2)
