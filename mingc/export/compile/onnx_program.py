"""A captured graph as an ONNX model: state as inputs and outputs, weights as inputs.

`torch.onnx` drops writes of a graph to its inputs, so the graph is made functional first and returns the new state
after its outputs. Weights are inputs as well: ONNX Runtime (1.32) copies every initializer that does not come from a
file in its own layout, even one passed in memory, and folds and packs others; an input it reads from the caller's
memory. A model therefore does not depend on particular weights, a rank or a layer.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec
from torch.utils import _pytree as pytree

from mingc.errors import CompileError, described

OPSET = 23
"""The first with the operator Attention, which scaled dot-product attention becomes."""

METADATA_KEY = "mingc"
"""Metadata key: tells the loader how many inputs are weights, and the place of each state."""

WEIGHT_PREFIX = "model."  # before the names of weights: the traced wrapper holds the module as `model`
_OWN = ("aten", "prim", "prims")  # namespaces of operators that torch.onnx knows
_WRITES = ("ScatterND", "ScatterElements")  # they keep every row of their first input that they do not write
# Experts of a mixture are gathered for every token, which AOTInductor fuses with the GEMM that reads them. ONNX Runtime
# writes them to memory first.
MAX_GATHERED_BYTES = 4 << 30
# The dtype of quantized weights: ONNX Runtime names dtypes as numpy does, and numpy lacks this one.
UNBOUND_DTYPE = torch.float8_e4m3fn


def to_onnx(program: torch.export.ExportedProgram, where: str) -> Any:
    """The `onnx.ModelProto` of `program`.

    The model takes the program's inputs in order, then its weights under their names; it returns the outputs, then
    the state that it writes. The metadata under `METADATA_KEY` is a JSON object: `weights`, the number of weights;
    `outputs`, the number of outputs before the state; `state`, for each written tensor the index of its input and
    whether the output may be the same memory.

    Raises: CompileError when the graph has an operator that ONNX lacks, writes to a tensor that is not state, or
    gathers more than ONNX Runtime can hold.
    """
    refuse_large_gathers(program, where)
    written, functional = to_functional(program, where)
    with _quiet():
        try:
            made = torch.onnx.export(
                functional,
                dynamo=True,
                opset_version=OPSET,
                optimize=False,
                verbose=False,
                custom_translation_table=_TRANSLATIONS,
            )
        except Exception as error:  # torch.onnx raises many kinds; all mean that there is no such model
            raise CompileError(
                f"torch.onnx cannot translate the graph: {_reason(error)}",
                where=where,
                fix="compile this stage with another backend: --backend aoti:STAGE",
            ) from error
        assert made is not None, "no file name was given"
        return _finish(made.model, written)


def to_functional(
    program: torch.export.ExportedProgram, where: str
) -> tuple[list[int], torch.export.ExportedProgram]:
    """Indices of the inputs that `program` writes, and a program that returns their new values after its outputs."""
    functional = program.run_decompositions({})
    signature = functional.graph_signature
    inputs = [each.arg.name for each in signature.input_specs if each.kind is InputKind.USER_INPUT]
    specs, (output,) = signature.output_specs, functional.graph.find_nodes(op="output")
    values = list(output.args[0])
    state = [index for index, each in enumerate(specs) if each.kind is OutputKind.USER_INPUT_MUTATION]
    results = [index for index, each in enumerate(specs) if each.kind is OutputKind.USER_OUTPUT]
    if len(state) + len(results) < len(specs):
        others = [str(each.target) for index, each in enumerate(specs) if index not in (*state, *results)]
        raise CompileError(
            f"the graph writes {', '.join(others)} of its module, which an engine cannot keep",
            where=where,
            fix="make it state of the graph, or compile this stage with another backend: --backend aoti:STAGE",
        )
    written = [inputs.index(str(specs[index].target)) for index in state]
    order = [*results, *state]
    output.args = (tuple(values[index] for index in order),)
    specs[:] = [OutputSpec(OutputKind.USER_OUTPUT, specs[index].arg, None) for index in order]
    call = functional.module_call_graph[0].signature
    assert call is not None, "the root of an exported program has a signature"
    call.out_spec = pytree.tree_structure(tuple(range(len(order))))
    functional.graph_module.recompile()
    return written, functional


def _operators() -> Any:  # its types know no symbolic values
    from onnxscript import opset23

    return opset23


def _linear(x: Any, weight: Any, bias: Any = None) -> Any:
    """`aten.linear` as Gemm, which reads the weight in its stored layout; MatMul would need a transposed copy."""
    op = _operators()
    operands = (x, weight) if bias is None else (x, weight, bias)
    if len(x.shape) == 2:
        return op.Gemm(*operands, transB=1)
    width, columns = weight.shape
    rows = op.Reshape(x, op.Constant(value_ints=[-1, int(columns)]))
    out = op.Gemm(rows, *operands[1:], transB=1)
    leading = op.Shape(x, start=0, end=len(x.shape) - 1)
    return op.Reshape(out, op.Concat(leading, op.Constant(value_ints=[int(width)]), axis=0))


def _attention(
    query: Any,
    key: Any,
    value: Any,
    mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`aten.scaled_dot_product_attention` as Attention, whose mask must have a row for each query."""
    op = _operators()
    if mask is not None and mask.shape[-2] == 1 and query.shape[-2] != 1:
        one = op.Constant(value_ints=[1])
        rows = op.Shape(query, start=len(query.shape) - 2, end=len(query.shape) - 1)
        mask = op.Expand(mask, op.Concat(*([one] * (len(mask.shape) - 2)), rows, one, axis=0))
    attributes = {} if scale is None else {"scale": scale}
    attended, *_ = op.Attention(query, key, value, mask, is_causal=int(is_causal), **attributes)
    return attended


def _remainder(x: Any, divisor: Any) -> Any:
    """`aten.remainder`, which has the sign of the divisor, by a number that may be a size."""
    from onnxscript import ir

    op = _operators()
    if isinstance(divisor, (int, float)):
        divisor = op.CastLike(op.Constant(value_float=float(divisor)), x)
    else:
        divisor = op.CastLike(divisor, x)
    if x.dtype in (ir.DataType.INT64, ir.DataType.INT32):
        return op.Mod(x, divisor)
    return op.Sub(x, op.Mul(op.Floor(op.Div(x, divisor)), divisor))


_TRANSLATIONS: dict[Any, Any] = {
    torch.ops.aten.linear.default: _linear,
    torch.ops.aten.scaled_dot_product_attention.default: _attention,
    torch.ops.aten.remainder.Scalar: _remainder,
}


def translates(operator: torch._ops.OpOverload) -> bool:
    """Whether an operator may be translated: torch refuses its own by name; others need a translation here."""
    return operator.namespace in _OWN or operator in _TRANSLATIONS


def _finish(model: Any, written: Sequence[int]) -> Any:
    """The proto of `model`, simplified, with metadata. `written` are the indices of state inputs."""
    from onnxscript import optimizer
    from onnxscript.ir import serde

    graph = model.graph
    weights = {name: value for name, value in graph.initializers.items() if name.startswith(WEIGHT_PREFIX)}
    for name, value in weights.items():
        del graph.initializers[name]
        value.const_value = None
        graph.inputs.append(value)
    # Weights became inputs before, so that none is folded into the model.
    optimizer.optimize(model, num_iterations=2)
    for value in weights.values():
        if not value.uses():
            graph.inputs.remove(value)
    weights = {name: value for name, value in weights.items() if value.uses()}
    outputs = len(graph.outputs) - len(written)
    document = {
        "weights": len(weights),
        "outputs": outputs,
        "state": [
            [index, _may_share(graph.inputs[index], graph.outputs[outputs + place])]
            for place, index in enumerate(written)
        ],
    }
    # Stack traces, which name files of this checkout.
    for node in graph.all_nodes():
        node.metadata_props.clear()
        node.doc_string = None
    for value in (*graph.inputs, *graph.outputs, *graph.initializers.values()):
        value.metadata_props.clear()
    model.metadata_props.clear()
    model.metadata_props[METADATA_KEY] = json.dumps(document, sort_keys=True)
    return serde.serialize_model(model)


def _may_share(before: Any, after: Any) -> bool:
    """Whether state `before` and its new value `after` may be the same memory.

    They may when one node writes rows of it and no other node, which could run later, reads its old values.
    """
    readers = [node for node, _ in before.uses() if node.op_type != "Shape"]
    if len(readers) != 1 or before.is_graph_output():
        return False
    (node,) = readers
    return (
        node.op_type in _WRITES
        and node.inputs[0] is before
        and all(each is not before for each in node.inputs[1:])
        and node.outputs[0] is after
    )


def refuse_quantized(module: nn.Module, where: str, fix: str) -> None:
    """Raises: CompileError when weights of `module` are stored in FP8, which only engines of AOTInductor read."""
    if any(each.dtype == UNBOUND_DTYPE for each in (*module.parameters(), *module.buffers())):
        raise CompileError(
            f"weights are stored as {UNBOUND_DTYPE}, which only engines of AOTInductor read",
            where=where,
            fix=fix,
        )


def refuse_large_gathers(program: torch.export.ExportedProgram, where: str) -> None:
    """Raises: CompileError when `program` gathers more than `MAX_GATHERED_BYTES` of weights at its largest sizes."""
    for node in program.graph.nodes:
        if node.op != "call_function" or node.target is not torch.ops.aten.index.Tensor:
            continue
        value, source = node.meta["val"], node.args[0]
        # Weights have fixed sizes; state has as many rows as a server asks for.
        if source.op != "placeholder" or not all(isinstance(size, int) for size in source.meta["val"].shape):
            continue
        sizes = [size_bounds(size)[1] for size in value.shape]
        size = torch.Size(sizes).numel() * value.element_size()
        if size > MAX_GATHERED_BYTES:
            raise CompileError(
                f"the graph gathers {size >> 30} GiB of weights, {sizes} {value.dtype}, at its largest sizes; ONNX "
                f"Runtime would write them to memory in every call (limit {MAX_GATHERED_BYTES >> 30} GiB)",
                where=where,
                fix="compile this stage with AOTInductor, which reads them in place: --backend aoti:STAGE, or export "
                "with a smaller --prefill-chunk-size",
            )


def size_bounds(size: int | torch.SymInt) -> tuple[int, int]:
    """The smallest and the largest value of a size in a traced graph."""
    if isinstance(size, int):
        return size, size
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    return int(bounds.lower), int(bounds.upper)


def _reason(error: BaseException) -> str:
    """The innermost message of a torch.onnx error, whose own text is a page of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return described(error)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch.onnx, which warns about every operator domain that is not installed."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir")]
    levels = [each.level for each in loggers]
    for each in loggers:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(loggers, levels, strict=True):
            each.setLevel(level)
