"""The parity rule: the largest error of a compiled graph against its float32 reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from mingc.artifacts.manifest import Parity
from mingc.dtypes import dtype_name
from mingc.errors import ParityError
from mingc.numerics.relative_error import relative_error
from mingc.numerics.tolerances import GRAPH_TOLERANCES

# An error below the tolerance is rounding error. Above it, the compiled graph's error may be at most this many times
# that of the eager module of the same dtype.
_EAGER_FACTOR = 2.0
# With a larger eager error, module and reference compute different functions and the compiled error means nothing.
_MAX_EAGER_ERROR = 0.5

Number = TypeVar("Number", int, float)


def worst_error(values: Mapping[str, torch.Tensor], references: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error of any tensor of `references`."""
    return max(
        (relative_error(values[name], reference) for name, reference in references.items()), default=0.0
    )


def max_error(eager: float, dtype: torch.dtype) -> float:
    """The relative error that a compiled graph may have when the eager module's error is `eager`."""
    return max(GRAPH_TOLERANCES[dtype_name(dtype)], _EAGER_FACTOR * eager)


def worst_parity(first: Parity, second: Parity) -> Parity:
    """Combine the records of two checked engines of a graph: the worse value of each figure."""
    further = max(first, second, key=lambda each: each.compiled)
    return Parity(
        compiled=further.compiled,
        eager=further.eager,  # the error that limited this `compiled`
        quantization=_larger(first.quantization, second.quantization),
        rerouted=_larger(first.rerouted, second.rerouted),
        untested_experts=_larger(first.untested_experts, second.untested_experts),
    )


def _larger(first: Number | None, second: Number | None) -> Number | None:
    return max((each for each in (first, second) if each is not None), default=None)


def check_parity(parity: Parity, dtype: torch.dtype, where: str) -> None:
    """Raise ParityError when the error of the compiled graph exceeds its limit."""
    limit = max_error(parity.eager, dtype)
    if not parity.eager <= _MAX_EAGER_ERROR:
        raise ParityError(
            f"eager {dtype} outputs differ from the float32 reference by {parity.eager:.2e}, more than by rounding",
            where=where,
            fix="report this with the output of mingc doctor: module and reference compute different functions",
        )
    if not parity.compiled <= limit:
        raise ParityError(
            f"compiled outputs differ from the float32 reference by {parity.compiled:.2e}, allowed {limit:.2e} "
            f"(eager {dtype}: {parity.eager:.2e})",
            where=where,
            fix="report this with the output of mingc doctor: the compiler changed the result",
        )
