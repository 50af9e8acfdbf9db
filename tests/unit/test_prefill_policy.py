"""Chunked prefill policy: delay of decoding requests against the progress of waiting prompts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy, StepLatencyModel

MODEL = StepLatencyModel(
    chunks=((16, 12.0), (256, 20.0), (1024, 36.0), (4096, 128.0)), decodes=((1, 4.0), (16, 12.0), (32, 20.0))
)
UNOBSERVED = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=MODEL)


def groups(
    policy: ChunkedPrefillPolicy, *sizes: int, num_prompts: int = 1, num_decoding: int = 16
) -> list[int]:
    """Layer groups per step for chunks of `sizes` tokens."""
    return [
        policy.groups_per_step(size, num_prompts=num_prompts, num_decoding=num_decoding) for size in sizes
    ]


def make_policy() -> ChunkedPrefillPolicy:
    return ChunkedPrefillPolicy(num_layer_groups=16, latency_model=MODEL)


def test_without_decoding_requests_a_chunk_runs_whole() -> None:
    for model in (None, MODEL):
        policy = ChunkedPrefillPolicy(num_layer_groups=16, latency_model=model)
        assert groups(policy, 4096, num_decoding=0) == [16]


def test_prefill_takes_half_of_a_measured_decode_step() -> None:
    # One group of 4,096 tokens takes 8 ms, more than half of 12 ms, but at least one runs.
    assert groups(UNOBSERVED, 10, 16, 256, 1000, 1024, 4096) == [8, 8, 4, 2, 2, 1]
    assert [groups(UNOBSERVED, 256, num_decoding=count) for count in (1, 2, 17)] == [[1], [4], [8]]


def test_served_steps_get_a_larger_share_than_measured_ones() -> None:
    policy = make_policy()
    policy.observe(8.0, prefill_ms=0.0, num_decoding=13)  # batch 16; a group takes 2.25 ms or 1.25 ms
    assert groups(policy, 256, 1024, 4096) == [5, 2, 1]
    assert groups(policy, 256, num_decoding=13) == groups(policy, 256)  # the same batch of the engine
    assert groups(policy, 256, num_decoding=1) == groups(UNOBSERVED, 256, num_decoding=1)
    policy.observe(14.0, prefill_ms=0.0, num_decoding=16)  # one delayed step changes little
    assert groups(policy, 1024) == [2]
    for _ in range(100):
        policy.observe(4.0, prefill_ms=0.0, num_decoding=16)  # real text reaches few experts
    assert groups(policy, 256, 1024) == [2, 1]


def test_a_late_first_step_counts_as_the_startup_measurement() -> None:
    late, punctual = make_policy(), make_policy()
    late.observe(40.0, prefill_ms=0.0, num_decoding=16)
    punctual.observe(12.0, prefill_ms=0.0, num_decoding=16)
    assert groups(late, 1024) == groups(punctual, 1024) == [4]


def test_an_outlier_of_decode_time_is_clipped() -> None:
    policy = make_policy()
    for _ in range(20):
        policy.observe(12.0, prefill_ms=0.0, num_decoding=16)
    before = groups(policy, 1024)
    policy.observe(30_000.0, prefill_ms=0.0, num_decoding=16)
    assert groups(policy, 1024) == before


def test_prefill_that_is_served_faster_than_measured_gets_more_groups() -> None:
    policy = make_policy()
    assert policy.measured_ms(1000, 4) == 9.0
    assert ChunkedPrefillPolicy(num_layer_groups=16).measured_ms(1000, 4) == 0.0
    policy.observe(1.0, prefill_ms=2.25, num_decoding=16)  # the share of the decode step is not known yet
    assert policy.chunk_factor == 1.0
    for _ in range(100):
        policy.observe(8.0, prefill_ms=0.0, num_decoding=16)
        policy.observe(8.0 + 1.5, prefill_ms=2.25, num_decoding=16)
    assert groups(policy, 1024) == [4]
    for _ in range(100):
        policy.observe(2.25, prefill_ms=2.25, num_decoding=0)  # the end of a chunk, with its first tokens
    assert groups(policy, 1024) == [2]
    for _ in range(100):
        policy.observe(500.0, prefill_ms=2.25, num_decoding=0)
    assert policy.chunk_factor <= 4.0, "outliers are clipped"
    assert groups(policy, 1024) == [1]


@given(st.floats(1.0, 40.0), st.floats(0.3, 1.5))
def test_served_prefill_at_most_about_doubles_a_decode_step(decode_ms: float, factor: float) -> None:
    policy = make_policy()
    for _ in range(200):
        policy.observe(decode_ms, prefill_ms=0.0, num_decoding=16)
        policy.observe(decode_ms + factor * 2.0, prefill_ms=2.0, num_decoding=16)
    for size in (16, 256, 1024):
        (count,) = groups(policy, size)
        group_ms = factor * MODEL.chunk_ms(size) / 16
        assert count == 1 or count * group_ms <= 0.85 * decode_ms
        assert count == 16 or (count + 1) * group_ms >= 0.75 * decode_ms


def test_a_queue_of_prompts_takes_precedence_over_decode_latency() -> None:
    found = [groups(UNOBSERVED, 4096, num_prompts=count)[0] for count in (1, 2, 3, 4, 17)]
    assert found == [1, 8, 8, 16, 16]
    # The time budget allows more than half a chunk.
    assert groups(UNOBSERVED, 16, num_prompts=2, num_decoding=32) == [13]


@pytest.mark.parametrize("num_layer_groups", [1, 2, 5, 7, 8])
def test_a_chunk_of_two_or_three_prompts_takes_at_most_two_steps(num_layer_groups: int) -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=num_layer_groups, latency_model=MODEL)
    for num_prompts in (2, 3):
        (per_step,) = groups(policy, 4096, num_prompts=num_prompts)
        assert 2 * per_step >= num_layer_groups > 2 * (per_step - 1)


def test_without_a_latency_model_64_tokens_per_prompt_run() -> None:
    policy = ChunkedPrefillPolicy(num_layer_groups=8)
    found = [groups(policy, 256, num_prompts=count, num_decoding=3)[0] for count in (1, 2, 3, 4)]
    assert found == [2, 4, 6, 8]
    assert groups(policy, 40, 4096, num_decoding=3) == [8, 1]


@given(
    st.floats(0.01, 500.0),
    st.floats(0.01, 500.0),
    st.integers(1, 64),
    st.integers(1, 40),
    st.integers(0, 32),
    st.integers(1, 20),
)
def test_every_latency_gives_at_least_one_group_and_more_prompts_no_fewer(
    chunk_ms: float, decode_ms: float, tokens: int, prompts: int, decoding: int, num_layer_groups: int
) -> None:
    model = StepLatencyModel(chunks=((64, chunk_ms),), decodes=((32, decode_ms),))
    for policy in (
        ChunkedPrefillPolicy(num_layer_groups=num_layer_groups, latency_model=model),
        ChunkedPrefillPolicy(num_layer_groups=num_layer_groups),
    ):
        (count,) = groups(policy, tokens, num_prompts=prompts, num_decoding=decoding)
        (more,) = groups(policy, tokens, num_prompts=prompts + 1, num_decoding=decoding)
        assert 1 <= count <= num_layer_groups
        assert more >= count
