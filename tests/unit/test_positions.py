"""3-D positions: the worked examples of the specification, and invalid spans."""

from __future__ import annotations

import numpy as np
import pytest

from mingc.prompts.positions import VisionSpan, compute_positions


def rows(num_tokens: int, *spans: tuple[int, tuple[int, int, int]]) -> tuple[list[list[int]], int]:
    positions, delta = compute_positions(
        num_tokens,
        [VisionSpan(start=start, grid=grid) for start, grid in spans],
        merge_size=2,
        temporal_scale=2,
    )
    assert positions.dtype == np.int64
    return positions.tolist(), delta


def test_text_counts_up() -> None:
    assert rows(5) == ([[0, 1, 2, 3, 4]] * 3, 0)
    assert rows(0) == ([[], [], []], 0)


def test_an_image_takes_one_position() -> None:
    time = [0, 1, 2, 3, 3, 3, 3, 3, 3, 4, 5, 6]
    height = [0, 1, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6]
    width = [0, 1, 2, 2, 3, 4, 2, 3, 4, 4, 5, 6]
    assert rows(12, (3, (1, 4, 6))) == ([time, height, width], -5)


def test_an_interleaved_video_counts_like_images() -> None:
    time = [0, 1, 2, 3, 4, 4, 4, 4, 5, 6, 7, 8, 8, 8, 8, 9, 10, 11]
    height = [0, 1, 2, 3, 4, 4, 5, 5, 5, 6, 7, 8, 8, 9, 9, 9, 10, 11]
    width = [0, 1, 2, 3, 4, 5, 4, 5, 5, 6, 7, 8, 9, 8, 9, 9, 10, 11]
    assert rows(18, (4, (1, 4, 4)), (11, (1, 4, 4))) == ([time, height, width], -6)


def test_positions_may_be_negative() -> None:
    positions, _ = rows(22, (1, (1, 2, 40)))
    assert positions[2][1] == -8
    assert positions[0][21] == 2


def test_a_wide_grid_of_one_row() -> None:
    positions, delta = rows(3 + 256 + 1, (3, (1, 2, 512)))
    assert positions[1][3:259] == [3] * 256
    assert positions[2][3:259] == [3 + column - 127 for column in range(256)]
    assert positions[0][259] == 4
    assert delta == 5 - 260


def test_frames_of_one_grid_are_scaled_in_time() -> None:
    positions, delta = rows(1 + 3 + 1, (1, (3, 2, 2)))
    assert positions[0] == [0, 1, 3, 5, 6]
    assert positions[1] == positions[2] == positions[0]
    assert delta == 2


@pytest.mark.parametrize("spans", [[(10, (1, 4, 4))], [(0, (1, 4, 4)), (3, (1, 4, 4))]])
def test_spans_that_overlap_or_exceed_the_prompt_are_refused(
    spans: list[tuple[int, tuple[int, int, int]]],
) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        rows(12, *spans)
