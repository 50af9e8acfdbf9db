"""Tensor-parallel sharding of weights.

Shards that are not full are padded with zeros, which do not change a GEMM. Every rank then has the same shapes, and one
engine serves all ranks.
"""

from __future__ import annotations

from torch import Tensor

from mingc.errors import ConfigError


def shard_size(size: int, world_size: int, multiple: int = 1) -> int:
    """Size of each rank's shard of an axis of `size`, rounded up to `multiple`."""
    shard = -(-size // world_size)
    return -(-shard // multiple) * multiple


def shard_tensor(tensor: Tensor, axis: int, rank: int, size: int) -> Tensor:
    """The shard of `size` on `axis` of rank `rank`: a view, or a zero-padded copy where the axis ends early."""
    length = tensor.shape[axis]
    start = min(rank * size, length)
    shard = tensor.narrow(axis, start, min(size, length - start))
    if shard.shape[axis] == size:
        return shard
    shape = list(tensor.shape)
    shape[axis] = size
    padded = tensor.new_zeros(shape)
    padded.narrow(axis, 0, shard.shape[axis]).copy_(shard)
    return padded


def check_heads(num_heads: int, num_kv_heads: int, world_size: int) -> None:
    """Check that head counts can be divided among the ranks.

    With more ranks than query heads a head is computed on several ranks, one of which contributes it to the all-reduce;
    with more ranks than KV heads a KV head is stored on several ranks.

    Raises: ConfigError.
    """
    for what, count in (("query heads", num_heads), ("KV heads", num_kv_heads)):
        if count % world_size and world_size % count:
            raise ConfigError(
                f"{count} {what} cannot be divided among {world_size} ranks",
                where="tensor-parallel size",
                fix=f"choose a size that divides {count}, or a multiple of it",
            )
