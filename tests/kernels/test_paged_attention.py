"""Attention over paged rows, against dense causal attention in float64."""

import math

import pytest
import torch
from torch import Tensor

from mingc.kernels.paged_attention import paged_decode_attention, paged_prefill_attention, write_rows


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query (Hq, d) over keys (n, Hk, d)."""
    groups = q.shape[0] // k.shape[1]
    out = []
    for head, query in enumerate(q.double()):
        scores = k[:, head // groups].double() @ query / math.sqrt(q.shape[1])
        out.append(scores.softmax(0) @ v[:, head // groups].double())
    return torch.stack(out)


def make_pool(rows: int, kv_heads: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, kv_heads, 16)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), generator


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1), (3, 3)])
def test_prefill(heads: int, kv_heads: int) -> None:
    k, v, generator = make_pool(96, kv_heads)
    rows = torch.randperm(96, generator=generator)[:40]
    query_index = torch.arange(25, 37)  # a chunk in the middle: rows behind it are not seen
    q = torch.randn(12, heads, 16, generator=generator)
    got = paged_prefill_attention(q, k, v, rows, query_index)
    for token, index in enumerate(query_index.tolist()):
        expected = dense(q[token], k[rows[: index + 1]], v[rows[: index + 1]])
        torch.testing.assert_close(got[token].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1), (3, 3)])
def test_decode_of_unequal_requests(heads: int, kv_heads: int) -> None:
    k, v, generator = make_pool(96, kv_heads)
    rows = torch.stack([torch.randperm(96, generator=generator)[:32] for _ in range(3)])
    lengths = torch.tensor([1, 17, 32])
    q = torch.randn(3, heads, 16, generator=generator)
    got = paged_decode_attention(q, k, v, rows, lengths)
    for request, length in enumerate(lengths.tolist()):
        seen = rows[request, :length]
        torch.testing.assert_close(
            got[request].double(), dense(q[request], k[seen], v[seen]), rtol=1e-5, atol=1e-5
        )


def test_padding_rows_stay_finite() -> None:
    k, v, generator = make_pool(32, 1)
    q = torch.randn(2, 2, 16, generator=generator)
    zeros = torch.zeros(2, 8, dtype=torch.int64)
    assert paged_decode_attention(q, k, v, zeros, torch.tensor([0, 0])).isfinite().all()
    assert paged_prefill_attention(q, k, v, zeros[0], torch.tensor([-1, 0])).isfinite().all()


def test_writing_touches_the_named_rows_only() -> None:
    k, v, generator = make_pool(20, 2)
    before = k.clone(), v.clone()
    rows = torch.tensor([7, 3])
    new_k, new_v = torch.randn(2, 2, 2, 16, generator=generator)
    write_rows(k, v, rows, new_k, new_v)
    for pool, old, new in ((k, before[0], new_k), (v, before[1], new_v)):
        assert torch.equal(pool[rows], new)
        others = torch.ones(20, dtype=torch.bool).index_fill(0, rows, False)
        assert torch.equal(pool[others], old[others])
