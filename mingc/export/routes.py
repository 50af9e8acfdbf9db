"""Parity of graphs that route tokens to experts.

Two experts may score alike; then rounding decides between them, a token goes elsewhere than in float32, and what is
added to it differs by a whole expert though nothing is wrong. So a token of a narrow engine has two right results: that
of the float32 router, and that of the eager module's router in the engine's dtype, each computed in float32 from
there on. A wrong weight or kernel gives neither. How many tokens the two routers send to different experts is told
and limited.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from mingc.errors import ParityError
from mingc.export.stages.base import GraphPlan

# One token may always go elsewhere, of more no larger share. In bfloat16 one random token in forty does among the 256
# experts of the release.
_MAX_REROUTED = 0.25


class _GivenRoutes(nn.Module):
    """A router that has made up its mind: expert ids (T, K) int64 and weights (T, K) float32."""

    def __init__(self, ids: Tensor, weights: Tensor) -> None:
        super().__init__()
        self._routes = ids, weights

    def forward(self, *_: object) -> tuple[Tensor, Tensor]:
        return self._routes


def tell_routes(plan: GraphPlan, module: nn.Module, tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
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
            module.add_module("router", _GivenRoutes(*(each.cpu() for each in routes)))
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
