"""Variable-length attention against a softmax over each query's range."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mingc.kernels.varlen_attention import make_segments, varlen_attention


@pytest.mark.parametrize(("heads", "width", "queries"), [(1, 8, 7), (4, 12, 33), (2, 72, 64)])
def test_every_query_sees_its_range_only(heads: int, width: int, queries: int) -> None:
    generator = torch.Generator().manual_seed(queries)
    q, k, v = torch.randn(3, 2, queries, heads, width, generator=generator)
    start = torch.randint(0, queries, (2, queries, 1), generator=generator)
    size = torch.randint(1, queries, (2, queries, 1), generator=generator)
    bounds = torch.cat((start, (start + size).clamp(max=queries)), dim=-1).int()
    out = varlen_attention(q, k, v, make_segments(bounds, q.flatten(2), heads))
    for row in range(2):
        for query in range(queries):
            seen = slice(*bounds[row, query].tolist())
            scores = torch.einsum("hd,khd->hk", q[row, query], k[row, seen]) / width**0.5
            expected = torch.einsum("hk,khd->hd", scores.softmax(-1), v[row, seen])
            torch.testing.assert_close(out[row, query], expected)


def test_one_range_serves_all_queries_of_a_row() -> None:
    q, k, v = torch.randn(3, 3, 10, 2, 8, generator=torch.Generator().manual_seed(0))
    shared = torch.tensor([[[0, 4]], [[2, 10]], [[0, 1]]])
    segments = make_segments(shared, q.flatten(2), 2)
    assert segments.mask is not None
    assert segments.mask.shape == (3, 1, 1, 10)
    repeated = make_segments(shared.expand(3, 10, 2), q.flatten(2), 2)
    torch.testing.assert_close(varlen_attention(q, k, v, segments), varlen_attention(q, k, v, repeated))


def test_bfloat16_stays_bfloat16() -> None:
    q, k, v = torch.randn(3, 1, 6, 2, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    segments = make_segments(torch.tensor([[[0, 6]]]), q.flatten(2), 2)
    assert segments.mask is not None
    assert segments.mask.dtype == torch.bfloat16
    assert varlen_attention(q, k, v, segments).dtype == torch.bfloat16


class Mask(nn.Module):
    def forward(self, bounds: Tensor, x: Tensor) -> Tensor | None:
        return make_segments(bounds, x, 2).mask


def test_the_mask_is_made_from_one_row_of_zeros() -> None:
    """A TensorRT plan holds zeros as a constant: for 16,384 patches a mask of them had 537 MB."""
    program = torch.export.export(Mask(), (torch.tensor([[[0, 6]] * 6]), torch.zeros(6, 16)), strict=False)
    zeros = program.graph.find_nodes(op="call_function", target=torch.ops.aten.new_zeros.default)
    assert [each.meta["val"].shape for each in zeros] == [(6,)]
