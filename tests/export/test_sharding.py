"""Shards of weights: together they are the whole tensor, each value once; the rest is zero."""

from __future__ import annotations

import pytest
import torch

from mingc.errors import ConfigError
from mingc.export.weights.sharding import check_heads, shard_size, shard_tensor


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(
    ("length", "ranks", "multiple", "size"),
    [(8, 1, 1, 8), (8, 2, 1, 4), (7, 2, 1, 4), (9, 4, 1, 3), (5, 4, 1, 2), (3, 8, 1, 1), (10, 4, 4, 4)],
)
def test_ranks_hold_every_value_once_and_zeros_behind_the_end(
    length: int, ranks: int, multiple: int, size: int, axis: int
) -> None:
    assert shard_size(length, ranks, multiple) == size
    whole = torch.arange(1, length * 3 + 1).reshape(length, 3)
    whole = whole if axis == 0 else whole.T
    shards = [shard_tensor(whole, axis, rank, size) for rank in range(ranks)]
    assert {tuple(shard.shape) for shard in shards} == {(size, 3) if axis == 0 else (3, size)}
    joined = torch.cat(shards, dim=axis)
    assert torch.equal(joined.narrow(axis, 0, length), whole)
    assert not joined.narrow(axis, length, ranks * size - length).any()
    assert {shard.dtype for shard in shards} == {whole.dtype}


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 4, 4), (8, 4, 8), (4, 1, 2), (2, 2, 8)])
def test_heads_are_divided_or_repeated(heads: int, kv_heads: int, ranks: int) -> None:
    check_heads(heads, kv_heads, ranks)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "what"), [(6, 4, "6 query heads"), (8, 6, "6 KV heads"), (3, 3, "3 query heads")]
)
def test_heads_that_cannot_be_divided_are_named(heads: int, kv_heads: int, what: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} cannot be divided among 4 ranks"):
        check_heads(heads, kv_heads, 4)
