"""How a weight is divided among tensor-parallel ranks.

Sizes that do not divide are filled up with zeros, which add nothing to a product, so that every rank holds the
same shapes and one engine serves them all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mingc.errors import ConfigError


def share_size(size: int, world_size: int, multiple: int = 1) -> int:
    """Rows of an axis of `size` that each rank holds, rounded up to `multiple`."""
    share = -(-size // world_size)
    return -(-share // multiple) * multiple


def cut(tensor: Tensor, axis: int, rank: int, share: int) -> Tensor:
    """Rank `rank`'s `share` rows of `axis`: a view, or a zero-filled copy where the axis ends early."""
    size = tensor.shape[axis]
    start = min(rank * share, size)
    piece = tensor.narrow(axis, start, min(share, size - start))
    if piece.shape[axis] == share:
        return piece
    shape = list(tensor.shape)
    shape[axis] = share
    filled = torch.zeros(shape, dtype=tensor.dtype)
    filled.narrow(axis, 0, piece.shape[axis]).copy_(piece)
    return filled


def check_heads(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    """Refuse head counts that cannot be shared out.

    With more ranks than heads a head is computed on several ranks, of which one adds it to the output; with
    more ranks than KV heads a KV head is kept on several ranks.

    Raises: ConfigError.
    """
    for what, count in (("query heads", num_heads), ("KV heads", num_kv_heads)):
        if count % world_size and world_size % count:
            raise ConfigError(
                f"{count} {what} cannot be shared by {world_size} ranks",
                where="tensor-parallel size",
                fix=f"choose a size that divides {count}, or a multiple of it",
            )
