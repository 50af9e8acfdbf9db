"""Edits of logits and log probabilities compared with numpy, by the host sampler and by the device's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import sampling_reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mingc.kernels.sample_tokens import NOT_FINITE
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.device_sampler import DeviceSampler, sampling_columns
from mingc.runtime.thinker.logit_edits import MAX_LOGPROBS, logit_edits, needs_edits, top_logprobs
from mingc.runtime.thinker.sampler import SamplerRow, sample
from mingc.runtime.thinker.step import PrefillStep
from mingc.runtime.thinker.token_matcher import MaskWords, full_mask

VOCAB = 70  # no multiple of 32
CPU = torch.device("cpu")
TOKENS = st.integers(0, VOCAB - 1)


@st.composite
def rows(draw: st.DrawFn) -> dict[str, Any]:
    """A row's rules, its prompt, answer, bans and allowed tokens."""
    penalties = st.floats(-2, 2).map(lambda value: round(value, 3))
    params = SamplingParams(
        repetition_penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        presence_penalty=draw(st.just(0.0) | penalties),
        frequency_penalty=draw(st.just(0.0) | penalties),
        logit_bias=tuple(draw(st.dictionaries(TOKENS, st.sampled_from([-100.0, -3.5, 0.5, 100.0]))).items()),
    )
    return {
        "params": params,
        "prompt": draw(st.lists(TOKENS, max_size=40)),
        "answer": draw(st.lists(TOKENS, max_size=9)),
        "banned": draw(st.lists(TOKENS, max_size=4, unique=True)),
        "allowed": draw(st.none() | st.sets(TOKENS, min_size=1, max_size=VOCAB)),
    }


def mask_of(allowed: set[int] | None) -> MaskWords | None:
    if allowed is None:
        return None
    words = np.zeros(len(full_mask(VOCAB)), np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1 << token % 32)
    return words.view(np.int32)


def seen_sampler(batch: list[dict[str, Any]]) -> DeviceSampler:
    """A device sampler in whose slots 1, 2, … prompts and answers were marked, as prefill and decode steps do."""
    sampler = DeviceSampler(None, num_slots=len(batch) + 1, vocab_size=VOCAB, device=CPU)
    for slot, row in enumerate(batch, start=1):
        sampler.mark_skipped(skipped([*row["prompt"], *row["answer"]], slot))
    return sampler


def skipped(tokens: list[int], slot: int) -> PrefillStep:
    none = np.zeros(0, np.int64)
    return PrefillStep(
        input_ids=none,
        positions=none,
        embed_kind=none,
        embeds=None,
        counts=none,
        pages=none,
        starts=np.array([len(tokens)]),
        slots=np.array([slot]),
        skipped_ids=np.array(tokens, np.int64),
        skipped_counts=np.array([len(tokens)]),
    )


@settings(max_examples=60, deadline=None)
@given(batch=st.lists(rows(), min_size=1, max_size=4), seed=st.integers(0, 1 << 20))
def test_host_and_device_choose_what_numpy_chooses(batch: list[dict[str, Any]], seed: int) -> None:
    """Also with a repetition penalty and bans, which the edits include for some rows and `sample` for others."""
    raw = 4 * torch.randn(len(batch) + 2, VOCAB, generator=torch.Generator().manual_seed(seed))
    expected = [
        sampling_reference.edited(raw[place].numpy(), **row).argmax() for place, row in enumerate(batch)
    ]
    masks = [mask_of(row["allowed"]) for row in batch]

    host = []
    for row in batch:
        rules = SamplingParams(
            **{
                name: getattr(row["params"], name)
                for name in SamplingParams.__slots__
                if name != "banned_tokens"
            },
            banned_tokens=tuple(row["banned"]),
        )
        host.append(SamplerRow.begin(rules, 0, row["prompt"], VOCAB, CPU))
        for token in row["answer"]:
            host[-1].advance(token)
    before = raw.clone()
    assert sample(raw, host, masks) == expected
    assert torch.equal(raw, before), "logprobs are those of the raw logits"

    sampler = seen_sampler(batch)
    edited = [place for place, row in enumerate(batch) if needs_edits(row["params"], masks[place])]
    if edited:
        chosen = [batch[place] for place in edited]
        slots = 1 + torch.tensor(edited)
        # The answer's tokens are counted from the host after a preemption, then one by one.
        sampler.begin_counts(slots.numpy(), [np.array(row["answer"][:-2], np.int64) for row in chosen])
        for place, row in zip(edited, chosen, strict=True):
            for token in row["answer"][-2:]:
                sampler.count(torch.tensor([token]), torch.tensor([1 + place]))
        edits = logit_edits(
            [row["params"] for row in chosen],
            [row["banned"] for row in chosen],
            [masks[place] for place in edited],
        )
        sampler.edit_(raw, torch.tensor(edited), slots, edits)
    others = [place for place in range(len(raw)) if place not in edited]
    assert torch.equal(raw[others], before[others])
    columns = [
        sampling_columns(
            row["params"],
            0.5,
            row["banned"] if masks[place] is None else (),
            is_edited=place in edited,
        )
        for place, row in enumerate(batch)
    ]
    inputs = {"slots": 1 + torch.arange(len(batch)), "sampling": torch.tensor(columns, dtype=torch.float32)}
    assert sampler.sample(raw[: len(batch)], inputs, is_random=True).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(row=rows(), seed=st.integers(0, 1 << 20), temperature=st.sampled_from([0.3, 1.0, 2.0]))
def test_edited_rows_are_drawn_by_their_edited_probabilities(
    row: dict[str, Any], seed: int, temperature: float
) -> None:
    """By inversion of the cumulative probabilities in float64; the uniform number is not near a border."""
    generator = np.random.default_rng(seed)
    raw = generator.normal(0, 2, VOCAB).astype(np.float32)
    logits = sampling_reference.edited(raw, **row) / temperature
    cumulative = np.exp(logits - logits.max()).cumsum()
    point = float(generator.uniform())
    if abs(cumulative / cumulative[-1] - point).min() < 1e-5:
        return
    mask = mask_of(row["allowed"])
    sampler = seen_sampler([row])
    tensor = torch.from_numpy(raw)[None].clone()
    is_edited = needs_edits(row["params"], mask)
    if is_edited:
        sampler.begin_counts(np.array([1]), [np.array(row["answer"], np.int64)])
        edits = logit_edits([row["params"]], [row["banned"]], [mask])
        sampler.edit_(tensor, torch.tensor([0]), torch.tensor([1]), edits)
    params = SamplingParams(repetition_penalty=row["params"].repetition_penalty, temperature=temperature)
    columns = sampling_columns(params, point, row["banned"] if mask is None else (), is_edited=is_edited)
    inputs = {"slots": torch.tensor([1]), "sampling": torch.tensor([columns])}
    (token,) = sampler.sample(tensor, inputs, is_random=True).tolist()
    assert token == np.searchsorted(cumulative, np.float32(point) * cumulative[-1], side="right")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_mask_hides_no_logit_that_is_not_finite(value: float) -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 9] = value
    row = SamplerRow(SamplingParams(logit_bias=((9, -100.0),)), 0)
    assert sample(logits, [row], [mask_of({3, 4})]) == [None]
    sampler = DeviceSampler(None, num_slots=1, vocab_size=VOCAB, device=CPU)
    zero = torch.zeros(1, dtype=torch.int64)
    sampler.edit_(logits, zero, zero, logit_edits([row.params], [()], [mask_of({3, 4})]))
    inputs = {"slots": zero, "sampling": torch.zeros(1, 1)}
    assert sampler.sample(logits, inputs, is_random=False).tolist() == [NOT_FINITE]


def test_a_token_may_be_counted_more_often_than_its_counter_holds() -> None:
    sampler = DeviceSampler(None, num_slots=2, vocab_size=VOCAB, device=CPU)
    sampler.begin_counts(np.array([1]), [np.full(40_000, 7)])
    sampler.count(torch.tensor([7]), torch.tensor([1]))
    logits = torch.zeros(1, VOCAB)
    edits = logit_edits([SamplingParams(frequency_penalty=-1.0)], [()], [None])
    sampler.edit_(logits, torch.tensor([0]), torch.tensor([1]), edits)
    assert logits[0, 7] == 32767 and logits.count_nonzero() == 1


@pytest.mark.parametrize("vocab_size", [7, VOCAB, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_log_probabilities_are_those_of_a_float64_log_softmax(vocab_size: int, dtype: torch.dtype) -> None:
    """Logits of bfloat16 engines are often equal: their tokens are in order of id, as greedy sampling takes them."""
    logits = 3 * torch.randn(4, vocab_size, generator=torch.Generator().manual_seed(3))
    logits = logits.to(dtype).float()
    logits[2], logits[3] = 0.0, -50.0
    logits[3, ::2] = -0.0
    tokens = [1, vocab_size - 1, 5, 0]
    found = top_logprobs(logits, torch.tensor(tokens)).numpy()
    num_top = min(MAX_LOGPROBS, vocab_size)
    for row, raw, token in zip(found, logits.numpy(), tokens, strict=True):
        expected, order = sampling_reference.logprobs(raw), sampling_reference.most_likely(raw, num_top)
        assert row[1 + num_top :].astype(int).tolist() == order
        np.testing.assert_allclose(row[: 1 + num_top], expected[[token, *order]], atol=2e-5, rtol=1e-6)
