"""The tolerance rule: how far a compiled graph may be from its float32 reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch

from mingc.artifacts.manifest import Parity
from mingc.errors import ParityError

# Relative to the largest magnitude of the reference. Below the floor an error is rounding; above it the compiled
# graph may be at most twice as far from the float32 reference as the eager module of the same dtype is.
_FLOORS = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
_FACTOR = 2.0
# Beyond this the eager module and the reference compute different things, and nothing can be told of the compiled one.
_MOST_EAGER = 0.5

Number = TypeVar("Number", int, float)


def relative_error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """max |value - reference| / max |reference|; infinite for NaN, inf, or another shape."""
    if value.shape != reference.shape:
        return float("inf")
    if reference.numel() == 0:
        return 0.0
    a, b = value.detach().cpu().double(), reference.detach().cpu().double()
    if not torch.isfinite(a).all():
        return float("inf")
    scale = float(b.abs().max())
    error = float((a - b).abs().max())
    return error / scale if scale > 0 else error


def worst_error(values: Mapping[str, torch.Tensor], references: Mapping[str, torch.Tensor]) -> float:
    """The largest relative error over all tensors of `references`."""
    return max(
        (relative_error(values[name], reference) for name, reference in references.items()), default=0.0
    )


def allowed(eager: float, dtype: torch.dtype) -> float:
    """How far a compiled graph may be from the reference where the eager module is `eager` off."""
    return max(_FLOORS[dtype], _FACTOR * eager)


def worse(first: Parity, second: Parity) -> Parity:
    """What is told of a graph two of whose engines were checked: the worse of each figure."""
    further = max(first, second, key=lambda each: each.compiled)
    return Parity(
        compiled=further.compiled,
        eager=further.eager,  # what the figure beside it was held against
        quantization=_larger(first.quantization, second.quantization),
        rerouted=_larger(first.rerouted, second.rerouted),
        unreached=_larger(first.unreached, second.unreached),
    )


def _larger(first: Number | None, second: Number | None) -> Number | None:
    return max((each for each in (first, second) if each is not None), default=None)


def check(parity: Parity, dtype: torch.dtype, where: str) -> None:
    """Raise ParityError when the compiled graph is further off than the rule allows."""
    limit = allowed(parity.eager, dtype)
    if not parity.eager <= _MOST_EAGER:
        raise ParityError(
            f"eager {dtype} is {parity.eager:.2e} off the float32 reference: no rounding does that",
            where=where,
            fix="report this with the output of mingc doctor: the reference is of something else",
        )
    if not parity.compiled <= limit:
        raise ParityError(
            f"compiled outputs are {parity.compiled:.2e} off the float32 reference, allowed {limit:.2e} "
            f"(eager {dtype} is {parity.eager:.2e} off)",
            where=where,
            fix="report this with the output of mingc doctor: the compiler changed the result",
        )
