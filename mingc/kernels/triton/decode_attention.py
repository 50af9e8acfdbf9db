"""`mingc.kernels.decode_attention` in Triton: the kernels of its two halves as one operation.

The kernel that writes a token also looks its row up in the page table.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mingc.kernels.triton import norm_rope_write, paged_attention


@torch.library.triton_op("mingc::decode_attention", mutates_args={"k_pages", "v_pages"})
def decode_attention(
    qkv: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    eps: float,
    page_size: int,
) -> Tensor:
    """See `mingc.kernels.decode_attention`."""
    q = norm_rope_write.launch(
        qkv,
        q_norm,
        k_norm,
        cos,
        sin,
        lengths,
        k_pages,
        v_pages,
        eps,
        page_table=page_table,
        page_size=page_size,
    )
    return paged_attention.launch_decode(q, k_pages, v_pages, page_table, lengths, page_size)
