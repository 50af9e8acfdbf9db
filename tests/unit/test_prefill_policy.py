"""How much of a chunk may run beside answers: the pace of answers, and the claim of prompts that wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel

TIMES = StepLatencyModel(
    chunks=((16, 12.0), (256, 20.0), (1024, 36.0), (4096, 128.0)), decodes=((1, 4.0), (16, 12.0), (32, 20.0))
)
PACE = ChunkedPrefillPolicy(num_parts=16, times=TIMES)


def test_without_answers_a_chunk_runs_whole() -> None:
    for times in (None, TIMES):
        assert ChunkedPrefillPolicy(num_parts=16, times=times).parts(4096, num_prompts=1, num_answers=0) == 16


def test_parts_beside_answers_take_half_of_their_step() -> None:
    parts = [PACE.parts(size, num_prompts=1, num_answers=16) for size in (10, 16, 256, 1000, 1024, 4096)]
    assert parts == [8, 8, 4, 2, 2, 1], "of 4,096 tokens one part takes 8 ms, and less than one is none"
    assert [PACE.parts(256, num_prompts=1, num_answers=answers) for answers in (1, 2, 17)] == [1, 4, 8]


def test_served_steps_count_for_more_than_timed_ones() -> None:
    pace = ChunkedPrefillPolicy(num_parts=16, times=TIMES)
    pace.see(
        8.0, parts_ms=0.0, num_answers=13
    )  # of batch 16; a part of 1,024 tokens takes 2.25 ms, of 256 1.25
    assert [pace.parts(size, num_prompts=1, num_answers=16) for size in (256, 1024, 4096)] == [5, 2, 1]
    assert pace.parts(256, num_prompts=1, num_answers=1) == PACE.parts(256, num_prompts=1, num_answers=1)
    pace.see(14.0, parts_ms=0.0, num_answers=16)  # one that was held up changes little
    assert pace.parts(1024, num_prompts=1, num_answers=16) == 2
    for _ in range(100):
        pace.see(4.0, parts_ms=0.0, num_answers=16)  # a text reaches few experts
    assert [pace.parts(size, num_prompts=1, num_answers=16) for size in (256, 1024)] == [2, 1]


def test_a_step_that_the_host_saw_far_too_late_changes_little() -> None:
    pace = ChunkedPrefillPolicy(num_parts=16, times=TIMES)
    for _ in range(20):
        pace.see(12.0, parts_ms=0.0, num_answers=16)
    before = pace.parts(1024, num_prompts=1, num_answers=16)
    pace.see(30_000.0, parts_ms=0.0, num_answers=16)
    assert pace.parts(1024, num_prompts=1, num_answers=16) == before


def test_parts_that_are_served_faster_than_timed_are_more() -> None:
    pace = ChunkedPrefillPolicy(num_parts=16, times=TIMES)
    assert pace.timed_ms(1000, 4) == 9.0 and ChunkedPrefillPolicy(num_parts=16).timed_ms(1000, 4) == 0.0
    pace.see(1.0, parts_ms=2.25, num_answers=16)  # what the decode step took of it is not known
    assert pace.chunk_factor == 1.0
    for _ in range(100):
        pace.see(8.0, parts_ms=0.0, num_answers=16)
        pace.see(8.0 + 1.5, parts_ms=2.25, num_answers=16)
    assert pace.parts(1024, num_prompts=1, num_answers=16) == 4
    for _ in range(100):
        pace.see(2.25, parts_ms=2.25, num_answers=0)  # a chunk that ended, and its first tokens
    assert pace.parts(1024, num_prompts=1, num_answers=16) == 2
    for _ in range(100):
        pace.see(500.0, parts_ms=2.25, num_answers=0)
    assert pace.chunk_factor <= 4.0, "nobody believes this"
    assert pace.parts(1024, num_prompts=1, num_answers=16) == 1


@given(st.floats(1.0, 40.0), st.floats(0.3, 1.5))
def test_what_is_served_makes_a_decode_step_hardly_twice_as_long(decode_ms: float, factor: float) -> None:
    pace = ChunkedPrefillPolicy(num_parts=16, times=TIMES)
    for _ in range(200):
        pace.see(decode_ms, parts_ms=0.0, num_answers=16)
        pace.see(decode_ms + factor * 2.0, parts_ms=2.0, num_answers=16)
    for size in (16, 256, 1024):
        parts = pace.parts(size, num_prompts=1, num_answers=16)
        part_ms = factor * TIMES.chunk_ms(size) / 16
        assert parts == 1 or parts * part_ms <= 0.85 * decode_ms
        assert parts == 16 or (parts + 1) * part_ms >= 0.75 * decode_ms


def test_answers_yield_to_a_queue_of_prompts() -> None:
    assert [PACE.parts(4096, num_prompts=each, num_answers=16) for each in (1, 2, 3, 4, 17)] == [
        1,
        8,
        8,
        16,
        16,
    ]
    assert PACE.parts(16, num_prompts=2, num_answers=32) == 13, "what the pace allows is more than half"


def test_without_times_some_tokens_of_each_prompt_run() -> None:
    pace = ChunkedPrefillPolicy(num_parts=8)
    assert [pace.parts(256, num_prompts=each, num_answers=3) for each in (1, 2, 3, 4)] == [2, 4, 6, 8]
    assert pace.parts(40, num_prompts=1, num_answers=3) == 8
    assert pace.parts(4096, num_prompts=1, num_answers=3) == 1


@given(
    st.floats(0.01, 500.0),
    st.floats(0.01, 500.0),
    st.integers(1, 64),
    st.integers(1, 40),
    st.integers(0, 32),
    st.integers(1, 20),
)
def test_any_times_give_some_part_and_more_prompts_no_fewer(
    chunk_ms: float, decode_ms: float, tokens: int, prompts: int, answers: int, num_parts: int
) -> None:
    times = StepLatencyModel(chunks=((64, chunk_ms),), decodes=((32, decode_ms),))
    for pace in (
        ChunkedPrefillPolicy(num_parts=num_parts, times=times),
        ChunkedPrefillPolicy(num_parts=num_parts),
    ):
        parts = pace.parts(tokens, num_prompts=prompts, num_answers=answers)
        assert 1 <= parts <= num_parts
        assert pace.parts(tokens, num_prompts=prompts + 1, num_answers=answers) >= parts
