"""The parity rule of an export: what a compiled graph may differ by, and what refuses it."""

from __future__ import annotations

import pytest
import torch

from mingc.artifacts.manifest import Parity
from mingc.errors import ParityError
from mingc.export.checks import experts, parity, routing
from mingc.export.checks.parity import check_parity, max_error
from mingc.numerics.tolerances import GRAPH_TOLERANCES

FLOAT32, BFLOAT16 = torch.float32, torch.bfloat16


def test_the_limits_of_an_export_are_those_of_the_documentation() -> None:
    """docs/verification.md, "At export"; with wider ones a wrong engine passes."""
    assert GRAPH_TOLERANCES == {"float32": 1e-4, "bfloat16": 3e-2}
    assert (parity._EAGER_FACTOR, parity._MAX_EAGER_ERROR) == (2.0, 0.5)
    assert experts._FACTOR_LIMIT == 0.02
    assert experts._QUANTIZED_FACTOR_LIMITS == {"fp8": 0.03, "int4": 0.1}
    assert routing._MAX_REROUTED == 0.25


@pytest.mark.parametrize(
    ("dtype", "eager", "limit"),
    [
        (FLOAT32, 0.0, 1e-4),
        (FLOAT32, 4e-5, 1e-4),
        (BFLOAT16, 0.0, 3e-2),
        (BFLOAT16, 1e-2, 3e-2),
        (BFLOAT16, 2e-2, 4e-2),  # twice the error of the eager module
        (BFLOAT16, 0.1, 0.2),
    ],
)
def test_an_engine_may_be_off_by_the_tolerance_or_twice_the_eager_error(
    dtype: torch.dtype, eager: float, limit: float
) -> None:
    assert max_error(eager, dtype) == pytest.approx(limit)
    check_parity(Parity(compiled=0.99 * limit, eager=eager), dtype, "cfm.sample")
    with pytest.raises(ParityError, match="compiled outputs differ from the float32 reference") as caught:
        check_parity(Parity(compiled=1.01 * limit, eager=eager), dtype, "cfm.sample")
    assert caught.value.where == "cfm.sample"


@pytest.mark.parametrize("compiled", [float("nan"), float("inf")])
def test_an_engine_that_returns_no_numbers_is_refused(compiled: float) -> None:
    with pytest.raises(ParityError, match="compiled outputs differ"):
        check_parity(Parity(compiled=compiled, eager=0.0), FLOAT32, "")


@pytest.mark.parametrize(("eager", "is_refused"), [(0.49, False), (0.51, True), (float("nan"), True)])
def test_a_module_that_computes_something_else_than_its_reference_is_refused(
    eager: float, is_refused: bool
) -> None:
    if not is_refused:
        check_parity(Parity(compiled=0.1, eager=eager), BFLOAT16, "")
        return
    with pytest.raises(ParityError, match=r"eager torch\.bfloat16 outputs differ"):
        check_parity(Parity(compiled=0.1, eager=eager), BFLOAT16, "")
