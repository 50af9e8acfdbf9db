"""Check of every expert of a graph.

The few tokens of an example reach only a few experts. This check searches for tokens that together are routed to all
experts and that rounding does not reroute: random tokens, and tokens whose residual stream points along a row of the
router weights. In half precision one wrong expert among several can change an output by less than rounding error. The
check therefore fits a factor for the contribution of each expert to the outputs: it is near 1 under any rounding error,
and differs from 1 where weights, scales or kernel configs are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn

from mingc.artifacts.manifest import Parity
from mingc.artifacts.spec import Quantization
from mingc.errors import ParityError
from mingc.export.checks.eager_reference import EagerRanks, pad_like, run_eager
from mingc.export.checks.parity import check_parity, worst_error
from mingc.export.checks.routing import fixed_routing, select_experts
from mingc.export.stage import GraphDef
from mingc.numerics.perturbation import bfloat16_rounding_factors

_CANDIDATES = 2  # random tokens for each row of the router weights, and as many that point along the row
_TOKENS = 16  # tokens per expert, if as many are routed to it
_PERTURBATIONS = 32  # of a token within rounding error, none of which may reroute it
# An expert's factor may differ from 1 by this limit plus `_STANDARD_ERRORS` of its standard errors. INT4 shrinks most
# experts, the tiny thinker's by up to a twentieth.
_FACTOR_LIMIT = 0.02
_QUANTIZED_FACTOR_LIMITS: dict[Quantization, float] = {"fp8": 0.03, "int4": 0.1}
_STANDARD_ERRORS = 3.0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExpertTokens:
    """Tokens that cover the experts of a graph.

    Attributes:
        inputs: the graph's inputs for all tokens, on the device of the module; axis 0 of every tensor counts tokens.
        ids, weights: (N, K) the experts of each token, as the eager router selects them, on the CPU.
        tokens_per_call: a divisor of N.
        num_untested: experts that none of the tokens is routed to.
    """

    inputs: Mapping[str, Tensor]
    ids: Tensor
    weights: Tensor
    tokens_per_call: int
    num_untested: int

    def with_tokens_per_call(self, tokens_per_call: int) -> ExpertTokens:
        """The same tokens, repeated to fill whole calls."""
        count = len(self.ids)
        rows = torch.arange(-(-count // tokens_per_call) * tokens_per_call) % count
        return replace(
            self,
            inputs={name: value[rows.to(value.device)] for name, value in self.inputs.items()},
            ids=self.ids[rows],
            weights=self.weights[rows],
            tokens_per_call=tokens_per_call,
        )

    def calls(self) -> list[dict[str, Tensor]]:
        """The inputs of each call."""
        return [
            {name: value[first : first + self.tokens_per_call] for name, value in self.inputs.items()}
            for first in range(0, len(self.ids), self.tokens_per_call)
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Unquantized:
    """The float32 module over the checkpoint's weights, and the `format` that the graph's experts are stored in."""

    format: Quantization
    reference: EagerRanks


def find_expert_tokens(plan: GraphDef, module: nn.Module) -> ExpertTokens:
    """Select few tokens that cover all experts, greedily, by the eager `module` of any rank; one token per call."""
    device = _device(module)
    candidates = {name: value.to(device) for name, value in _candidates(plan, module).items()}
    ids, weights = (each.cpu() for each in select_experts(plan, module, candidates))
    num_experts = module.get_submodule("router").get_parameter("weight").shape[-2]
    is_routed = torch.zeros(len(ids), num_experts, dtype=torch.bool).scatter(1, ids, True)
    stable: set[int] = set()
    while True:
        cover = _cover(is_routed)
        unchecked = [each for each in cover if each not in stable]
        for token, is_stable in zip(
            unchecked, _are_stable(plan, module, candidates, ids, unchecked), strict=True
        ):
            if is_stable:
                stable.add(token)
            else:
                is_routed[token] = False
        if stable.issuperset(cover):
            break
    rows = torch.tensor(cover or [0])
    return ExpertTokens(
        inputs={name: value[rows.to(device)] for name, value in candidates.items()},
        ids=ids[rows],
        weights=weights[rows],
        tokens_per_call=1,
        num_untested=num_experts - int(is_routed[rows].any(0).sum()),
    )


def check_experts(
    tokens: ExpertTokens,
    compiled: Sequence[Mapping[str, Tensor]],
    reference: EagerRanks,
    eager: EagerRanks | None,
    unquantized: Unquantized | None,
    dtype: torch.dtype,
    where: str,
) -> Parity:
    """Compare an engine's outputs for `tokens` with the reference, as a whole and per expert.

    Args:
        compiled: combined outputs of all ranks by name, for each call.
        reference: the float32 modules over the stored weights.
        eager: the modules in `dtype`; None in float32, where the tolerance of the whole reveals any wrong expert.
        unquantized: None when the experts are not quantized.

    Raises: ParityError.
    """
    values = {name: torch.cat([each[name] for each in compiled]) for name in compiled[0]}
    inputs = {
        name: value.float() if value.is_floating_point() else value for name, value in tokens.inputs.items()
    }

    def run(ranks: EagerRanks) -> dict[str, Tensor]:
        outputs = ranks.with_inputs(inputs).on_device().run()  # may have more outputs than the engine
        return {name: pad_like(outputs[name], value) for name, value in values.items()}

    expected, eager_error = run(reference), 0.0
    if eager is not None:
        eager = eager.with_inputs(tokens.inputs).on_device()
        eager_error = worst_error(eager.run(), expected)
    parity = Parity(
        compiled=worst_error(values, expected), eager=eager_error, untested_experts=tokens.num_untested
    )
    check_parity(parity, dtype, where)
    if eager is not None:
        _check_factors(tokens, values, expected, eager, _FACTOR_LIMIT, where)
        if unquantized is not None:
            limit = _QUANTIZED_FACTOR_LIMITS[unquantized.format]
            _check_factors(
                tokens, expected, run(unquantized.reference), eager, limit, f"{where}, {unquantized.format}"
            )
    return parity


def _check_factors(
    tokens: ExpertTokens,
    values: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    eager: EagerRanks,
    limit: float,
    where: str,
) -> None:
    """Fit the contribution of each expert of each rank to the outputs that ranks all-reduce.

    Raises: ParityError with the expert whose factor is furthest from 1.
    """
    for spec in eager.plan.spec.outputs:
        if spec.ranks != "sum":
            continue
        place = _device(eager.modules[0])
        difference = values[spec.name].to(place).double() - expected[spec.name].to(place).double()
        for rank, module in enumerate(eager.modules):
            surplus, error = (each.cpu() for each in _fit(difference, spec.name, tokens, eager, module))
            excess = (surplus.abs() - _STANDARD_ERRORS * error).nan_to_num(nan=torch.inf)
            worst = int(excess.argmax())
            if excess[worst] > limit:
                allowed = limit + _STANDARD_ERRORS * float(error[worst])
                raise ParityError(
                    f"the contribution of expert {worst} of rank {rank} to {spec.name} is "
                    f"{1 + float(surplus[worst]):.3f} times that of the float32 reference, allowed 1 ± {allowed:.3f}",
                    where=where,
                    fix="report this with the output of mingc doctor: a weight, a scale or a kernel is wrong",
                )


def _fit(
    difference: Tensor, output: str, tokens: ExpertTokens, eager: EagerRanks, module: nn.Module
) -> tuple[Tensor, Tensor]:
    """Least-squares fit of the `difference` (N, D) of outputs from expected ones by each expert's contribution.

    Everything stays on the device of `difference`.

    Returns: the surplus of each expert's factor over 1 (E,) and its standard error (E,); both 0 for experts that no
    token is routed to.
    """
    place = difference.device
    ids, weights = tokens.ids.to(place), tokens.weights.to(place)

    def run(weights: Tensor) -> Tensor:
        with fixed_routing([module], (ids, weights)):
            return run_eager(eager.plan, module, eager.inputs)[output].double()

    shared = run(torch.zeros_like(weights))  # the shared expert's contribution
    projection, norm, noise, count = torch.zeros(4, int(ids.max()) + 1, dtype=torch.float64, device=place)
    columns = torch.arange(ids.shape[1], device=place)
    for column, expert in enumerate(ids.T):
        contribution = run(weights * (columns == column)) - shared
        projection.index_add_(0, expert, (difference * contribution).sum(-1))
        norm.index_add_(0, expert, contribution.square().sum(-1))
        noise.index_add_(0, expert, difference.square().mean(-1))
        count.index_add_(0, expert, torch.ones_like(expert, dtype=torch.float64))
    is_routed = norm > 0
    surplus = torch.where(is_routed, projection / norm, 0.0)
    return surplus, torch.where(is_routed, (noise / count / norm).sqrt(), 0.0)


def _candidates(plan: GraphDef, module: nn.Module) -> dict[str, Tensor]:
    """Inputs for many tokens; in the first half, the first floating-point input points along the router weights."""
    weight = module.get_submodule("router").get_parameter("weight").detach().float().cpu().flatten(0, -2)
    count = _CANDIDATES * len(weight)
    inputs = plan.example(dict.fromkeys(plan.check_dims, 2 * count), torch.Generator().manual_seed(2))
    rows = weight / weight.square().mean(-1, keepdim=True).sqrt().clamp_min(torch.finfo(torch.float32).tiny)
    stream = next(name for name, value in inputs.items() if value.is_floating_point())
    aligned = rows.repeat(_CANDIDATES, 1).to(inputs[stream].dtype)
    return {**inputs, stream: torch.cat([aligned, inputs[stream][count:]])}


def _cover(is_routed: Tensor) -> list[int]:
    """Greedy cover: rows of `is_routed` (N, E) that contain each column `_TOKENS` times, or as often as it occurs.

    In numpy, which starts no threads: beside other processes every parallel operation waits milliseconds for a core.
    """
    cover: list[int] = []
    columns = np.ascontiguousarray(is_routed.numpy().T).astype(np.int64)
    missing = columns.sum(1).clip(max=_TOKENS)
    gains = columns.sum(0)  # of each row: the columns it contains that are missing
    while missing.any():
        best = int(gains.argmax())
        cover.append(best)
        gains[best] = -columns.shape[0]  # below any other row's
        filled = (missing == 1) & (columns[:, best] == 1)
        missing = (missing - columns[:, best]).clip(min=0)
        gains -= columns[filled].sum(0)
    return cover


def _are_stable(
    plan: GraphDef, module: nn.Module, inputs: Mapping[str, Tensor], ids: Tensor, tokens: Sequence[int]
) -> list[bool]:
    """Whether each of the `tokens` keeps its experts under perturbations within rounding error."""
    if not tokens:
        return []
    rows = torch.tensor(tokens).repeat_interleave(_PERTURBATIONS)
    generator = torch.Generator().manual_seed(3)
    perturbed = {}
    for name, value in inputs.items():
        perturbed[name] = value[rows.to(value.device)]
        if value.is_floating_point():
            # The same perturbations for all tokens.
            factors = bfloat16_rounding_factors((_PERTURBATIONS, *value.shape[1:]), generator)
            factors = factors.to(value.device).repeat(len(tokens), *[1] * (value.dim() - 1))
            perturbed[name] = (perturbed[name].float() * factors).to(value.dtype)
    perturbed_ids = select_experts(plan, module, perturbed)[0].cpu().sort(-1).values
    is_stable = (perturbed_ids == ids[rows].sort(-1).values).all(-1).view(-1, _PERTURBATIONS).all(-1)
    return [bool(each) for each in is_stable]


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
