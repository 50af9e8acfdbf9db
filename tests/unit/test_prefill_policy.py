"""How much of a chunk may run beside answers: the policy of answers, and the claim of prompts that wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel

LATENCIES = StepLatencyModel(
    chunks=((16, 12.0), (256, 20.0), (1024, 36.0), (4096, 128.0)), decodes=((1, 4.0), (16, 12.0), (32, 20.0))
)
POLICY = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=LATENCIES)


def test_without_answers_a_chunk_runs_whole() -> None:
    for latency_model in (None, LATENCIES):
        assert (
            ChunkedPrefillPolicy(num_layer_groups=16, latency_model=latency_model).parts(
                4096, num_prompts=1, num_decoding=0
            )
            == 16
        )


def test_parts_beside_answers_take_half_of_their_step() -> None:
    parts = [
        POLICY.layer_groups(size, num_prompts=1, num_decoding=16) for size in (10, 16, 256, 1000, 1024, 4096)
    ]
    assert parts == [8, 8, 4, 2, 2, 1], "of 4,096 tokens one part takes 8 ms, and less than one is none"
    assert [POLICY.layer_groups(256, num_prompts=1, num_decoding=answers) for answers in (1, 2, 17)] == [
        1,
        4,
        8,
    ]


def test_served_steps_count_for_more_than_timed_ones() -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=LATENCIES)
    policy.observe(
        8.0, prefill_ms=0.0, num_decoding=13
    )  # of batch 16; a part of 1,024 tokens takes 2.25 ms, of 256 1.25
    assert [policy.layer_groups(size, num_prompts=1, num_decoding=16) for size in (256, 1024, 4096)] == [
        5,
        2,
        1,
    ]
    assert policy.layer_groups(256, num_prompts=1, num_decoding=1) == POLICY.layer_groups(
        256, num_prompts=1, num_decoding=1
    )
    policy.observe(14.0, prefill_ms=0.0, num_decoding=16)  # one that was held up changes little
    assert policy.layer_groups(1024, num_prompts=1, num_decoding=16) == 2
    for _ in range(100):
        policy.observe(4.0, prefill_ms=0.0, num_decoding=16)  # a text reaches few experts
    assert [policy.layer_groups(size, num_prompts=1, num_decoding=16) for size in (256, 1024)] == [2, 1]


def test_a_step_that_the_host_saw_far_too_late_changes_little() -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=LATENCIES)
    for _ in range(20):
        policy.observe(12.0, prefill_ms=0.0, num_decoding=16)
    before = policy.layer_groups(1024, num_prompts=1, num_decoding=16)
    policy.observe(30_000.0, prefill_ms=0.0, num_decoding=16)
    assert policy.layer_groups(1024, num_prompts=1, num_decoding=16) == before


def test_parts_that_are_served_faster_than_timed_are_more() -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=LATENCIES)
    assert (
        policy.timed_ms(1000, 4) == 9.0 and ChunkedPrefillPolicy(num_layer_groups=16).timed_ms(1000, 4) == 0.0
    )
    policy.observe(1.0, prefill_ms=2.25, num_decoding=16)  # what the decode step took of it is not known
    assert policy.chunk_factor == 1.0
    for _ in range(100):
        policy.observe(8.0, prefill_ms=0.0, num_decoding=16)
        policy.observe(8.0 + 1.5, prefill_ms=2.25, num_decoding=16)
    assert policy.layer_groups(1024, num_prompts=1, num_decoding=16) == 4
    for _ in range(100):
        policy.observe(2.25, prefill_ms=2.25, num_decoding=0)  # a chunk that ended, and its first tokens
    assert policy.layer_groups(1024, num_prompts=1, num_decoding=16) == 2
    for _ in range(100):
        policy.observe(500.0, prefill_ms=2.25, num_decoding=0)
    assert policy.chunk_factor <= 4.0, "nobody believes this"
    assert policy.layer_groups(1024, num_prompts=1, num_decoding=16) == 1


@given(st.floats(1.0, 40.0), st.floats(0.3, 1.5))
def test_what_is_served_makes_a_decode_step_hardly_twice_as_long(decode_ms: float, factor: float) -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=LATENCIES)
    for _ in range(200):
        policy.observe(decode_ms, prefill_ms=0.0, num_decoding=16)
        policy.observe(decode_ms + factor * 2.0, prefill_ms=2.0, num_decoding=16)
    for size in (16, 256, 1024):
        parts = policy.layer_groups(size, num_prompts=1, num_decoding=16)
        part_ms = factor * LATENCIES.chunk_ms(size) / 16
        assert parts == 1 or parts * part_ms <= 0.85 * decode_ms
        assert parts == 16 or (parts + 1) * part_ms >= 0.75 * decode_ms


def test_answers_yield_to_a_queue_of_prompts() -> None:
    assert [POLICY.layer_groups(4096, num_prompts=each, num_decoding=16) for each in (1, 2, 3, 4, 17)] == [
        1,
        8,
        8,
        16,
        16,
    ]
    assert POLICY.layer_groups(16, num_prompts=2, num_decoding=32) == 13, (
        "what the policy allows is more than half"
    )


def test_without_times_some_tokens_of_each_prompt_run() -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=8)
    assert [policy.layer_groups(256, num_prompts=each, num_decoding=3) for each in (1, 2, 3, 4)] == [
        2,
        4,
        6,
        8,
    ]
    assert policy.layer_groups(40, num_prompts=1, num_decoding=3) == 8
    assert policy.layer_groups(4096, num_prompts=1, num_decoding=3) == 1


@given(
    st.floats(0.01, 500.0),
    st.floats(0.01, 500.0),
    st.integers(1, 64),
    st.integers(1, 40),
    st.integers(0, 32),
    st.integers(1, 20),
)
def test_any_times_give_some_part_and_more_prompts_no_fewer(
    chunk_ms: float, decode_ms: float, tokens: int, prompts: int, answers: int, num_layer_groups: int
) -> None:
    latency_model = StepLatencyModel(chunks=((64, chunk_ms),), decodes=((32, decode_ms),))
    for policy in (
        ChunkedPrefillPolicy(num_layer_groups=num_layer_groups, latency_model=latency_model),
        ChunkedPrefillPolicy(num_layer_groups=num_layer_groups),
    ):
        parts = policy.layer_groups(tokens, num_prompts=prompts, num_decoding=answers)
        assert 1 <= parts <= num_layer_groups
        assert policy.layer_groups(tokens, num_prompts=prompts + 1, num_decoding=answers) >= parts
