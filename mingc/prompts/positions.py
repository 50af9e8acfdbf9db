"""3-D position ids of a prompt by the `video_rope` rule of the released model (spec: thinker.md §4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mingc.prompts.features import Grid


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionSpan:
    """Patch tokens of one grid: index of the first token, and the grid in patches before merging."""

    start: int
    grid: Grid


def compute_positions(
    num_tokens: int, spans: Sequence[VisionSpan], *, merge_size: int, temporal_scale: int
) -> tuple[NDArray[np.int64], int]:
    """Positions (3, num_tokens) int64 with rows time, height, width, and the position delta of generated tokens.

    Text and audio count up in all rows. A grid starts at the next position: time advances by `temporal_scale` per
    frame; height and width are centred on time and may be negative. The next token continues after the largest *time*
    of the grid, so an image takes one position. Generated token number n has position n + delta in all rows.

    `spans` must be in order without overlap.
    """
    positions = np.empty((3, num_tokens), dtype=np.int64)
    done, following = 0, 0
    for span in spans:
        frames, rows, columns = span.grid[0], span.grid[1] // merge_size, span.grid[2] // merge_size
        length = frames * rows * columns
        if span.start < done or span.start + length > num_tokens:
            raise ValueError(f"span of {length} tokens at {span.start} does not fit [{done}, {num_tokens})")
        positions[:, done : span.start] = following + np.arange(span.start - done)
        base = following + span.start - done

        frame, row, column = np.unravel_index(np.arange(length), (frames, rows, columns))
        time = base + temporal_scale * frame
        block = positions[:, span.start : span.start + length]
        block[0] = time
        block[1] = time + row - (rows - 1) // 2
        block[2] = time + column - (columns - 1) // 2
        done, following = span.start + length, base + temporal_scale * (frames - 1) + 1
    positions[:, done:] = following + np.arange(num_tokens - done)
    return positions, following + num_tokens - done - num_tokens
