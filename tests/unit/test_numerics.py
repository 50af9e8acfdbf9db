"""Error measure and perturbation that export checks and verification share."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from mingc.numerics.perturbation import add_relative_noise, bfloat16_rounding_factors, row_errors
from mingc.numerics.relative_error import relative_error
from mingc.numerics.tolerances import GRAPH_TOLERANCES, REFERENCE_TOLERANCES
from mingc.verify import comparison_log, scale


def test_relative_error_of_zeros_is_absolute() -> None:
    assert relative_error(np.array([0.5]), np.array([0.0])) == 0.5
    assert relative_error(np.zeros(0), np.zeros(0)) == 0.0


def test_relative_error_is_relative_to_the_largest_reference() -> None:
    assert relative_error(np.array([1.0, -3.5]), np.array([1.0, -4.0])) == pytest.approx(0.125)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_relative_error_of_wrong_values_is_infinite(wrong: float) -> None:
    assert relative_error(np.array([wrong, 1.0]), np.ones(2)) == float("inf")
    assert relative_error(np.ones(2), np.ones(3)) == float("inf")


def test_relative_error_of_tensors_equals_that_of_arrays() -> None:
    value, reference = torch.tensor([1.0, 2.5]).bfloat16(), torch.tensor([1.0, 2.0])
    assert relative_error(value, reference) == 0.25
    assert relative_error(torch.ones(2, requires_grad=True), np.ones(2)) == 0.0


def test_rounding_factors_stay_within_one_bfloat16_step() -> None:
    factors = bfloat16_rounding_factors((1000,), torch.Generator().manual_seed(0))
    assert 0.9 * 2**-8 < (factors - 1).abs().max() <= 2**-8


def test_noise_is_relative_to_each_row() -> None:
    rows = torch.stack([torch.ones(4096), 100 * torch.ones(4096)])
    noise = add_relative_noise(rows, 0.01, torch.Generator().manual_seed(0)) - rows
    torch.testing.assert_close(noise.std(-1), torch.tensor([0.01, 1.0]), rtol=0.1, atol=0)


def test_row_errors_are_infinite_for_nan() -> None:
    errors = row_errors(torch.tensor([[1.0, 2.0], [torch.nan, 0.0]]), torch.zeros(2, 2), 4.0)
    assert errors.tolist() == [0.5, float("inf")]


def test_tolerances_are_those_of_the_documentation() -> None:
    """docs/verification.md; a wider one would let a wrong engine pass."""
    assert GRAPH_TOLERANCES == {"float32": 1e-4, "bfloat16": 3e-2}
    assert REFERENCE_TOLERANCES == {"float32": 1e-4, "bfloat16": 1e-1}
    assert (scale._LIMIT, scale._ERRORS, comparison_log._LOOSE) == (0.01, 3.0, 1e-2)
