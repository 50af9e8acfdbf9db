"""The sampler: each rule alone, seeds, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mingc.runtime.noise import PhiloxNoise, random_seed
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.sampler import SamplerRow, sample, uniform

CPU = torch.device("cpu")


def row(seed: int = 7, prompt: tuple[int, ...] = (), vocab: int = 8, **params: float) -> SamplerRow:
    return SamplerRow.begin(SamplingParams(**params), seed, prompt, vocab, CPU)  # type: ignore[arg-type]


def draws(logits: list[float], count: int = 400, **params: float) -> list[int]:
    """Tokens of `count` requests that differ in the seed only."""
    rows = [row(seed=seed, vocab=len(logits), **params) for seed in range(count)]
    ids = sample(torch.tensor([logits]).expand(count, -1), rows)
    return [token for token in ids if token is not None]


def test_temperature_zero_is_greedy() -> None:
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]]), [row(), row()]) == [1, 0]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-40, 1e-46, 1e-320])
def test_the_lowest_temperatures_choose_the_likeliest(temperature: float) -> None:
    assert set(draws([0.0, 1.0, 2.0], count=20, temperature=temperature)) == {2}


def test_padding_rows_are_ignored() -> None:
    assert sample(torch.tensor([[0.0, 1.0], [float("nan"), 0.0]]), [row()]) == [1]


def test_top_k_one_is_greedy_at_any_temperature() -> None:
    assert set(draws([0.0, 0.1, 0.05], temperature=5.0, top_k=1)) == {1}


def test_draws_follow_the_probabilities() -> None:
    tokens = draws([0.0, 1.0, 2.0], count=2000, temperature=1.0)
    expected = torch.softmax(torch.tensor([0.0, 1.0, 2.0]), 0)
    counted = torch.bincount(torch.tensor(tokens), minlength=3) / len(tokens)
    assert torch.allclose(counted, expected, atol=0.04)


def test_rounding_that_exchanges_likely_tokens_changes_no_draw() -> None:
    logits = [1.0 + 1e-6 * (token % 3) for token in range(40)]
    rounded = [1.0 + 1e-6 * (token % 5) for token in range(40)]
    assert draws(logits, temperature=1.0) == draws(rounded, temperature=1.0)


def test_low_temperature_sharpens() -> None:
    assert set(draws([0.0, 1.0, 2.0], temperature=0.05)) == {2}


def test_top_k_keeps_the_highest() -> None:
    assert set(draws([0.0, 0.2, 0.1, 0.3], temperature=1.0, top_k=2)) == {1, 3}


def test_top_p_keeps_the_token_that_crosses_the_limit() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).tolist()
    assert set(draws(logits, temperature=1.0, top_p=0.5)) == {0}
    assert set(draws(logits, temperature=1.0, top_p=0.6)) == {0, 1}


def test_min_p_is_relative_to_the_highest() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).tolist()
    assert set(draws(logits, temperature=1.0, min_p=0.2)) == {0, 1, 2}


def test_repetition_penalty_counts_prompt_and_answer() -> None:
    logits = torch.tensor([[2.0, 1.9, -1.0, -1.1]])
    penalized = row(vocab=4, prompt=(0,), repetition_penalty=1.5)
    assert sample(logits, [penalized]) == [1]
    penalized.advance(1)
    assert sample(logits, [penalized]) == [0]
    negative = row(vocab=4, prompt=(2,), repetition_penalty=1.5)
    assert sample(torch.tensor([[-9.0, -9.0, -1.0, -1.1]]), [negative]) == [3]


def test_logits_that_are_not_finite_fail_their_row_only() -> None:
    logits = torch.tensor([[0.0, float("nan")], [0.0, 1.0], [float("-inf"), float("-inf")]])
    assert sample(logits, [row(), row(), row()]) == [None, 1, None]
    drawn = [row(vocab=2, temperature=0.01) for _ in range(3)]
    assert all(each.params.draws for each in drawn)
    assert sample(logits, drawn) == [None, 1, None], "with a temperature as well"


@settings(max_examples=40)
@given(st.integers(0, 2**63), st.integers(0, 5000), st.integers(1, 5), st.integers(0, 4))
def test_a_row_does_not_depend_on_the_batch(seed: int, step: int, size: int, place: int) -> None:
    place = place % size
    logits = torch.randn(size, 16, generator=torch.Generator().manual_seed(seed % 1000))
    mine = row(seed=seed, vocab=16, temperature=0.8, top_p=0.9)
    mine.step = step
    alone = sample(logits[place : place + 1], [mine])
    rows = [row(seed=i, vocab=16, temperature=0.3 + i) for i in range(size)]
    rows[place] = mine
    assert sample(logits, rows)[place] == alone[0]


def test_steps_of_one_seed_differ_and_repeat() -> None:
    numbers = [uniform(3, step) for step in range(50)]
    assert len(set(numbers)) == 50
    assert numbers == [uniform(3, step) for step in range(50)]
    assert all(0.0 <= number < 1.0 for number in numbers)


def test_every_token_of_an_answer_has_a_number_of_its_own() -> None:
    mine, answer = row(seed=3, vocab=512, temperature=1.0), []
    for step in range(20):
        (token,) = sample(torch.zeros(1, 512), [mine])
        assert token == int(512 * uniform(3, step)), "the uniform number selects among equal tokens"
        mine.advance(token)
        answer.append(token)
    assert len(set(answer)) > 15


def test_the_largest_seeds_differ() -> None:
    seeds = (-1, -2, -3, 2**63, 2**63 + 1)
    assert len({uniform(seed, 0) for seed in seeds}) == len(seeds)
    assert len({float(PhiloxNoise(seed).start(0, 0, (1,))[0]) for seed in seeds}) == len(seeds)
    assert uniform(-1, 0) == uniform(2**64 - 1, 0)


@pytest.mark.parametrize("kind", ["start", "diffusion"])
def test_noise_is_counted(kind: str) -> None:
    def noise(seed: int, segment: int, patch: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        drawn: NDArray[np.float32] = getattr(PhiloxNoise(seed), kind)(segment, patch, shape)
        return drawn

    first = noise(5, 0, 0, (4, 64))
    assert first.dtype.name == "float32" and first.shape == (4, 64)
    assert (first == noise(5, 0, 0, (4, 64))).all()
    for other in (noise(6, 0, 0, (4, 64)), noise(5, 1, 0, (4, 64)), noise(5, 0, 1, (4, 64))):
        assert not (first == other).any()


SEEDS = (0, 7, 2**31, 2**32 - 1, 2**32, 2**32 + 7, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)


def philox(seed: int, stream: int, counter: list[int]) -> np.random.Generator:
    """numpy's generator at one place of one stream: 64-bit words, the seed first."""
    key, place = np.array([seed, stream], np.uint64), np.array(counter, np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=place))


@pytest.mark.parametrize("seed", SEEDS)
def test_all_64_bits_of_a_seed_count(seed: int) -> None:
    assert uniform(seed, 3) == philox(seed, 1, [3, 0, 0, 0]).random()
    noise = PhiloxNoise(seed)
    for kind, drawn in enumerate((noise.start(4, 5, (4, 64)), noise.diffusion(4, 5, (4, 64)))):
        expected = philox(seed, 2, [0, 5, kind, 4]).standard_normal((4, 64), dtype=np.float32)
        assert np.array_equal(drawn, expected)
    for bit in range(64):
        other = seed ^ (1 << bit)
        assert uniform(other, 3) != uniform(seed, 3)
        assert not np.isin(PhiloxNoise(other).start(4, 5, (8,)), noise.start(4, 5, (8,))).any()


@pytest.mark.parametrize("place", [(0, 0, 0), (3, 1, 2), (2**63, 40, 999)])
def test_start_and_step_noise_share_no_number(place: tuple[int, int, int]) -> None:
    seed, segment, patch = place
    steps = PhiloxNoise(seed).diffusion(segment, patch, (10, 4, 64))
    assert len(np.unique(steps)) == steps.size
    assert not np.isin(PhiloxNoise(seed).start(segment, patch, (4, 64)), steps).any()


def test_random_seeds_have_63_bits() -> None:
    seeds = [random_seed() for _ in range(200)]
    assert len(set(seeds)) == 200
    assert 2**62 < max(seeds) < 2**63


def test_stop_tokens_are_banned_until_the_answer_has_min_tokens() -> None:
    params = SamplingParams(min_tokens=2)
    mine = SamplerRow(params, seed=1, stop_ids=(5, 9))
    banned = []
    for _ in range(4):
        banned.append([mine.banned(pending) for pending in (0, 1, 2)])
        mine.advance(0)
    ids: tuple[int, ...] = (5, 9)
    assert banned == [[ids, ids, ()], [ids, (), ()], [(), (), ()], [(), (), ()]]
    free = SamplerRow(SamplingParams(), seed=1, stop_ids=(5,))
    assert free.banned() == () and sample(torch.tensor([[0.0] * 5 + [1.0]]), [free]) == [5]
    held = SamplerRow(SamplingParams(min_tokens=1), seed=1, stop_ids=(5,))
    assert sample(torch.tensor([[0.0, 0.5, 0.0, 0.0, 0.0, 1.0]]), [held]) == [1]
