"""Sampling of tokens: the torch reference and, where Triton is installed, its kernels in the interpreter.

Both are compared with a sampler in float64 over a sorted vocabulary.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exact_sampling import cases, columns, distributions, possible_tokens
from safetensors.torch import save_file
from torch import Tensor

import mingc
from mingc.kernels.sample_tokens import MAX_BANNED, NUM_COLUMNS, sample_tokens

ROOT = Path(mingc.__file__).parents[1]


def check(found: Tensor, logits: Tensor, sampling: Tensor, seen: Tensor) -> None:
    for row, (token, possible) in enumerate(
        zip(found.tolist(), possible_tokens(logits, sampling, seen), strict=True)
    ):
        assert token in possible, (
            f"row {row}, {sampling[row, :6].tolist()}: {token}, not {sorted(possible)[:9]}"
        )


@pytest.mark.parametrize("name", distributions(8))
@pytest.mark.parametrize("vocab", [300, 3001])
def test_the_reference_samples_the_tokens_of_exact_arithmetic(name: str, vocab: int) -> None:
    for seed in range(3):
        given = cases(distributions(vocab)[name], seed)
        check(sample_tokens(*given), *given)


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (60, 1.0), (0, 0.8)])
def test_evenly_spread_numbers_sample_every_token_as_often_as_is_likely(top_k: int, top_p: float) -> None:
    """Of n numbers at equal distances a token takes n times its probability, to within one."""
    count, vocab = 2000, 300
    logits = 2 * torch.randn(vocab, generator=torch.Generator().manual_seed(3))
    points = [(each + 0.5) / count for each in range(count)]
    sampling = torch.tensor([columns((1.0, top_k, top_p, 0.0), point) for point in points])
    found = sample_tokens(logits.expand(count, -1), sampling, torch.zeros(count, vocab, dtype=torch.bool))
    ranked = logits.double().softmax(0).sort(descending=True)
    keep = torch.arange(vocab) < (top_k or vocab)
    of_top_k = ranked.values * keep / (ranked.values * keep).sum()
    keep &= of_top_k.cumsum(0) - of_top_k < top_p
    expected = torch.zeros(vocab, dtype=torch.float64).scatter(0, ranked.indices, of_top_k * keep)
    expected = count * expected / expected.sum()
    counted = torch.bincount(found, minlength=vocab)
    assert (counted - expected).abs().max() <= 1.01


def test_equal_logits_are_kept_in_order_of_id() -> None:
    logits = torch.zeros(1, 50).index_fill(1, torch.tensor([7, 20, 33, 41]), 1.0).expand(64, -1)
    points = np.linspace(0, 0.999, 64)
    sampling = torch.tensor([columns((1.0, 3, 1.0, 0.0), float(point)) for point in points]).float()
    found = sample_tokens(logits, sampling, torch.zeros(64, 50, dtype=torch.bool))
    assert set(found.tolist()) == {7, 20, 33}


def test_a_row_has_the_columns_that_are_documented() -> None:
    assert (20, len(columns((1.0, 0, 1.0, 0.0), 0.5))) == (MAX_BANNED, NUM_COLUMNS)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("name", distributions(8))
def test_the_kernels_sample_the_tokens_of_exact_arithmetic(name: str, tmp_path: Path) -> None:
    """In the interpreter: two chunks, the second one not full."""
    logits, sampling, seen = cases(distributions(2500)[name], 5)
    file = tmp_path / "given.safetensors"
    save_file({"logits": logits, "sampling": sampling, "seen": seen}, file)
    script = ROOT / "tests" / "support" / "interpreted_sampling.py"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT), *sys.path))}
    output = subprocess.run(
        [sys.executable, script, file], env=environment, check=True, capture_output=True, timeout=300
    ).stdout
    check(torch.tensor(json.loads(output)), logits, sampling, seen)
