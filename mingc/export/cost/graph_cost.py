"""Cost model of a traced graph: the least FLOPs, and bytes of weights and state, of one call.

Nothing is run: counts follow from the traced shapes, so a graph with dynamic dims is counted once and evaluated at
every size. FLOPs include GEMMs, convolutions, attention and sums of products (a multiply-add is two operations). Every
weight is counted once, and each further read as reuse. Elementwise operations, norms, Fourier transforms and
intermediate tensors are not counted. Masked positions count where the code computes them, not where a kernel skips
them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import sympy
import torch
from torch.fx import Node

from mingc.artifacts.manifest import EngineCost
from mingc.artifacts.spec import GraphSpec
from mingc.export.cost.kernel_cost import CONTEXT, KERNELS, KernelCost, Size

_GEMMS = {"mm", "bmm", "matmul", "_scaled_mm"}  # operands 0 and 1
_BIASED_GEMMS = {"addmm", "baddbmm", "_addmm_activation"}  # operands 1 and 2
_CONVOLUTIONS = {"conv1d", "conv2d", "conv3d"}
_TRANSPOSED_CONVOLUTIONS = {"conv_transpose1d", "conv_transpose2d"}
_GATHERS = {"embedding", "index", "index_select", "select"}
_WRITES = {"index_put_", "index_copy_"}


def count_cost(
    program: torch.export.ExportedProgram,
    spec: GraphSpec,
    static_shapes: Mapping[str, int] | None,
    typical_dims: Mapping[str, int] = MappingProxyType({}),
) -> tuple[EngineCost, ...]:
    """Cost of one call, at the sizes `static_shapes` of a static engine or at every combination of buckets.

    Dims without buckets have their size of `typical_dims`. Those without one, sizes of pools, have their minimum: no
    count may depend on them.
    """
    tally = _tally(program, spec)
    sums = {
        name: sum(terms, start=sympy.Integer(0))
        for name, terms in (
            ("flops", tally.flops),
            ("weight_bytes", tally.weights),
            ("reuse_bytes", tally.reuse),
            ("state_bytes", tally.state),
        )
    }
    return tuple(
        _evaluate(sums, tally.uncounted, sizes, _symbols(program, spec, sizes))
        for sizes in (
            [dict(static_shapes)]
            if static_shapes is not None
            else [{**typical_dims, **each} for each in spec.bucket_sizes()]
        )
    )


@dataclass(slots=True)
class _Tally:
    """Terms of each sum, and operations without a cost rule."""

    flops: list[Size] = field(default_factory=list)
    weights: list[Size] = field(default_factory=list)
    reuse: list[Size] = field(default_factory=list)
    state: list[Size] = field(default_factory=list)
    uncounted: set[str] = field(default_factory=set)


def _tally(program: torch.export.ExportedProgram, spec: GraphSpec) -> _Tally:
    tally = _Tally()
    signature = program.graph_signature
    constants = {*signature.inputs_to_parameters, *signature.inputs_to_buffers}
    names = list(signature.user_inputs)
    first, end = len(spec.inputs), len(spec.inputs) + len(spec.state)
    state = {*names[first:end]}
    constants |= {*names[end:]}  # weights passed to each call
    for node in program.graph.nodes:
        if node.op == "placeholder" and node.name in constants:
            _add_weight(tally, node)
        elif node.op == "placeholder" and node.name in state:
            _add_state(tally, node)
        elif node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            _add_flops(tally, node)
    return tally


def _add_flops(tally: _Tally, node: Node) -> None:
    space, name = _name(node)
    if space == "mingc":
        cost = _kernel_cost(node)
        if cost is None:
            tally.uncounted.add(f"mingc::{name}")
            return
        tally.flops.append(cost.flops)
        tally.state.append(cost.state_elements * _state_item_bytes(node))
    elif name in _GEMMS or name == "linear":
        tally.flops.append(2 * _numel(node) * _shape(node.args[0])[-1])
    elif name in _BIASED_GEMMS:
        tally.flops.append(2 * _numel(node) * _shape(node.args[1])[-1])
    elif name in _CONVOLUTIONS:
        weight = _shape(node.args[1])
        tally.flops.append(2 * _numel(node) * math.prod(weight[1:]))
    elif name in _TRANSPOSED_CONVOLUTIONS:
        weight = _shape(node.args[1])
        tally.flops.append(2 * _numel(node.args[0]) * math.prod(weight[1:]))
    elif name == "scaled_dot_product_attention":
        q, k, v = (_shape(each) for each in node.args[:3])
        tally.flops.append(2 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1]))
    elif name == "sum" and isinstance(node.args[0], Node) and _name(node.args[0])[1] == "mul":
        tally.flops.append(2 * _numel(node.args[0]))


def _kernel_cost(node: Node) -> KernelCost | None:
    """The cost of a custom kernel; None if it has no rule."""
    rule = KERNELS.get(_name(node)[1])
    arguments = _arguments(node)
    return (
        None if rule is None else rule({name: _shape(value) for name, value in arguments.items()}, arguments)
    )


def _arguments(node: Node) -> dict[str, Any]:
    """Arguments of an operator's call by name."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = (each.name for each in node.target._schema.arguments)
    return {**dict(zip(names, node.args, strict=False)), **node.kwargs}


def _add_weight(tally: _Tally, weight: Node) -> None:
    """Count a weight once: whole, or the rows that are gathered from it, but at most the whole.

    Further whole reads count as reuse: ten steps of a sampler read their weights ten times.
    """
    whole = _num_bytes(weight)
    reads = [_read_bytes(user, weight, whole) for user in weight.users]
    once = sympy.Min(whole, sum((each for each, _ in reads), start=sympy.Integer(0)))
    tally.weights.append(once)
    again = sum((each for each, is_table in reads if not is_table), start=sympy.Integer(0))
    tally.reuse.append(sympy.Max(0, again - once))


def _read_bytes(user: Node, weight: Node, whole: Size) -> tuple[Size, bool]:
    """Bytes of `weight` that one of its users reads, and whether it gathers rows of a table."""
    space, name = _name(user)
    if name in _GATHERS:
        return _num_bytes(user), True
    cost = _kernel_cost(user) if space == "mingc" else None
    if cost is not None:
        for key, value in _arguments(user).items():
            members = value if isinstance(value, (list, tuple)) else (value,)
            if any(each is weight for each in members) and key in cost.weight_shares:
                return whole * cost.weight_shares[key], False
    return whole, False


def _add_state(tally: _Tally, state: Node) -> None:
    for user in state.users:
        space, name = _name(user)
        if name in _GATHERS:
            tally.state.append(_num_bytes(user))
        elif name in _WRITES:
            tally.state.append(_num_bytes(user.args[-1]))
            _add_state(tally, user)  # later reads are traced as reads of the write's result
        elif space == "aten":
            tally.uncounted.add(f"state through {name}")


def _state_item_bytes(node: Node) -> int:
    """Bytes per element of a kernel's state; pools and queries have the same dtype."""
    value = next(each for each in node.args if isinstance(each, Node))
    size: int = value.meta["val"].dtype.itemsize
    return size


def _name(node: Node) -> tuple[str, str]:
    """Namespace and name: `aten.linear.default` → aten, linear."""
    if isinstance(node.target, torch._ops.OpOverload):
        space, _, name = node.target._schema.name.partition("::")
        return space, name
    return "", str(node.target)


def _shape(value: object) -> tuple[Size, ...]:
    """The traced shape of an argument, or shapes of the members of a list; empty if it is not a tensor."""
    if isinstance(value, (list, tuple)):
        return tuple(_shape(each) for each in value)
    traced: Any = value.meta.get("val") if isinstance(value, Node) else None
    if not isinstance(traced, torch.Tensor):
        return ()
    return tuple(_size(each) for each in traced.shape)


def _size(value: int | torch.SymInt) -> Size:
    if isinstance(value, torch.SymInt):
        expression: Size = value.node.expr
        return expression
    return sympy.Integer(value)


def _numel(value: object) -> Size:
    return sympy.Integer(1) * math.prod(_shape(value))


def _num_bytes(value: object) -> Size:
    assert isinstance(value, Node)
    return _numel(value) * value.meta["val"].dtype.itemsize


def _symbols(
    program: torch.export.ExportedProgram, spec: GraphSpec, sizes: Mapping[str, int]
) -> dict[Size, int]:
    """Values of the trace's symbols at `sizes` of the dims."""
    least = {dim.name: dim.minimum for dim in spec.dims}
    places = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    found: dict[Size, int] = {}
    tensors = (*spec.inputs, *spec.state)
    given = program.graph_signature.user_inputs[: len(tensors)]
    for name, tensor in zip(given, tensors, strict=True):
        for traced, size in zip(_shape(places[str(name)]), tensor.shape, strict=True):
            if isinstance(size, str) and traced.free_symbols:
                factor, symbol = traced.as_coeff_Mul()  # a dim with multiple 16 is traced as 16*s
                found[symbol] = sizes.get(size, least[size]) // int(factor)
    return found


def _evaluate(
    sums: Mapping[str, Size], uncounted: Iterable[str], sizes: dict[str, int], symbols: Mapping[Size, int]
) -> EngineCost:
    """Evaluate the sums, which are linear in the context."""
    at: list[dict[str, int]] = []
    for context in (0, 1):
        values = {**symbols, CONTEXT: context}
        at.append({name: int(each.subs(values)) for name, each in sums.items()})
    return EngineCost(
        dims=sizes,
        flops=at[0]["flops"],
        context_flops=at[1]["flops"] - at[0]["flops"],
        weight_bytes=at[0]["weight_bytes"],
        reuse_bytes=at[0]["reuse_bytes"],
        state_bytes=at[0]["state_bytes"],
        context_bytes=at[1]["state_bytes"] - at[0]["state_bytes"],
        uncounted=tuple(sorted(uncounted)),
    )
