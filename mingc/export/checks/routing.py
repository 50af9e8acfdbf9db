"""Parity of graphs that route tokens to experts.

Two experts may score alike; then rounding decides between them, a token goes elsewhere than in float32, and what is
added to it differs by a whole expert though nothing is wrong. So a token of a narrow engine has two right results: that
of the float32 router, and that of the eager module's router in the engine's dtype, each computed in float32 from
there on. A compiled engine keeps between operations what the eager module rounds, so single tokens go a third way: of
those a result is right that some inputs moved by no more than roundings lead to. A wrong weight or kernel gives none
of them. How many tokens are sent to different experts is told and limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mingc.errors import ParityError
from mingc.export.checks.eager_reference import Ranks, widened
from mingc.export.stage import GraphDef

# One token may always go elsewhere, of more no larger share. In bfloat16 one random token in forty does among the 256
# experts of the release.
_MAX_REROUTED = 0.25
# Of a token that went a third way: so many inputs near its own are asked where they go, each number moved by at most
# one step of bfloat16.
_MOVES = 256
STEP = 2.0**-8


class _GivenRoutes(nn.Module):
    """A router that has made up its mind: expert ids (T, K) int64 and weights (T, K) float32."""

    def __init__(self, ids: Tensor, weights: Tensor) -> None:
        super().__init__()
        self._routes = ids, weights

    def forward(self, *_: object) -> tuple[Tensor, Tensor]:
        return self._routes


def tell_routes(plan: GraphDef, module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Expert ids (T, K) int64 and weights (T, K) float32 that the eager `module` chooses."""
    assert plan.routing is not None, "only graphs with routers are asked"
    with torch.no_grad():
        *_, ids, weights = getattr(module, plan.routing)(*[tensors[each.name] for each in plan.spec.inputs])
    return ids.to(torch.int64), weights


@contextmanager
def given_routes(modules: Sequence[nn.Module], routes: tuple[Tensor, Tensor]) -> Iterator[None]:
    """Inside, the routers of `modules` choose `routes`."""
    routers = [module.get_submodule("router") for module in modules]
    try:
        for module in modules:
            place = next(module.parameters()).device
            module.add_module("router", _GivenRoutes(*(each.to(place) for each in routes)))
        yield
    finally:
        for module, router in zip(modules, routers, strict=True):
            module.add_module("router", router)


def rerouted_share(ids: Tensor, reference_ids: Tensor, where: str) -> float:
    """The share of tokens that do not go to the same set of experts in both.

    Raises: ParityError when it is too large for roundings.
    """
    differs = (ids.cpu().sort(-1).values != reference_ids.cpu().sort(-1).values).any(-1)
    share = float(differs.double().mean())
    if int(differs.sum()) > 1 and share > _MAX_REROUTED:
        raise ParityError(
            f"{share:.0%} of the tokens go to other experts than in float32, allowed {_MAX_REROUTED:.0%}",
            where=where,
            fix="export this stage in float32, or report this with the output of mingc doctor",
        )
    return share


def nearer_rows(values: Mapping[str, Tensor], choices: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """For each token, all tensors of the one of `choices` that `values` is nearest to.

    Axis 0 of every tensor counts tokens. Distances are relative to a tensor's largest value, so that all count alike.
    """
    first = choices[0]
    distances = torch.stack([_distances(values, choice) for choice in choices])
    best = distances.nan_to_num(nan=torch.inf).argmin(0)
    place = torch.arange(len(best))
    return {name: torch.stack([choice[name].cpu() for choice in choices])[best, place] for name in first}


def _distances(values: Mapping[str, Tensor], choice: Mapping[str, Tensor]) -> Tensor:
    """The largest relative difference of each token in any tensor, (T,) float64."""
    rows = []
    for name, reference in choice.items():
        wide, value = reference.cpu().double(), values[name].cpu().double()
        scale = wide.abs().max().clamp_min(torch.finfo(torch.float64).tiny)
        rows.append((value - wide).abs().flatten(1).amax(-1) / scale)
    return torch.stack(rows).amax(0)


def follow_moved(
    values: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    limit: float,
    plan: GraphDef,
    eager: tuple[nn.Module, Mapping[str, Tensor]],
    reference: Ranks,
) -> tuple[dict[str, Tensor], int]:
    """`expected` with the rows that are more than `limit` off `values` replaced by nearer ones that roundings lead to.

    Such a row's inputs are moved by at most a step of bfloat16; each set of experts that are then chosen gives a row,
    by the float32 modules from the row's own inputs.

    Args:
        values, expected: outputs by name; axis 0 of every tensor counts tokens.
        eager: the module in the engine's dtype and its inputs.

    Returns: the rows, and how many were more than `limit` off. Those too many to be roundings are left as they are.
    """
    off = (~(_distances(values, expected) <= limit)).nonzero().flatten().tolist()
    followed = {name: value.cpu().clone() for name, value in expected.items()}
    count = next(len(value) for value in followed.values())
    if len(off) > max(1, int(_MAX_REROUTED * count)):
        return followed, len(off)
    module, inputs = eager
    for row in off:
        routes = _distinct(*tell_routes(plan, module, _moved(inputs, row)))
        copies = len(routes[0])
        with given_routes(reference.modules, routes):
            outputs = reference.of(_repeated(reference.inputs, row, copies)).run()
        own = {name: values[name][row : row + 1] for name in expected}
        choices = [{name: each[row : row + 1] for name, each in followed.items()}]
        choices += [
            {name: widened(outputs[name][i : i + 1], own[name]) for name in own} for i in range(copies)
        ]
        for name, nearest in nearer_rows(own, choices).items():
            followed[name][row] = nearest[0]
    return followed, len(off)


def _repeated(inputs: Mapping[str, Tensor], row: int, count: int) -> dict[str, Tensor]:
    return {name: value[row].expand(count, *value.shape[1:]).clone() for name, value in inputs.items()}


def _moved(inputs: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    """The token at `row` many times over, each time with all floating-point inputs moved a little."""
    generator = torch.Generator().manual_seed(row)
    moved = _repeated(inputs, row, _MOVES)
    for name, value in moved.items():
        if value.is_floating_point():
            share = (2 * torch.rand(value.shape, generator=generator) - 1) * STEP
            moved[name] = (value.float() * (1 + share.to(value.device))).to(value.dtype)
    return moved


def _distinct(ids: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Of routes to the same set of experts one each."""
    sets = [tuple(sorted(each)) for each in ids.tolist()]
    chosen = sorted({experts: index for index, experts in enumerate(sets)}.values())
    return ids[chosen], weights[chosen]
