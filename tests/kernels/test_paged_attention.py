"""Paged attention against dense causal attention in float64."""

import math

import pytest
import torch
from torch import Tensor

from mingc.kernels.decode_attention import decode_attention
from mingc.kernels.norm_rope_write import norm_rope_write
from mingc.kernels.paged_attention import (
    chunk_rows,
    paged_decode_attention,
    paged_prefill_attention,
    token_rows,
)

PAGE = 8


def dense(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention of one query (Hq, d) over keys (n, Hk, d)."""
    groups = q.shape[0] // k.shape[1]
    out = []
    for head, query in enumerate(q.double()):
        scores = k[:, head // groups].double() @ query / math.sqrt(q.shape[1])
        out.append(scores.softmax(0) @ v[:, head // groups].double())
    return torch.stack(out)


def make_pool(num_pages: int, kv_heads: int) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(num_pages)
    shape = (num_pages * PAGE, kv_heads, 16)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator), generator


def rows_of(table: Tensor) -> Tensor:
    return (table.long()[:, None] * PAGE + torch.arange(PAGE)).flatten()


def test_rows_of_tokens() -> None:
    several = torch.tensor([[5, 2], [3, 0], [1, 4]], dtype=torch.int32)
    segment, index = torch.tensor([0, 0, 0, 2, 2, 0, 1]), torch.tensor([0, 7, 8, 15, -1, -1, 3])
    assert chunk_rows(several, segment, index, PAGE).tolist() == [40, 47, 16, 39, 4, 5, 27]
    assert token_rows(several, torch.tensor([9, 1, 15]), PAGE).tolist() == [17, 25, 39]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1), (3, 3)])
def test_prefill(heads: int, kv_heads: int) -> None:
    k, v, generator = make_pool(12, kv_heads)
    tables = (1 + torch.randperm(11, generator=generator)[:10]).to(torch.int32).view(2, 5)
    parts = {
        0: (25, 12),
        1: (3, 9),
    }  # tokens before the chunk and in it; later rows are not visible
    segment, index = torch.zeros(25, dtype=torch.int64), torch.full((25,), -1)
    for prompt, (start, count) in parts.items():
        unseen = rows_of(tables[prompt])[start + count :]
        k[unseen] = v[unseen] = torch.nan
        own = slice(14 * prompt, 14 * prompt + count)
        segment[own], index[own] = prompt, start + torch.arange(count)
    q = torch.randn(25, heads, 16, generator=generator)
    got = paged_prefill_attention(q, k, v, tables, segment, index, PAGE)
    assert got.isfinite().all()
    for token, (prompt, place) in enumerate(zip(segment.tolist(), index.tolist(), strict=True)):
        if place >= 0:
            seen = rows_of(tables[prompt])[: place + 1]
            expected = dense(q[token], k[seen], v[seen])
            torch.testing.assert_close(got[token].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (8, 1), (3, 3)])
def test_decode_of_unequal_requests(heads: int, kv_heads: int) -> None:
    k, v, generator = make_pool(14, kv_heads)
    table = (1 + torch.randperm(13, generator=generator)[:12]).view(3, 4).to(torch.int32)
    lengths = torch.tensor([1, 17, 32])
    for pages, length in zip(table, lengths.tolist(), strict=True):
        unseen = rows_of(pages)[length:]
        k[unseen] = v[unseen] = torch.nan
    q = torch.randn(3, heads, 16, generator=generator)
    got = paged_decode_attention(q, k, v, table, lengths, PAGE)
    for request, length in enumerate(lengths.tolist()):
        seen = rows_of(table[request])[:length]
        torch.testing.assert_close(
            got[request].double(), dense(q[request], k[seen], v[seen]), rtol=1e-5, atol=1e-5
        )


def test_padding_requests_stay_finite() -> None:
    k, v, generator = make_pool(4, 1)
    q = torch.randn(2, 2, 16, generator=generator)
    table = torch.zeros(2, 1, dtype=torch.int32)
    assert paged_decode_attention(q, k, v, table, torch.tensor([0, 1]), PAGE).isfinite().all()


def test_norm_rope_and_write() -> None:
    k, v, generator = make_pool(3, 2)
    before = k.clone(), v.clone()
    rows = torch.tensor([7, 18])
    qkv = torch.randn(2, 4 + 2 + 2, 16, generator=generator)
    q_norm, k_norm = torch.rand(2, 16, generator=generator)
    angles = torch.rand(2, 4, generator=generator)
    q = norm_rope_write(qkv, q_norm, k_norm, angles.cos(), angles.sin(), rows, k, v, 1e-6)
    wide = qkv.double()
    for heads, weight, got in ((slice(0, 4), q_norm, q), (slice(4, 6), k_norm, k[rows])):
        normed = wide[:, heads] / (wide[:, heads].square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
        turned = torch.complex(normed[..., :4], normed[..., 4:8]) * torch.polar(
            torch.ones(2, 4).double(), angles.double()
        ).unsqueeze(1)
        expected = torch.cat((turned.real, turned.imag, normed[..., 8:]), dim=-1)
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(v[rows], qkv[:, 6:])
    others = torch.ones(len(k), dtype=torch.bool).index_fill(0, rows, False)
    assert torch.equal(k[others], before[0][others]) and torch.equal(v[others], before[1][others])


def test_decode_from_the_packed_projection() -> None:
    """The new token's key and value are written and visible."""
    k, v, generator = make_pool(8, 2)
    table = torch.tensor([[3, 5], [6, 0]], dtype=torch.int32)
    lengths = torch.tensor([PAGE + 2, 1])
    qkv = torch.randn(2, 4 + 2 + 2, 16, generator=generator)
    ones, angles = torch.ones(16), torch.zeros(2, 4)
    got = decode_attention(qkv, ones, ones, angles.cos(), angles.sin(), k, v, table, lengths, 0.0, PAGE)
    normed = qkv / qkv.square().mean(-1, keepdim=True).sqrt()
    for request, length in enumerate(lengths.tolist()):
        seen = rows_of(table[request])[:length]
        torch.testing.assert_close(k[seen[-1]], normed[request, 4:6])
        assert torch.equal(v[seen[-1]], qkv[request, 6:])
        expected = dense(normed[request, :4], k[seen], v[seen])
        torch.testing.assert_close(got[request].double(), expected, rtol=1e-5, atol=1e-5)
