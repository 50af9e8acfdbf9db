"""Parity of graphs that route tokens to experts.

Two experts may have nearly equal scores. Rounding then decides between them, and a token's output differs by a whole
expert although nothing is wrong. A token of a low-precision engine therefore has several correct results, each computed
in float32 for a given routing:

1. with the experts that the float32 router selects;
2. with the experts that the eager module's router selects in the engine's dtype;
3. with experts that the router selects when its inputs are perturbed within rounding error. A compiled engine does not
round between some operations where the eager module does, so a few tokens differ from both 1 and 2.

A wrong weight, router or kernel matches none of them. The share of tokens with different experts is reported and
limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mingc.errors import ParityError
from mingc.export.checks.eager_reference import EagerRanks, pad_like
from mingc.export.stage import GraphDef
from mingc.numerics.perturbation import bfloat16_rounding_factors, row_errors

# One token may always be rerouted; of several, at most this share. In bfloat16 one random token in forty is rerouted
# among the 256 experts of the release.
_MAX_REROUTED = 0.25
_PERTURBATIONS = 256  # of each token that matches neither float32 nor eager routing


class _FixedRouter(nn.Module):
    """A router that returns given expert ids (T, K) int64 and weights (T, K) float32."""

    def __init__(self, ids: Tensor, weights: Tensor) -> None:
        super().__init__()
        self._routing = ids, weights

    def forward(self, *_: object) -> tuple[Tensor, Tensor]:
        return self._routing


class _Routed(Exception):
    """Raised to return a router's selection from inside the module that called it."""

    def __init__(self, routing: tuple[Tensor, Tensor]) -> None:
        self.routing = routing


class _LastRouter(nn.Module):
    """A router that ends the module's run after selecting."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self._router = router

    def forward(self, *arguments: object) -> None:
        raise _Routed(self._router(*arguments))


def select_experts(plan: GraphDef, module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Expert ids (T, K) int64 and weights (T, K) float32 that the router of the eager `module` selects.

    The experts do not run: at the released sizes, thousands of perturbed tokens would take minutes and more memory than
    the layer's weights, and Triton would compile the experts' kernels for each number of tokens. Only for one token on
    CUDA the whole graph runs, because a kernel for it contains the router.
    """
    assert plan.routing is not None, "the graph has no router"
    inputs = [tensors[each.name] for each in plan.spec.inputs]
    router = module.get_submodule("router")
    is_last = inputs[0].device.type == "cpu" or len(inputs[0]) > 1
    try:
        if is_last:
            module.add_module("router", _LastRouter(router))
        with torch.no_grad():
            *_, ids, weights = getattr(module, plan.routing)(*inputs)
    except _Routed as routed:
        ids, weights = routed.routing
    finally:
        module.add_module("router", router)
    return ids.to(torch.int64), weights


@contextmanager
def fixed_routing(modules: Sequence[nn.Module], routing: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Replace the routers of `modules` by the expert ids and weights of `routing` for the duration of the context."""
    routers = [module.get_submodule("router") for module in modules]
    try:
        for module in modules:
            device = next(module.parameters()).device
            module.add_module("router", _FixedRouter(*(each.to(device) for each in routing)))
        yield
    finally:
        for module, router in zip(modules, routers, strict=True):
            module.add_module("router", router)


def rerouted_share(ids: Tensor, reference_ids: Tensor, where: str) -> float:
    """The share of tokens whose set of experts differs from the reference.

    Raises: ParityError when the share is larger than rounding explains.
    """
    differs = (ids.cpu().sort(-1).values != reference_ids.cpu().sort(-1).values).any(-1)
    share = float(differs.double().mean())
    if int(differs.sum()) > 1 and share > _MAX_REROUTED:
        raise ParityError(
            f"{share:.0%} of the tokens are routed to other experts than in float32, allowed {_MAX_REROUTED:.0%}",
            where=where,
            fix="export this stage in float32, or report this with the output of mingc doctor",
        )
    return share


def nearest_rows(
    values: Mapping[str, Tensor], candidates: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    """For each token, all tensors of the candidate that is nearest to `values`.

    Axis 0 of every tensor counts tokens. Distances are relative to the largest value of each tensor, which gives all
    tensors the same weight.
    """
    first = candidates[0]
    distances = torch.stack([_distances(values, candidate) for candidate in candidates])
    best = distances.argmin(0)
    place = torch.arange(len(best))
    return {
        name: torch.stack([candidate[name].cpu() for candidate in candidates])[best, place] for name in first
    }


def _distances(values: Mapping[str, Tensor], references: Mapping[str, Tensor]) -> Tensor:
    """The largest relative difference of each token in any tensor, (T,) float64."""
    errors = []
    for name, reference in references.items():
        expected, value = reference.cpu().double(), values[name].cpu().double()
        scale = expected.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        errors.append(row_errors(value, expected, scale))
    return torch.stack(errors).amax(0)


def match_perturbed_routing(
    values: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    limit: float,
    plan: GraphDef,
    eager: tuple[nn.Module, Mapping[str, Tensor]],
    reference: EagerRanks,
) -> tuple[dict[str, Tensor], int]:
    """Replace rows of `expected` that differ from `values` by rows that rounding can produce, where these are nearer.

    For each row that differs by more than `limit`, the inputs are perturbed by at most one bfloat16 step. Each set of
    experts that the eager router then selects gives one candidate row, computed by the float32 modules from the
    unperturbed inputs.

    Args:
        values, expected: outputs by name; axis 0 of every tensor counts tokens.
        eager: the module in the engine's dtype and its inputs.

    Returns: the rows, and how many differed by more than `limit`. When these are too many to be rounding error, none is
    replaced.
    """
    off = (~(_distances(values, expected) <= limit)).nonzero().flatten().tolist()
    matched = {name: value.cpu().clone() for name, value in expected.items()}
    count = next(len(value) for value in matched.values())
    if len(off) > max(1, int(_MAX_REROUTED * count)):
        return matched, len(off)
    module, inputs = eager
    for row in off:
        routing = _distinct(*select_experts(plan, module, _perturbed(inputs, row)))
        copies = len(routing[0])
        with fixed_routing(reference.modules, routing):
            outputs = reference.with_inputs(_repeated(reference.inputs, row, copies)).run()
        value = {name: values[name][row : row + 1] for name in expected}
        candidates = [{name: each[row : row + 1] for name, each in matched.items()}]
        candidates += [
            {name: pad_like(outputs[name][i : i + 1], value[name]) for name in value} for i in range(copies)
        ]
        for name, nearest in nearest_rows(value, candidates).items():
            matched[name][row] = nearest[0]
    return matched, len(off)


def _repeated(inputs: Mapping[str, Tensor], row: int, count: int) -> dict[str, Tensor]:
    return {name: value[row].expand(count, *value.shape[1:]).clone() for name, value in inputs.items()}


def _perturbed(inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """Copies of the token at `row` with all floating-point inputs perturbed within rounding error."""
    generator = torch.Generator().manual_seed(row)
    perturbed = _repeated(inputs, row, _PERTURBATIONS)
    for name, value in perturbed.items():
        if value.is_floating_point():
            factors = bfloat16_rounding_factors(value.shape, generator).to(value.device)
            perturbed[name] = (value.float() * factors).to(value.dtype)
    return perturbed


def _distinct(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """One routing for each distinct set of experts."""
    sets = [tuple(sorted(each)) for each in ids.tolist()]
    kept = sorted({experts: index for index, experts in enumerate(sets)}.values())
    return ids[kept], weights[kept]
