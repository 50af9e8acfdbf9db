"""Position tables of example frames, as inputs for tracing and checking the vision encoder.

The runtime computes the same tables for real images.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def example_tables(num_tokens: int, merge_size: int, grid_size: int) -> dict[str, Tensor]:
    """Position tables of two frames (one for a single token), each as square as its token count allows.

    Returns: `position_index` (M, G, 4) int64, `position_weight` (M, G, 4) float32, `coordinates` (M, G, 2)
    int64 and `segment` (M, G, 2) int32 for M tokens of G = merge_size² patches (spec: vision.md §4–§6); the learned
    position table has grid_size × grid_size rows.
    """
    half = num_tokens // 2
    places, segments = [], []
    start = 0
    for count in (num_tokens - half, half):
        if not count:
            continue
        rows = max(divisor for divisor in range(1, math.isqrt(count) + 1) if count % divisor == 0)
        place_P2 = _merge_order(rows, count // rows, merge_size)
        places.append(place_P2)
        end = start + len(place_P2)
        segments.append(torch.tensor([[start, end]], dtype=torch.int32).expand(end - start, 2))
        start = end
    mixes = [_neighbours(place_P2, grid_size) for place_P2 in places]
    group = (num_tokens, merge_size**2)
    return {
        "position_index": torch.cat([index for index, _weight in mixes]).view(*group, 4),
        "position_weight": torch.cat([weight for _index, weight in mixes]).view(*group, 4),
        "coordinates": torch.cat(places).view(*group, 2),
        "segment": torch.cat(segments).view(*group, 2),
    }


def _merge_order(rows: int, cols: int, merge_size: int) -> Tensor:
    """Row and column (P, 2) of the patches of rows × cols tokens, with the patches of a token adjacent."""
    height, width = torch.arange(rows * merge_size), torch.arange(cols * merge_size)
    row, col = torch.meshgrid(height, width, indexing="ij")
    grid = torch.stack((row, col), -1).view(rows, merge_size, cols, merge_size, 2)
    return grid.transpose(1, 2).reshape(-1, 2)


def _neighbours(place_P2: Tensor, grid_size: int) -> tuple[Tensor, Tensor]:
    """The four table rows around each patch (P, 4) int64, and their bilinear weights (P, 4) float32."""
    last = grid_size - 1
    height, width = (place_P2.amax(0) + 1).tolist()
    row_P, col_P = place_P2.unbind(1)
    y_P, x_P = torch.linspace(0, last, height)[row_P], torch.linspace(0, last, width)[col_P]
    top_P, left_P = y_P.long(), x_P.long()
    bottom_P, right_P = (top_P + 1).clamp(max=last), (left_P + 1).clamp(max=last)
    down_P, across_P = y_P - top_P, x_P - left_P
    corners = ((top_P, left_P), (top_P, right_P), (bottom_P, left_P), (bottom_P, right_P))
    index_P4 = torch.stack([row * grid_size + col for row, col in corners], 1)
    up_P, back_P = 1 - down_P, 1 - across_P
    weight_P4 = torch.stack((up_P * back_P, up_P * across_P, down_P * back_P, down_P * across_P), 1)
    return index_P4, weight_P4
