"""Grids of patches → position and attention inputs of the vision encoder (spec: vision.md §4, §5, §6).

All arrays are grouped by merged token, (M, merge², …), in the patch order of `image.patchify`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mingc.prompts.features import Grid

_Scalar = TypeVar("_Scalar", bound=np.generic)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionGridArrays:
    """Inputs of `vision_encoder.encode` other than the pixels; m = merge² patches per token.

    `position_index` (M, m, 4) int64 and `position_weight` (M, m, 4) float32: rows of the learned position table
    and their bilinear weights. `coordinates` (M, m, 2) int64: row and column. `segment` (M, m, 2) int32: the range
    [start, end) of flat patch indices that a patch attends to: its frame.
    """

    position_index: NDArray[np.int64]
    position_weight: NDArray[np.float32]
    coordinates: NDArray[np.int64]
    segment: NDArray[np.int32]

    @property
    def num_tokens(self) -> int:
        return len(self.coordinates)


def _neighbours(
    size: int, table_side: int
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.float32]]:
    """For `size` aligned-corner coordinates: the table index below, the index above, and the fraction between them."""
    position = np.linspace(0, table_side - 1, size, dtype=np.float32)
    below = position.astype(np.int64)
    return below, np.minimum(below + 1, table_side - 1), position - below.astype(np.float32)


def _frame_coordinates(height: int, width: int, merge: int) -> NDArray[np.int64]:
    """(height·width/merge², merge², 2): row and column of each patch of a frame in merge order."""
    shape = (height // merge, width // merge, merge, merge)
    rows = np.broadcast_to(np.arange(height).reshape(-1, 1, merge, 1), shape)
    columns = np.broadcast_to(np.arange(width).reshape(1, -1, 1, merge), shape)
    return np.stack([rows, columns], axis=-1).reshape(-1, merge**2, 2).astype(np.int64)


class _FrameArrays(NamedTuple):
    """`VisionGridArrays` of one frame without its segment. Cached: do not write to them."""

    position_index: NDArray[np.int64]
    position_weight: NDArray[np.float32]
    coordinates: NDArray[np.int64]


@lru_cache(maxsize=8)  # pictures of one size, and the frames of a video, share an entry of at most 4.2 MB
def _frame_arrays(height: int, width: int, merge: int, table_side: int) -> _FrameArrays:
    points = _frame_coordinates(height, width, merge)
    row, column = points[..., 0], points[..., 1]
    row_below, row_above, row_part = _neighbours(height, table_side)
    column_below, column_above, column_part = _neighbours(width, table_side)
    corners = [
        (line[row] * table_side + place[column])
        for line in (row_below, row_above)
        for place in (column_below, column_above)
    ]
    one = np.float32(1)
    weights = [
        a[row] * b[column] for a in (one - row_part, row_part) for b in (one - column_part, column_part)
    ]
    return _FrameArrays(np.stack(corners, axis=-1), np.stack(weights, axis=-1), points)


def build_grid_arrays(grids: Sequence[Grid], *, merge_size: int, position_grid_size: int) -> VisionGridArrays:
    """Index arrays of the grids in order; each frame is a separate attention segment."""
    index: list[NDArray[np.int64]] = []
    weight: list[NDArray[np.float32]] = []
    coordinates: list[NDArray[np.int64]] = []
    segment: list[NDArray[np.int32]] = []
    start = 0
    for frames, height, width in grids:
        frame = _frame_arrays(height, width, merge_size, position_grid_size)
        index += [frame.position_index] * frames
        weight += [frame.position_weight] * frames
        coordinates += [frame.coordinates] * frames
        for _ in range(frames):
            end = start + height * width
            segment.append(np.broadcast_to(np.array([start, end], dtype=np.int32), frame.coordinates.shape))
            start = end
    if not grids:
        raise ValueError("no grids")
    return VisionGridArrays(
        position_index=np.concatenate(index),
        position_weight=np.concatenate(weight),
        coordinates=np.concatenate(coordinates),
        segment=np.concatenate(segment),
    )


def group_pixels(pixels: NDArray[_Scalar], merge_size: int) -> NDArray[_Scalar]:
    """View patch rows (P, …) as (P / merge², merge², …)."""
    return pixels.reshape(-1, merge_size**2, *pixels.shape[1:])


def pad_tokens(values: NDArray[_Scalar], num_tokens: int) -> NDArray[_Scalar]:
    """Pad `values` (M, …) with zero rows to `num_tokens`."""
    missing = num_tokens - len(values)
    if missing < 0:
        raise ValueError(f"{len(values)} tokens do not fit a bucket of {num_tokens}")
    return values if not missing else np.pad(values, [(0, missing)] + [(0, 0)] * (values.ndim - 1))


def pad_grid_arrays(arrays: VisionGridArrays, num_tokens: int) -> VisionGridArrays:
    """Pad the arrays to a bucket of `num_tokens`.

    A padding patch attends to the patches of the same token, so that its softmax is never empty.
    """
    patches = arrays.segment.shape[1]
    starts = np.arange(arrays.num_tokens, num_tokens, dtype=np.int32)[:, None] * patches
    own = np.stack([starts, starts + patches], axis=-1)
    return VisionGridArrays(
        position_index=pad_tokens(arrays.position_index, num_tokens),
        position_weight=pad_tokens(arrays.position_weight, num_tokens),
        coordinates=pad_tokens(arrays.coordinates, num_tokens),
        segment=np.concatenate([arrays.segment, np.broadcast_to(own, (len(own), patches, 2))]).astype(
            np.int32
        ),
    )
