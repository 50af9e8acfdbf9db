"""Whether every expert of a graph gives what it should: the few tokens of an example reach few of the experts.

Tokens are looked for that together are sent to all experts and that no rounding sends elsewhere: random ones, and ones
whose stream leads along a row of the gates. In half precision a wrong expert among several changes an output by less
than roundings may. So what each one adds is fitted: the factor by which it is in the outputs is near 1, whatever
roundings do, and another one where weights, scales or tiles are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from mingc.artifacts.manifest import Parity
from mingc.errors import ParityError
from mingc.export.checks import parity
from mingc.export.checks.eager_reference import Ranks, run_eager, widened
from mingc.export.checks.routing import STEP, given_routes, tell_routes
from mingc.export.recipe import Quantization
from mingc.export.stage import GraphDef

_CANDIDATES = 2  # random tokens for each row of the gates, and as many that lead along it
_TOKENS = 16  # of every expert, if so many are sent to it
# Moves of a token, each number by up to a step of bfloat16, that must leave it with its experts.
_MOVES = 32
# How far the factor of an expert may be from 1, and how many of its standard errors further. INT4 makes most experts
# smaller; those of the tiny thinker by up to a twentieth.
_LIMIT = 0.02
_STORED_LIMITS: dict[Quantization, float] = {"fp8": 0.03, "int4": 0.1}
_ERRORS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertTokens:
    """Tokens that reach the experts of a graph.

    Attributes:
        inputs: the graph's inputs for all of them; axis 0 of every tensor counts tokens.
        ids, weights: (N, K) the experts of each token, as the eager module chooses.
        width: tokens of one call; N is a multiple.
        num_unreached: experts that no token that was found is sent to.
    """

    inputs: Mapping[str, Tensor]
    ids: Tensor
    weights: Tensor
    width: int
    num_unreached: int

    def in_calls_of(self, width: int) -> ExpertTokens:
        """The same tokens, repeated to fill calls of `width`."""
        count = len(self.ids)
        rows = torch.arange(-(-count // width) * width) % count
        return replace(
            self,
            inputs={name: value[rows] for name, value in self.inputs.items()},
            ids=self.ids[rows],
            weights=self.weights[rows],
            width=width,
        )

    def calls(self) -> list[dict[str, Tensor]]:
        """The inputs of one call after the other."""
        return [
            {name: value[first : first + self.width] for name, value in self.inputs.items()}
            for first in range(0, len(self.ids), self.width)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Quantized:
    """How the experts are stored, and the float32 module over the checkpoint's weights."""

    kind: Quantization
    exact: Ranks


def find_tokens(plan: GraphDef, module: nn.Module) -> ExpertTokens:
    """As few tokens as a greedy choice finds, by the eager `module` of any rank, in calls of one."""
    place = _place(module)
    candidates = {name: value.to(place) for name, value in _candidates(plan, module).items()}
    ids, weights = (each.cpu() for each in tell_routes(plan, module, candidates))
    num_experts = module.get_submodule("router").get_parameter("weight").shape[-2]
    is_sent = torch.zeros(len(ids), num_experts, dtype=torch.bool).scatter(1, ids, True)
    settled: set[int] = set()
    while True:
        chosen = _cover(is_sent)
        fresh = [each for each in chosen if each not in settled]
        for token, stays in zip(fresh, _stay(plan, module, candidates, ids, fresh), strict=True):
            if stays:
                settled.add(token)
            else:
                is_sent[token] = False
        if settled.issuperset(chosen):
            break
    rows = torch.tensor(chosen or [0])
    return ExpertTokens(
        inputs={name: value[rows.to(place)].cpu() for name, value in candidates.items()},
        ids=ids[rows],
        weights=weights[rows],
        width=1,
        num_unreached=num_experts - int(is_sent[rows].any(0).sum()),
    )


def check_experts(
    tokens: ExpertTokens,
    compiled: Sequence[Mapping[str, Tensor]],
    reference: Ranks,
    eager: Ranks | None,
    quantized: Quantized | None,
    dtype: torch.dtype,
    where: str,
) -> Parity:
    """Hold what an engine gives for `tokens` against the reference, as a whole and expert by expert.

    Args:
        compiled: outputs by name of each call, from all ranks together.
        reference: the float32 modules over the weights as they are stored.
        eager: the modules in `dtype`; None in float32, where any wrong expert is outside the bound of the whole.

    Raises: ParityError.
    """
    made = {name: torch.cat([each[name] for each in compiled]) for name in compiled[0]}
    wide = {
        name: value.float() if value.is_floating_point() else value for name, value in tokens.inputs.items()
    }

    def run(ranks: Ranks) -> dict[str, Tensor]:
        found = ranks.of(wide).run()  # may tell more than the engine
        return {name: widened(found[name], value) for name, value in made.items()}

    expected, lost = run(reference), 0.0
    if eager is not None:
        place = _place(eager.modules[0])
        eager = eager.of({name: value.to(place) for name, value in tokens.inputs.items()})
        lost = parity.worst_error(eager.run(), expected)
    told = Parity(compiled=parity.worst_error(made, expected), eager=lost, unreached=tokens.num_unreached)
    parity.check(told, dtype, where)
    if eager is not None:
        _check_factors(tokens, made, expected, eager, _LIMIT, where)
        if quantized is not None:
            limit = _STORED_LIMITS[quantized.kind]
            _check_factors(tokens, expected, run(quantized.exact), eager, limit, f"{where}, {quantized.kind}")
    return told


def _check_factors(
    tokens: ExpertTokens,
    made: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    eager: Ranks,
    limit: float,
    where: str,
) -> None:
    """Fit what each expert of each rank adds to the outputs that ranks sum up.

    Raises: ParityError with the expert that is furthest from 1.
    """
    for spec in eager.plan.spec.outputs:
        if spec.ranks != "sum":
            continue
        off = made[spec.name].cpu().double() - expected[spec.name].cpu().double()
        for rank, module in enumerate(eager.modules):
            surplus, error = _fit(off, spec.name, tokens, eager, module)
            beyond = (surplus.abs() - _ERRORS * error).nan_to_num(nan=torch.inf)
            worst = int(beyond.argmax())
            if beyond[worst] > limit:
                raise ParityError(
                    f"expert {worst} of rank {rank} is {1 + float(surplus[worst]):.3f} times in {spec.name} what it is "
                    f"in the float32 reference, allowed is 1 within {limit + _ERRORS * float(error[worst]):.3f}",
                    where=where,
                    fix="report this with the output of mingc doctor: a weight, a scale or a kernel is wrong",
                )


def _fit(
    off: Tensor, output: str, tokens: ExpertTokens, eager: Ranks, module: nn.Module
) -> tuple[Tensor, Tensor]:
    """By how much more (E,) of each expert than expected is in outputs that are `off` (N, D), and its standard error.

    Both are 0 for experts that no token is sent to.
    """
    ids, weights = tokens.ids, tokens.weights

    def add(weights: Tensor) -> Tensor:
        with given_routes([module], (ids, weights)):
            return run_eager(eager.plan, module, eager.inputs)[output].cpu().double()

    common = add(torch.zeros_like(weights))  # of the shared expert
    found, whole, noise, count = torch.zeros(4, int(ids.max()) + 1, dtype=torch.float64)
    for place, expert in enumerate(ids.T):
        part = add(weights * (torch.arange(ids.shape[1]) == place)) - common
        found.index_add_(0, expert, (off * part).sum(-1))
        whole.index_add_(0, expert, part.square().sum(-1))
        noise.index_add_(0, expert, off.square().mean(-1))
        count.index_add_(0, expert, torch.ones(len(expert), dtype=torch.float64))
    is_sent = whole > 0
    surplus = torch.where(is_sent, found / whole, 0.0)
    return surplus, torch.where(is_sent, (noise / count / whole).sqrt(), 0.0)


def _candidates(plan: GraphDef, module: nn.Module) -> dict[str, Tensor]:
    """Inputs of many tokens; the first half's first float input leads along the gates."""
    gates = module.get_submodule("router").get_parameter("weight").detach().float().cpu().flatten(0, -2)
    count = _CANDIDATES * len(gates)
    inputs = plan.example(dict.fromkeys(plan.check_dims, 2 * count), torch.Generator().manual_seed(2))
    rows = gates / gates.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    stream = next(name for name, value in inputs.items() if value.is_floating_point())
    led = rows.repeat(_CANDIDATES, 1).to(inputs[stream].dtype)
    return {**inputs, stream: torch.cat([led, inputs[stream][count:]])}


def _cover(is_sent: Tensor) -> list[int]:
    """Rows of `is_sent` (N, E) that have every column that any has, `_TOKENS` times where so many rows have it."""
    chosen: list[int] = []
    left, missing = is_sent.float(), is_sent.float().sum(0).clamp_max(_TOKENS)
    while missing.any():
        best = int((left @ (missing > 0).float()).argmax())
        chosen.append(best)
        missing = (missing - left[best]).clamp_min(0)
        left[best] = 0
    return chosen


def _stay(
    plan: GraphDef, module: nn.Module, inputs: Mapping[str, Tensor], ids: Tensor, chosen: Sequence[int]
) -> list[bool]:
    """Whether each of the `chosen` tokens has the same experts wherever roundings may move it."""
    if not chosen:
        return []
    rows = torch.tensor(chosen).repeat_interleave(_MOVES)
    generator = torch.Generator().manual_seed(3)
    moved = {}
    for name, value in inputs.items():
        moved[name] = value[rows.to(value.device)]
        if value.is_floating_point():
            # The same moves for all.
            moves = (2 * torch.rand(_MOVES, *value.shape[1:], generator=generator) - 1).to(value.device)
            scale = (1 + STEP * moves).repeat(len(chosen), *[1] * (value.dim() - 1))
            moved[name] = (moved[name].float() * scale).to(value.dtype)
    found = tell_routes(plan, module, moved)[0].cpu().sort(-1).values
    stays = (found == ids[rows].sort(-1).values).all(-1).view(-1, _MOVES).all(-1)
    return [bool(each) for each in stays]


def _place(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
