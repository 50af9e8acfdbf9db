"""Child process that builds the TensorRT plan of an exported program, by torch-tensorrt, or of an ONNX model.

The builder can crash, as TensorRT for RTX 1.4 does on an attention whose queries, keys and values are one
tensor. Here a crash ends only this process, and the export reports it.

torch-tensorrt lowers a program and writes TensorRT's network. `convert_exported_program_to_serialized_trt_engine` would
also build, but it logs the reason of a failure instead of raising it, and does not set the flag that stream capture
needs; so the network is taken from its interpreter.
"""

from __future__ import annotations

import io
import json
import logging
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mingc.artifacts.codec import decode
from mingc.host.parent_watchdog import watch_pipe
from mingc.host.tensorrt_library import RTX, import_library, make_logger

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The smallest, usual and largest shape of an input with dims that vary."""

    name: str
    shapes: tuple[Shape, Shape, Shape]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildJob:
    """One build.

    Attributes:
        cards: names such as `SM89`; None: the GPU of this machine; empty: the library chooses.
        inputs: names of the inputs of an exported program, weights included; None: the graph is an ONNX model.
        outputs: the number of outputs of an exported program.
        decomposes_attention: whether matrix products and a softmax replace attention before torch-tensorrt converts it.
    """

    library: str
    ranges: tuple[Range, ...] = ()
    cards: tuple[str, ...] | None = None
    inputs: tuple[str, ...] | None = None
    outputs: int = 0
    decomposes_attention: bool = False


class RefusedError(Exception):
    """TensorRT refused a model; the message says why."""


def build_plan(graph: bytes, job: BuildJob) -> bytes:
    """The serialized plan of an ONNX model or of an exported program. Raises: RefusedError."""
    trt = import_library(job.library)
    # `_owner` has the memory of the network's constants.
    builder, network, messages, _owner = (
        _parse(trt, graph) if job.inputs is None else _convert(trt, graph, job)
    )
    _allow_decomposition(trt, network)
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)  # 1.4 seems to ignore it: see docs/backends.md
    alone = getattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION", None)
    if alone is not None:  # TensorRT for RTX allows stream capture only of engines that allocate nothing
        config.set_flag(alone)
    names = ("CURRENT",) if job.cards is None else job.cards
    if names and hasattr(config, "num_compute_capabilities"):
        config.num_compute_capabilities = len(names)
        for index, name in enumerate(names):
            config.set_compute_capability(getattr(trt.ComputeCapability, name), index)
    if job.ranges:
        profile = builder.create_optimization_profile()
        for each in job.ranges:
            profile.set_shape(each.name, *each.shapes)
        config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RefusedError(f"{trt.__version__} cannot build the graph: {_joined(messages)}")
    return bytes(plan)


def _parse(trt: Any, model: bytes) -> tuple[Any, Any, list[str], Any]:
    """Builder, network, the list of TensorRT's errors, and the network's owner, from an ONNX model.

    Raises: RefusedError.
    """
    logger, messages = make_logger(trt)
    builder = trt.Builder(logger)
    flags = 0
    typed = getattr(trt.NetworkDefinitionCreationFlag, "STRONGLY_TYPED", None)
    if typed is not None:  # later versions have no other networks
        flags = 1 << int(typed)
    network = builder.create_network(flags)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model):
        reasons = [parser.get_error(index).desc() for index in range(parser.num_errors)]
        raise RefusedError(f"{trt.__version__} refuses the graph: {_joined(reasons or messages)}")
    return builder, network, messages, parser


class _Messages(logging.Handler):
    """Collects errors, among them TensorRT's, which torch-tensorrt logs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


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
    import torch

    for index in range(len(sizes) // 2):
        dim, (low, high) = x.dim() - 1 - index, sizes[2 * index : 2 * index + 2]
        begin = max(0, -low)
        x = x.narrow(dim, begin, x.shape[dim] - begin - max(0, -high))
        shapes = [[*x.shape[:dim], size, *x.shape[dim + 1 :]] for size in (max(0, low), max(0, high))]
        before, after = (x.new_full(shape, value) for shape in shapes)
        x = torch.cat([each for each in (before, x, after) if each.shape[dim]], dim)
    return x


def _convert(trt: Any, content: bytes, job: BuildJob) -> tuple[Any, Any, list[str], Any]:
    """The same from a serialized exported program. Raises: RefusedError."""
    import torch

    if job.library == RTX:
        sys.modules["tensorrt_rtx"] = trt  # what torch-tensorrt imports
    import torch_tensorrt
    from torch_tensorrt.dynamo import CompilationSettings
    from torch_tensorrt.dynamo.conversion import TRTInterpreter
    from torch_tensorrt.dynamo.lowering import get_decompositions, post_lowering, pre_export_lowering

    assert job.inputs is not None
    logged = _Messages()
    logging.getLogger().addHandler(logged)
    program = torch.export.load(io.BytesIO(content))
    for node in program.graph.nodes:
        if (
            node.target is torch.ops.aten.view.default
        ):  # the operators that replace attention have other strides
            node.target = torch.ops.aten.reshape.default
    settings = CompilationSettings(
        use_explicit_typing=True,  # precisions are those of the graph
        disable_tf32=True,
        decompose_attention=job.decomposes_attention,
        attn_bias_is_causal=False,
    )
    try:
        operators = get_decompositions(False, job.decomposes_attention)
        operators[torch.ops.aten.index_put.default] = write_rows
        operators[torch.ops.aten.constant_pad_nd.default] = pad
        lowered = pre_export_lowering(program, settings).run_decompositions(operators)
        module = post_lowering(lowered.module(), settings)
        (output,) = module.graph.find_nodes(op="output")
        given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        interpreter = TRTInterpreter(
            module,
            [torch_tensorrt.Input(shape=tuple(each.shape), dtype=each.dtype) for each in given],
            output_dtypes=[node.meta["val"].dtype for node in output.args[0]],
            compilation_settings=settings,
        )
        interpreter._construct_trt_network_def()
    except Exception as error:  # torch-tensorrt raises many kinds; all mean that there is no network
        reasons = [f"{type(error).__name__}: {error}", *logged.texts]
        raise RefusedError(
            f"by torch-tensorrt {torch_tensorrt.__version__} does not take the graph: {_joined(reasons)}"
        ) from error
    network = interpreter.ctx.net
    if (network.num_inputs, network.num_outputs) != (len(job.inputs), job.outputs):
        raise RefusedError(
            f"by torch-tensorrt {torch_tensorrt.__version__} makes {network.num_inputs} inputs and "
            f"{network.num_outputs} outputs of {len(job.inputs)} and {job.outputs}: two outputs may be one tensor"
        )
    for index, name in enumerate(job.inputs):
        network.get_input(index).name = name
    return interpreter.builder, network, logged.texts, interpreter


def _allow_decomposition(trt: Any, network: Any) -> None:
    """Let TensorRT compute attention by matrix products and a Softmax where it has no kernel.

    It has kernels for half precision and usual head sizes, and refuses any other Attention unless this is allowed.
    """
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.ATTENTION_INPUT:
            layer.__class__ = trt.IAttentionInputLayer  # the bindings return the base class
            layer.attention.decomposable = True


def _joined(messages: Sequence[str]) -> str:
    """The messages without the library's source files, each once."""
    texts = [" ".join(each.split()) for each in messages]
    texts = [re.sub(r"^(\[?[\w./]+\.(cpp|h)::?\S*\]?:?\s*)+", "", each)[:600] for each in texts]
    return "; ".join(dict.fromkeys(texts)) or "no reason given"


def main() -> int:
    """Build `plan` in the given folder from its `graph` and `job.json`; the reason of a refusal goes to `refused`.

    stdin is a pipe that ends with the parent.
    """
    watch_pipe(sys.stdin.fileno())
    folder = Path(sys.argv[1])
    job = decode(BuildJob, json.loads((folder / "job.json").read_text(encoding="utf-8")))
    try:
        (folder / "plan").write_bytes(build_plan((folder / "graph").read_bytes(), job))
    except RefusedError as error:
        (folder / "refused").write_text(str(error), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
