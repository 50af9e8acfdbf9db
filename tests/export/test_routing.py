"""Parity of routed graphs: rerouting by rounding error passes, every other difference fails."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from mingc.artifacts.spec import GraphSpec, TensorSpec
from mingc.errors import ParityError
from mingc.export.checks.eager_reference import EagerRanks
from mingc.export.checks.parity import worst_error
from mingc.export.checks.routing import (
    fixed_routing,
    match_perturbed_routing,
    nearest_rows,
    rerouted_share,
    select_experts,
)
from mingc.export.stage import GraphDef

TOKENS, HIDDEN, EXPERTS = 64, 32, 8
ALLOWED = 3e-2  # of a bfloat16 engine


class Gate(nn.Module):
    """A router that selects two of eight experts by their scores."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, HIDDEN))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = (x.float() @ self.weight.float().T).sigmoid()
        chosen = scores.topk(2, dim=-1)
        return chosen.indices, chosen.values / chosen.values.sum(-1, keepdim=True)


class Mixture(nn.Module):
    """A layer of linear experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = Gate()
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor]:
        return (self.routed(x)[0],)

    def routed(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ids, weights = self.router(x)
        outputs = torch.einsum("tkij,tj->tki", self.experts[ids].float(), x.float())
        return (outputs * weights.unsqueeze(-1)).sum(1).to(x.dtype), ids, weights


PLAN = GraphDef(
    spec=GraphSpec(
        name="experts",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("T", HIDDEN)),),
        outputs=(TensorSpec(name="y", dtype="float32", shape=("T", HIDDEN)),),
    ),
    method="forward",
    example=lambda dims, generator: {"x": torch.randn(dims["T"], HIDDEN, generator=generator)},
    trace_dims={"T": TOKENS},
    check_dims={"T": TOKENS},
    routing="routed",
)


@pytest.fixture
def layer() -> Mixture:
    """A layer whose first two experts have scores that differ by rounding error only, for every token."""
    torch.manual_seed(5)
    made = Mixture().requires_grad_(False)
    made.router.weight[1] = made.router.weight[0] * (1 + 1e-6)
    return made


def low_precision(layer: Mixture) -> Mixture:
    made = Mixture().requires_grad_(False)
    made.load_state_dict(layer.state_dict())
    return made.to(torch.bfloat16)


def error(layer: Mixture, engine: Mixture, eager: Mixture) -> float:
    """The error of a low-precision `engine` after routing is matched with the float32 `layer` and the `eager` one."""
    x = PLAN.example({"T": TOKENS}, torch.Generator().manual_seed(1))["x"].bfloat16().float()
    routing = select_experts(PLAN, eager, {"x": x.bfloat16()})
    reference = {"y": layer(x)[0]}
    with fixed_routing([layer], routing):
        eager_routed = {"y": layer(x)[0]}
    values = {"y": engine(x.bfloat16())[0]}
    return worst_error(values, nearest_rows(values, (reference, eager_routed)))


def test_rerouted_tokens_are_compared_with_the_experts_they_were_routed_to(layer: Mixture) -> None:
    bfloat16 = low_precision(layer)
    x = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1)).bfloat16()
    plain = worst_error({"y": bfloat16(x)[0]}, {"y": layer(x.float())[0]})
    assert plain > ALLOWED, "no token was rerouted: the case tests nothing"
    assert error(layer, bfloat16, bfloat16) < ALLOWED


def test_an_engine_may_route_like_float32_where_the_eager_module_does_not(layer: Mixture) -> None:
    class Float32Routed(Mixture):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (layer(x.float())[0].to(x.dtype),)

    assert error(layer, Float32Routed(), low_precision(layer)) < ALLOWED


@pytest.mark.parametrize(
    "fault", ["an expert", "one row of an expert", "the router", "the weights of experts"]
)
def test_a_fault_exceeds_the_tolerance(layer: Mixture, fault: str) -> None:
    engine = low_precision(layer)
    match fault:
        case "an expert":
            engine.experts[5] = engine.experts[6]
        case "one row of an expert":
            engine.experts[5, 3] = 0
        case "the router":
            engine.router.weight[4] *= 1.5
        case _:
            engine.router.weight *= 0.5
    assert error(layer, engine, low_precision(layer)) > ALLOWED


ROW = 7


@pytest.fixture
def tied() -> tuple[Mixture, Tensor]:
    """A layer and tokens. Token ROW has two candidates for its second expert, which one bfloat16 step decides."""
    torch.manual_seed(3)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()
    own = x[ROW].float() / x[ROW].float().square().sum()
    across = torch.randn(HIDDEN)
    across -= across @ x[ROW].float() * own
    layer = Mixture().requires_grad_(False)
    layer.router.weight *= 0.1
    layer.router.weight[5], layer.router.weight[2], layer.router.weight[3] = (
        3 * own,
        2 * own,
        2 * own + across,
    )
    layer.load_state_dict({name: value.bfloat16().float() for name, value in layer.state_dict().items()})
    return layer, x


@pytest.mark.parametrize("fault", [None, "an expert", "another expert"])
def test_a_token_may_be_rerouted_by_rounding_only(tied: tuple[Mixture, Tensor], fault: str | None) -> None:
    layer, x = tied
    bfloat16 = low_precision(layer)
    ids, weights = select_experts(PLAN, bfloat16, {"x": x})
    assert rerouted_share(ids, select_experts(PLAN, layer, {"x": x.float()})[0], "here") == 0
    assert ids[ROW, 0] == 5
    third = ids.clone()
    third[ROW, 1] = 0 if fault == "another expert" else 5 - ids[ROW, 1]
    with fixed_routing([layer], (third, weights)):
        values = {"y": layer(x.float())[0].clone()}
    if fault == "an expert":
        values["y"][ROW, 3] += 0.5 * values["y"].abs().max()
    reference = EagerRanks(PLAN, [layer], {"x": x.float()})
    expected = reference.run()
    assert worst_error(values, expected) > ALLOWED, (
        "no token differs from both routings: the case tests nothing"
    )
    matched, count = match_perturbed_routing(values, expected, ALLOWED, PLAN, (bfloat16, {"x": x}), reference)
    assert count == 1
    assert (worst_error(values, matched) < ALLOWED) == (fault is None)
    others = torch.arange(TOKENS) != ROW
    assert torch.equal(matched["y"][others], expected["y"][others])


def test_too_many_different_rows_are_not_matched(tied: tuple[Mixture, Tensor]) -> None:
    layer, x = tied
    reference = EagerRanks(PLAN, [layer], {"x": x.float()})
    expected = reference.run()
    values = {"y": expected["y"].roll(1, 0)}
    matched, count = match_perturbed_routing(
        values, expected, ALLOWED, PLAN, (low_precision(layer), {"x": x}), reference
    )
    assert count > TOKENS / 2
    assert torch.equal(matched["y"], expected["y"])


def test_the_router_is_restored_after_an_error(layer: Mixture) -> None:
    x = torch.randn(4, HIDDEN)
    before = layer(x)[0]
    ids, weights = torch.zeros(4, 2, dtype=torch.int64), torch.full((4, 2), 0.5)
    with pytest.raises(RuntimeError), fixed_routing([layer], (ids, weights)):
        torch.testing.assert_close(layer(x)[0], x @ layer.experts[0].T)
        raise RuntimeError
    assert torch.equal(layer(x)[0], before)


def test_the_share_of_rerouted_tokens_is_limited() -> None:
    ids = torch.tensor([[0, 1], [2, 3], [4, 5], [6, 7]])
    assert rerouted_share(ids, ids.flip(1), "here") == 0.0
    other = ids.clone()
    other[0, 0] = 7
    assert rerouted_share(ids, other, "here") == 0.25
    other[1, 0] = 7
    with pytest.raises(ParityError, match="50% of the tokens are routed to other experts"):
        rerouted_share(ids, other, "here")
    assert rerouted_share(ids[:1], other[:1], "here") == 1.0


def test_a_nan_row_matches_no_candidate() -> None:
    candidates = [{"y": torch.ones(2, 3)}, {"y": torch.zeros(2, 3)}]
    values = {"y": torch.tensor([[torch.nan] * 3, [0.1] * 3])}
    assert worst_error(values, nearest_rows(values, candidates)) == float("inf")


def test_routing_is_found_without_running_the_experts(layer: Mixture) -> None:
    """The experts of thousands of perturbed tokens took more memory than the layer."""
    x = PLAN.example({"T": TOKENS}, torch.Generator().manual_seed(1))["x"]
    _, *expected = layer.routed(x)
    router = layer.router
    del layer.experts
    for _ in range(2):
        for found, value in zip(select_experts(PLAN, layer, {"x": x}), expected, strict=True):
            assert torch.equal(found, value)
        assert layer.router is router


def test_routing_on_other_devices_runs_the_experts_for_one_token_only(layer: Mixture) -> None:
    """Kernels of the experts would be compiled for each number of perturbed tokens. A kernel for one has the router."""
    layer.to("meta")
    del layer.experts
    ids, weights = select_experts(PLAN, layer, {"x": torch.empty(2, HIDDEN, device="meta")})
    assert ids.shape == weights.shape == (2, 2)
    with pytest.raises(AttributeError, match="experts"):
        select_experts(PLAN, layer, {"x": torch.empty(1, HIDDEN, device="meta")})
