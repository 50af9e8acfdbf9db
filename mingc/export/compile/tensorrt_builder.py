"""The TensorRT plan of an exported program: torch-tensorrt lowers and converts it, TensorRT's builder builds it.

`convert_exported_program_to_serialized_trt_engine` would do all of it, but it logs the reason of a failure instead of
raising it, and does not set the flag that stream capture needs; so the network is taken from its interpreter.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from mingc.artifacts.target import Capability, sm_name
from mingc.host.tensorrt_library import RTX, import_library


def build_plan(
    program: torch.export.ExportedProgram,
    inputs: Sequence[str],
    library: str,
    cards: Sequence[Capability] | None,
) -> bytes:
    """The serialized plan of `program`, which is changed.

    Args:
        inputs: names for the inputs of the plan.
        cards: what the plan is for; None: the GPU of this machine.

    Raises: whatever torch-tensorrt raises, with TensorRT's errors as notes.
    """
    trt, log = import_library(library), io.StringIO()
    if library == RTX:
        sys.modules["tensorrt_rtx"] = trt  # what torch-tensorrt imports
    handler = logging.StreamHandler(log)  # for TensorRT's errors; without it, import warnings go to stderr
    handler.setLevel(logging.ERROR)
    logging.getLogger().addHandler(handler)
    try:
        with _driver_of(cards):
            interpreter = _convert(trt, program)
        network, builder = interpreter.ctx.net, interpreter.builder
        found = (network.num_inputs, network.num_outputs)
        wanted = (len(inputs), len(program.graph_signature.output_specs))
        if found != wanted:  # two outputs that are one tensor
            raise ValueError(f"(inputs, outputs) became {found} of {wanted}")
        for index, name in enumerate(inputs):
            network.get_input(index).name = name
        config = builder.create_builder_config()
        config.clear_flag(trt.BuilderFlag.TF32)  # 1.4 seems to ignore it: see docs/backends.md
        if library == RTX:
            # It allows stream capture only of engines that allocate nothing.
            config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
            names = ["CURRENT"] if cards is None else [sm_name(each).upper() for each in cards]
            config.num_compute_capabilities = len(names)
            for index, name in enumerate(names):
                config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
        plan = builder.build_serialized_network(network, config)
        if plan is None:
            raise ValueError("the builder returns no plan")
        return bytes(plan)
    except Exception as error:
        for line in dict.fromkeys(log.getvalue().splitlines()):
            error.add_note(line[:600])
        raise
    finally:
        logging.getLogger().removeHandler(handler)


@contextmanager
def _driver_of(cards: Sequence[Capability] | None) -> Iterator[None]:
    """Answers for a card that is not here what torch-tensorrt (2.11 to 2.13) asks the driver when it is imported."""
    if cards is None:
        yield
        return
    major, minor = min(cards)
    properties = SimpleNamespace(name="", major=major, minor=minor, total_memory=1 << 34)
    with patch.multiple(
        torch.cuda,
        get_device_capability=lambda *_: (major, minor),
        get_device_properties=lambda *_: properties,
        current_device=lambda: 0,
    ):
        yield


def _convert(trt: Any, program: torch.export.ExportedProgram) -> Any:
    """torch-tensorrt's interpreter with the network of `program`."""
    import torch_tensorrt
    from torch_tensorrt import dtype as dtypes
    from torch_tensorrt.dynamo import CompilationSettings
    from torch_tensorrt.dynamo.conversion import TRTInterpreter, dynamo_tensorrt_converter
    from torch_tensorrt.dynamo.conversion.converter_utils import get_trt_tensor
    from torch_tensorrt.dynamo.conversion.impl.condition import ops as condition
    from torch_tensorrt.dynamo.lowering import get_decompositions, post_lowering, pre_export_lowering

    class Interpreter(TRTInterpreter):  # type: ignore[misc]
        """Refuses a converter whose result has another dtype or shape than torch's."""

        def run_node(self, n: torch.fx.Node) -> Any:
            made, wanted = super().run_node(n), n.meta.get("val")
            if isinstance(wanted, Tensor) and hasattr(made, "dtype") and hasattr(made, "shape"):
                found = dtypes._from(made.dtype).to(torch.dtype), tuple(made.shape)
                if found != (wanted.dtype, tuple(wanted.shape)):
                    raise ValueError(f"{n.target} became {found} of {wanted.dtype, tuple(wanted.shape)}")
            return made

    @dynamo_tensorrt_converter(torch.ops.mingc_tensorrt.attention.default)  # type: ignore[untyped-decorator]
    def convert_attention(ctx: Any, target: Any, args: Any, kwargs: Any, name: str) -> Any:
        *operands, mask, is_causal = args
        layer = ctx.net.add_attention(*operands, trt.AttentionNormalizationOp.SOFTMAX, is_causal)
        layer.decomposable = True  # it has kernels for half precision and usual head sizes only
        if mask is not None:
            layer.mask = get_trt_tensor(ctx, mask, f"{name}_mask")
        return layer.get_output(0)

    for node in program.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # what replaces attention has other strides
            node.target = torch.ops.aten.reshape.default
    add_in_float32(program)
    settings = CompilationSettings(disable_tf32=True, attn_bias_is_causal=False)
    settings.use_explicit_typing = True  # precisions are those of the graph; 2.13 has no other networks
    operators = get_decompositions()
    operators[torch.ops.aten.scaled_dot_product_attention.default] = attend
    operators[torch.ops.aten.index_put.default] = write_rows
    operators[torch.ops.aten.constant_pad_nd.default] = pad
    lowered = pre_export_lowering(program, settings).run_decompositions(operators)
    module = post_lowering(lowered.module(), settings)
    (output,) = module.graph.find_nodes(op="output")
    given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    interpreter = Interpreter(
        module,
        [torch_tensorrt.Input(shape=tuple(each.shape), dtype=each.dtype) for each in given],
        output_dtypes=[node.meta["val"].dtype for node in output.args[0]],
        compilation_settings=settings,
    )
    # Its `where` (2.11 to 2.13) casts bfloat16 and int64 to int32. Both operands have one dtype already.
    with patch.object(condition, "promote_trt_tensors_to_same_dtype", lambda ctx, x, y, name: (x, y)):
        interpreter._construct_trt_network_def()
    return interpreter


def add_in_float32(program: torch.export.ExportedProgram) -> None:
    """Compute sums of a linear layer's output and another tensor in float32, where both are bfloat16.

    TensorRT for RTX 1.4 joins such a sum with the product. In the vision encoder the joined kernel writes outside its
    memory on an H200 (benchmarks/NOTES-backends.md); it does not join a sum in float32.
    """
    graph, aten = program.graph, torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        given = [each for each in node.args if isinstance(each, torch.fx.Node)]
        dtypes = {each.meta["val"].dtype for each in given}
        if len(given) < 2 or dtypes != {torch.bfloat16}:
            continue
        if all(each.target is not aten.linear.default for each in given):
            continue
        with graph.inserting_before(node):
            node.args = tuple(_converted(graph, each, torch.float32) for each in given)
        value = node.meta["val"]
        node.meta["val"] = value.to(torch.float32)
        with graph.inserting_after(node):
            rounded = _converted(graph, node, value.dtype)
        node.replace_all_uses_with(rounded, delete_user_cb=lambda user, keep=rounded: user is not keep)
        program.graph_signature.replace_all_uses(node.name, rounded.name)


def _converted(graph: torch.fx.Graph, node: torch.fx.Node, dtype: torch.dtype) -> torch.fx.Node:
    made = graph.call_function(torch.ops.aten._to_copy.default, (node,), {"dtype": dtype})
    made.meta["val"] = node.meta["val"].to(dtype)
    return made


@torch.library.custom_op("mingc_tensorrt::attention", mutates_args=())
def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    """TensorRT's attention, which does not scale: tensors of four dims, a mask with a row for each query."""
    return scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, scale=1.0).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return q.new_empty(*q.shape[:-1], v.shape[-1])


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`aten.scaled_dot_product_attention` as TensorRT's.

    torch-tensorrt (2.11) converts only one whose queries, keys and values have one shape, and only from CUDA's kernels;
    its own decomposition adds infinities to scores in the graph's dtype.
    """
    if enable_gqa or q.dim() != 4:
        return NotImplemented  # type: ignore[no-any-return]
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        leading = (1,) * (4 - mask.dim())  # TensorRT takes no mask of fewer dims
        mask = mask.expand(*leading, *mask.shape[:-2], q.shape[-2], mask.shape[-1])
        mask = mask if mask.dtype == torch.bool else mask.to(q.dtype)
    made: Tensor = attention(q, k, v, mask, is_causal)
    return made


def write_rows(
    x: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False
) -> Tensor:
    """`aten.index_put` with one index of one dim, the only kind that torch-tensorrt (2.11) converts.

    Indices of several dims, and several indices, become numbers of rows of `x` as a matrix; `NotImplemented` keeps any
    other call as it is.
    """
    first, given = indices[0], [each for each in indices if each is not None]
    is_simple = x.dim() == 2 and first is not None and first.dim() == 1 and values.dim() == 2
    if accumulate or len(given) < len(indices) or any(not each.dtype.is_signed for each in given):
        return NotImplemented  # type: ignore[no-any-return]
    if len(given) == 1 and is_simple:
        return NotImplemented  # type: ignore[no-any-return]
    leading, rest = x.shape[: len(given)], x.shape[len(given) :]
    row = given[0] * 0
    for each, size in zip(given, leading, strict=True):
        row = row * size + (each + size).remainder(size)
    matrix, rows = x.reshape(leading.numel(), rest.numel()), row.reshape(-1)
    written = values.expand(*row.shape, *rest).reshape(len(rows), rest.numel())
    return matrix.index_put((rows,), written).reshape(x.shape)


def pad(x: Tensor, sizes: Sequence[int], value: float = 0) -> Tensor:
    """`aten.constant_pad_nd` by concatenation: torch-tensorrt (2.11) fills with an integer, which changes the dtype."""
    for index in range(len(sizes) // 2):
        dim, (low, high) = x.dim() - 1 - index, sizes[2 * index : 2 * index + 2]
        begin = max(0, -low)
        x = x.narrow(dim, begin, x.shape[dim] - begin - max(0, -high))
        shapes = [[*x.shape[:dim], size, *x.shape[dim + 1 :]] for size in (max(0, low), max(0, high))]
        before, after = (x.new_full(shape, value) for shape in shapes)
        x = torch.cat([each for each in (before, x, after) if each.shape[dim]], dim)
    return x
