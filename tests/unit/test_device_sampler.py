"""Device sampler compared with the host sampler: same token for the same logits, rules and uniform number."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mingc.kernels.sample_tokens import MAX_BANNED, NOT_FINITE, sample_greedy, sample_tokens
from mingc.runtime.request import SamplingParams
from mingc.runtime.thinker.device_sampler import needs_sampling, sampling_columns
from mingc.runtime.thinker.sampler import SamplerRow, sample, uniform

VOCAB = 300
RULES = [
    SamplingParams(),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=1),
    SamplingParams(temperature=1e-6),
    SamplingParams(temperature=1e-46),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_k=10 * VOCAB),
    SamplingParams(temperature=1.0, top_p=0.4),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=2.0, min_p=0.2),
    SamplingParams(temperature=0.9, top_k=40, top_p=0.8, min_p=0.01),
    SamplingParams(repetition_penalty=1.8),
    SamplingParams(temperature=1.1, repetition_penalty=0.6, top_p=0.9),
    SamplingParams(min_tokens=VOCAB),
    SamplingParams(min_tokens=VOCAB, temperature=1.0, top_k=40, top_p=0.8, repetition_penalty=1.3),
]


@pytest.mark.parametrize("seed", range(8))
def test_every_row_of_a_mixed_batch_equals_the_host_sampler(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(RULES), VOCAB, generator=generator)
    prompt = torch.randint(0, VOCAB, (40,), generator=generator).tolist()
    likely = logits.topk(6).indices.tolist()
    rows = [
        SamplerRow.begin(params, seed + 7, prompt, VOCAB, torch.device("cpu"), tuple({0, *likely[index]}))
        for index, params in enumerate(RULES)
    ]
    for step, row in enumerate(rows):
        row.step = step
    columns = [sampling_columns(row.params, uniform(row.seed, row.step), row.banned()) for row in rows]
    seen = torch.zeros(len(rows), VOCAB, dtype=torch.bool)
    seen[:, prompt] = True
    found = sample_tokens(logits, torch.tensor(columns, dtype=torch.float32), seen)
    assert found.tolist() == sample(logits, rows)
    for row, token in zip(rows, found.tolist(), strict=True):
        assert token not in row.stop_ids or not row.params.min_tokens


@pytest.mark.parametrize("banned", [(0,), (1, 2), tuple(range(MAX_BANNED)), (157_183, 0)])
def test_banned_tokens_are_never_chosen(banned: tuple[int, ...]) -> None:
    logits = torch.linspace(1.0, 0.0, 157_184).expand(2, -1)
    logits = logits.index_fill(1, torch.tensor([157_183]), 2.0)
    params = (SamplingParams(), SamplingParams(temperature=1.0, top_k=50))
    columns = np.array([sampling_columns(each, 0.3, banned) for each in params])
    assert needs_sampling(columns)
    seen = torch.zeros(logits.shape, dtype=torch.bool)
    greedy, sampled = sample_tokens(logits, torch.tensor(columns, dtype=torch.float32), seen).tolist()
    allowed = [token for token in (157_183, *range(100)) if token not in banned]
    assert greedy == allowed[0] and sampled in allowed[:50]


def test_rows_that_are_not_finite_are_reported() -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    logits[0, 7], logits[2, 9] = torch.nan, torch.inf
    columns = torch.tensor([sampling_columns(SamplingParams(temperature=1.0), 0.5)] * 3)
    seen = torch.zeros(3, VOCAB, dtype=torch.bool)
    assert (sample_tokens(logits, columns, seen) == NOT_FINITE).tolist() == [True, False, True]
    assert sample_greedy(logits).tolist() == [NOT_FINITE, int(logits[1].argmax()), NOT_FINITE]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), False),
        (SamplingParams(temperature=2.0, top_k=1), False),
        (SamplingParams(temperature=1e-46), False),
        (SamplingParams(temperature=0.5), True),
        (SamplingParams(repetition_penalty=1.1), True),
    ],
)
def test_one_random_row_needs_sampling(params: SamplingParams, expected: bool) -> None:
    rows = [sampling_columns(each, 0.5) for each in (SamplingParams(), params)]
    assert needs_sampling(np.array(rows)) == expected
