"""How long a chunk may be beside running answers: the pace of answers, and what prompts get of the machine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.prefill_pace import PrefillPace, StepTimes

SIZES = (16, 64, 128, 256, 512, 1024, 4096)
# A long chunk costs in proportion to its tokens.
STEEP = StepTimes(
    chunks=tuple((size, 1.0 + size / 64) for size in SIZES),
    decodes=((1, 3.0), (8, 6.0), (16, 9.0), (32, 18.0)),
)
# Short chunks cost nearly the same: each reads most of the weights.
FLAT = StepTimes(
    chunks=((16, 13.0), (64, 18.0), (128, 20.0), (256, 22.0), (512, 26.0), (1024, 36.0), (4096, 130.0)),
    decodes=((1, 3.3), (16, 12.5), (32, 18.8)),
)


def test_without_answers_chunks_are_as_long_as_can_be() -> None:
    for times in (None, STEEP, FLAT):
        assert PrefillPace(SIZES, times).longest(1, 0) == 4096
        assert PrefillPace(SIZES, times).longest(9, 0) == 4096


def test_a_chunk_beside_answers_takes_no_longer_than_their_step() -> None:
    pace = PrefillPace(SIZES, STEEP)
    assert [pace.longest(1, answers) for answers in (1, 2, 8, 9, 16, 32)] == [128, 256, 256, 512, 512, 1024]


def test_where_no_short_chunk_is_cheap_a_prompt_keeps_its_least_share() -> None:
    longest = PrefillPace(SIZES, FLAT).longest(1, 16)
    chunks = dict(FLAT.chunks)
    assert longest == 64, "16 tokens a step would be a fiftieth of what the machine reads alone"
    assert longest / (chunks[longest] + 12.5) >= 4096 / 130 / 16
    # Beside a longer step the same chunk is a smaller part of the time.
    assert PrefillPace(SIZES, FLAT).longest(1, 32) == 128


def test_many_prompts_beside_few_answers_have_the_greater_claim() -> None:
    pace = PrefillPace(SIZES, FLAT)
    assert [pace.longest(prompts, 16) for prompts in (1, 2, 4, 8, 16)] == [64, 64, 256, 512, 1024]
    assert pace.longest(31, 1) == 4096


def test_without_times_chunks_grow_with_the_prompts() -> None:
    pace = PrefillPace((16, 32, 64, 128, 256))
    assert [pace.longest(prompts, 3) for prompts in (1, 2, 3, 4, 9)] == [64, 128, 128, 256, 256]
    assert PrefillPace([512]).longest(1, 1) == 512


def test_every_size_must_have_been_timed() -> None:
    with pytest.raises(AssertionError, match="timed"):
        PrefillPace((16, 24), STEEP)


@given(
    st.lists(st.floats(0.01, 500.0), min_size=len(SIZES), max_size=len(SIZES)),
    st.lists(st.floats(0.01, 500.0), min_size=2, max_size=2),
    st.integers(1, 40),
    st.integers(0, 32),
)
def test_any_times_give_a_size_and_more_prompts_no_shorter_one(
    chunk_ms: list[float], decode_ms: list[float], prompts: int, answers: int
) -> None:
    times = StepTimes(
        chunks=tuple(zip(SIZES, chunk_ms, strict=True)), decodes=((4, decode_ms[0]), (32, decode_ms[1]))
    )
    pace = PrefillPace(SIZES, times)
    assert pace.longest(prompts, answers) in SIZES
    assert pace.longest(prompts + 1, answers) >= pace.longest(prompts, answers)
