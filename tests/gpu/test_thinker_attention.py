"""Attention kernels of the thinker against their torch references, in bfloat16 on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mingc.kernels.decode_attention import decode_attention
from mingc.kernels.dispatch import plain_torch
from mingc.kernels.norm_rope_write import norm_rope_write
from mingc.kernels.paged_attention import paged_decode_attention, paged_prefill_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
TOLERANCE = 1e-2  # rounding error of bfloat16, relative to the largest value
PAGE, SIZE = 16, 128
HEADS = [(32, 4), (8, 1), (4, 1)]  # query and KV heads of one rank of 1, 4 and 8


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda").to(torch.bfloat16)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, device="cuda")


def check(value: Tensor, expected: Tensor) -> None:
    error = (value.float() - expected.float()).abs().max() / expected.float().abs().max()
    assert error < TOLERANCE


def pools(num_pages: int, kv_heads: int) -> tuple[Tensor, Tensor]:
    return normal(num_pages * PAGE, kv_heads, SIZE), normal(num_pages * PAGE, kv_heads, SIZE)


def tables(lengths: list[int], width: int) -> Tensor:
    """Page tables (B, width) int32: pages of all requests in random order, padded with page 0."""
    counts = [-(-length // PAGE) for length in lengths]
    free = (torch.randperm(sum(counts), device="cuda") + 1).to(torch.int32)
    table = torch.zeros(len(lengths), width, dtype=torch.int32, device="cuda")
    for row, pages in zip(table, free.split(counts), strict=True):
        row[: len(pages)] = pages
    return table


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_of_unequal_requests(heads: int, kv_heads: int) -> None:
    lengths = [1, 15, 16, 17, 127, 128, 129, 1000, 5000, 8192]
    table = tables(lengths, 512)
    k, v = pools(int(table.max()) + 1, kv_heads)
    for pages, length in zip(table, lengths, strict=True):
        rows = (pages.long().unsqueeze(1) * PAGE + torch.arange(PAGE, device="cuda")).flatten()
        unseen = rows[length : -(-length // PAGE) * PAGE]
        k[unseen] = v[unseen] = torch.nan
    q = 2 * normal(len(lengths), heads, SIZE)
    got = paged_decode_attention(q, k, v, table, ints(*lengths), PAGE)
    with plain_torch():
        expected = paged_decode_attention(q.float(), k.float(), v.float(), table, ints(*lengths), PAGE)
    check(got, expected)
    for request, length in enumerate(lengths):
        own = slice(request, request + 1)
        alone = paged_decode_attention(q[own], k, v, table[own], ints(length), PAGE)
        assert torch.equal(alone, got[own]), "a request's result depends on the batch"


def test_padding_requests_stay_finite() -> None:
    k, v = pools(2, 4)
    table = torch.zeros(2, 64, dtype=torch.int32, device="cuda")
    assert paged_decode_attention(normal(2, 32, SIZE), k, v, table, ints(0, 1), PAGE).isfinite().all()


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
@pytest.mark.parametrize(("tokens", "start"), [(16, 0), (17, 4070), (300, 1000), (2048, 5), (4096, 0)])
def test_prefill(heads: int, kv_heads: int, tokens: int, start: int) -> None:
    table = tables([start + tokens], 256)
    k, v = pools(int(table.max()) + 1, kv_heads)
    q = 2 * normal(tokens, heads, SIZE)
    place = start + torch.arange(tokens, device="cuda")
    got = paged_prefill_attention(q, k, v, table, torch.zeros_like(place), place, PAGE)
    with plain_torch():
        expected = paged_prefill_attention(
            q.float(), k.float(), v.float(), table, torch.zeros_like(place), place, PAGE
        )
    check(got, expected)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_prefill_of_requests_that_share_a_chunk(heads: int, kv_heads: int) -> None:
    parts = [(0, 5), (1000, 64), (37, 130), (4000, 1)]  # tokens before the chunk and in it
    lengths = [start + count for start, count in parts]
    table = tables([*lengths, 0], 256)
    k, v = pools(int(table.max()) + 1, kv_heads)
    for pages, length in zip(table, lengths, strict=False):
        rows = (pages.long().unsqueeze(1) * PAGE + torch.arange(PAGE, device="cuda")).flatten()
        unseen = rows[length : -(-length // PAGE) * PAGE]
        k[unseen] = v[unseen] = torch.nan
    offsets = [0, 64, 128, 320]
    tokens = 448  # ends with a block and a half of padding
    segment = torch.zeros(tokens, dtype=torch.int64, device="cuda")
    index = segment - 1
    for prompt, (offset, (start, count)) in enumerate(zip(offsets, parts, strict=True)):
        segment[offset : offset + count] = prompt
        index[offset : offset + count] = start + torch.arange(count, device="cuda")
    q = 2 * normal(tokens, heads, SIZE)
    got = paged_prefill_attention(q, k, v, table, segment, index, PAGE)
    assert got[index >= 0].isfinite().all()
    for prompt, (offset, (_, count)) in enumerate(zip(offsets, parts, strict=True)):
        own = slice(offset, offset + count)
        alone = paged_prefill_attention(
            q[own].clone(), k, v, table[prompt : prompt + 1], torch.zeros_like(index[own]), index[own], PAGE
        )
        check(got[own], alone)
        with plain_torch():
            expected = paged_prefill_attention(
                q[own].float(), k.nan_to_num().float(), v.nan_to_num().float(), table[prompt : prompt + 1],
                torch.zeros_like(index[own]), index[own], PAGE,
            )  # fmt: skip
        check(got[own], expected)


@pytest.mark.parametrize("tokens", [1, 33, 500])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_norm_rope_and_write(tokens: int, heads: int, kv_heads: int) -> None:
    qkv, weights = normal(tokens, heads + 2 * kv_heads, SIZE), [normal(SIZE) for _ in range(2)]
    angles = torch.rand(tokens, 32, device="cuda") * 6
    rows = torch.randperm(40 * PAGE, device="cuda")[:tokens]
    ours = pools(40, kv_heads)
    theirs = [pool.clone() for pool in ours]
    got = norm_rope_write(qkv, *weights, angles.cos(), angles.sin(), rows, *ours, 1e-6)
    with plain_torch():
        expected = norm_rope_write(qkv, *weights, angles.cos(), angles.sin(), rows, *theirs, 1e-6)
    for value, wanted in zip((got, *ours), (expected, *theirs), strict=True):
        check(value, wanted)


@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_decode_from_the_packed_projection(heads: int, kv_heads: int) -> None:
    """Called twice on the same memory: one call must not affect the next."""
    lengths = [1, 128, 129, 2048, 2049, 3000, 8000]
    table = tables(lengths, 512)
    ours = pools(int(table.max()) + 1, kv_heads)
    theirs = [pool.clone() for pool in ours]
    qkv, weights = normal(len(lengths), heads + 2 * kv_heads, SIZE), [normal(SIZE) for _ in range(2)]
    angles = torch.rand(len(lengths), 32, device="cuda") * 6
    places = table, ints(*lengths)
    turn = angles.cos(), angles.sin()
    got = decode_attention(qkv, *weights, *turn, *ours, *places, 1e-6, PAGE)
    again = decode_attention(qkv, *weights, *turn, *ours, *places, 1e-6, PAGE)
    with plain_torch():
        expected = decode_attention(qkv, *weights, *turn, *theirs, *places, 1e-6, PAGE)
    for value, wanted in zip((got, *ours), (expected, *theirs), strict=True):
        check(value, wanted)
    assert torch.equal(got, again)
