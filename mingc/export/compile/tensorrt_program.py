"""A captured graph as a TensorRT engine file.

Weights are inputs of the plan: one engine serves every rank, the engines of all batch sizes share one copy of the
weights, and the plan contains none.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from mingc.artifacts.target import rtx_capabilities
from mingc.artifacts.tensorrt_engine import EngineFile, EngineHeader, read_engine, write_engine
from mingc.errors import ArtifactError, CompileError
from mingc.export.compile.engine_cache import keep, program_digest, take
from mingc.export.compile.onnx_program import (
    WEIGHT_PREFIX,
    refuse_large_gathers,
    to_functional,
    translates,
)
from mingc.export.compile.tensorrt_builder import RefusedError, build_plan
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import COMPILERS, TITLES, import_library

FIX = (
    "compile this stage with AOTInductor: --backend aoti:STAGE; for RTX cards, for which nothing else builds, leave it "
    "out with --stages"
)
# TensorRT for RTX 1.4 holds the scores of an attention with a mask in memory, in float32: the vision encoder of the
# tiny checkpoint asked for 64 GiB at its largest image.
_MAX_SCORE_BYTES = 16 << 30
_FOURIER = ("_fft_", "fft_", "stft", "istft")
_NARROW = (torch.bfloat16,)  # TensorRT for RTX 1.7 refuses a transposed convolution of these


def refuse_graph(program: torch.export.ExportedProgram, names: Sequence[str], where: str) -> None:
    """Raises: CompileError when the traced graph shows that TensorRT cannot take it.

    `names` name the first inputs in errors; the other inputs are weights.
    It finds sizes that vary (pages of a pool), Fourier transforms, transposed convolutions in bfloat16, operators of
    libraries other than torch, gathers of large weights, and masks of more attention scores than a GPU can hold. Other
    problems are found when the plan is built.
    """
    refuse_large_gathers(program, where)
    inputs = program.graph_signature.user_inputs
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    problems = [
        f"{name} has no fixed shape ({', '.join(map(str, values[each].shape))}), and a TensorRT plan has one size, "
        "so it cannot hold pages of a pool"
        for name, each in zip((*names, *inputs[len(names) :]), inputs, strict=True)
        if not all(isinstance(size, int) for size in values[each].shape)
    ]
    problems += filter(None, map(_node_problem, program.graph.nodes))
    if problems:
        raise CompileError(problems[0], where=where, fix=FIX)


def _node_problem(node: torch.fx.Node) -> str | None:
    """Why TensorRT does not support the operator of `node`; None when no reason is known."""
    operator = node.target
    if node.op != "call_function" or not isinstance(operator, torch._ops.OpOverload):
        return None
    space, _, name = operator._schema.name.partition("::")
    if space == "aten" and name.startswith(_FOURIER):
        return f"TensorRT has no Fourier transform ({name}); write it as a product with a matrix"
    if name == "scaled_dot_product_attention":
        size_bytes = _score_bytes(node)
        if size_bytes > _MAX_SCORE_BYTES:
            return (
                f"an attention has up to {size_bytes >> 30} GiB of scores, which TensorRT holds in memory (limit "
                f"{_MAX_SCORE_BYTES >> 30} GiB)"
            )
    if "conv" in name and _is_transposed(node) and node.meta["val"].dtype in _NARROW:
        return f"TensorRT for RTX has no transposed convolution in {str(node.meta['val'].dtype)[6:]}"
    if not translates(operator):
        return f"torch-tensorrt does not convert the operator {space}::{name}"
    return None


def _score_bytes(node: torch.fx.Node) -> int:
    """Bytes of the scores of an attention with a mask, in float32.

    Without a mask, TensorRT has kernels that do not store them.
    """
    query, key, *_ = (each.meta["val"] for each in node.args if isinstance(each, torch.fx.Node))
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    return 0 if mask is None else 4 * math.prod((*query.shape[:-1], key.shape[-2]))


def _is_transposed(node: torch.fx.Node) -> bool:
    operator = node.target
    assert isinstance(operator, torch._ops.OpOverload)
    if "transpose" in operator._schema.name:
        return True
    names = [each.name for each in operator._schema.arguments]
    return "transposed" in names and bool(node.args[names.index("transposed")])


def build_engine_file(
    program: torch.export.ExportedProgram,
    path: Path,
    *,
    target: str,
    library: str,
    cache: Path | None,
    where: str,
    slots: int | None = None,
) -> bool:
    """Write the TensorRT engine of `program`. Returns whether it came from the cache.

    For an RTX target the file also contains the program, with which a machine without the GPU checks it. `slots` is
    the index of the input that selects the rows of states, if the program has the states of a batch.

    Raises: CompileError when torch-tensorrt or TensorRT refuses the graph.
    """
    cards = rtx_capabilities(target)
    capabilities = cards if cards is not None else (gpu().capability,)
    release, compiler = import_library(library).__version__, version(COMPILERS[library])
    digest = program_digest(program)
    digest.update(repr((library, release, compiler, capabilities, slots)).encode())
    for name in ("tensorrt_builder.py", "tensorrt_program.py"):
        digest.update(Path(__file__).with_name(name).read_bytes())
    kept = cache / f"{digest.hexdigest()}{path.suffix}" if cache else None
    if kept is not None and _is_whole(kept) and take(kept, path):
        return True
    inputs, weights, state, pure = without_weights(program, where)
    carried = io.BytesIO()
    if cards is not None:
        torch.export.save(pure, carried)
    try:
        plan = build_plan(pure, (*inputs, *weights), library, cards)
    except RefusedError as error:
        raise CompileError(
            f"{TITLES[library]} {release} by torch-tensorrt {compiler} does not take the graph: {error}",
            where=where,
            fix=FIX,
        ) from error
    header = EngineHeader(
        library=library,
        version=release,
        capabilities=tuple("{}.{}".format(*each) for each in capabilities),
        inputs=inputs,
        weights=tuple(name.removeprefix(WEIGHT_PREFIX) for name in weights),
        outputs=tuple(f"output{index}" for index in range(len(pure.graph_signature.output_specs))),
        state=state,
        program_bytes=len(carried.getvalue()),
        plan_bytes=len(plan),
        slots=slots,
    )
    write_engine(path, EngineFile(header=header, program=carried.getvalue(), plan=plan))
    if kept is not None:
        keep(path, kept)
    return False


class _Weightless(nn.Module):
    """A program whose last arguments are its weights."""

    def __init__(self, program: torch.export.ExportedProgram, names: Sequence[str]) -> None:
        super().__init__()
        self._hidden, self._names = [program.module()], names  # a list: its weights are none of this module

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        count = len(tensors) - len(self._names)
        weights = dict(zip(self._names, tensors[count:], strict=True))
        values: tuple[Tensor, ...] = torch.func.functional_call(self._hidden[0], weights, tensors[:count])
        return values


def without_weights(
    program: torch.export.ExportedProgram, where: str
) -> tuple[tuple[str, ...], tuple[str, ...], tuple[int, ...], torch.export.ExportedProgram]:
    """`program` as one that takes its weights after its inputs, and returns new states after its outputs.

    Returns the names of inputs and of weights, the indices of the inputs that are states, and the program.
    """
    written, functional = to_functional(program, where)
    read = {node.name for node in functional.graph.find_nodes(op="placeholder") if node.users}
    values = functional.state_dict
    weights = [
        str(each.target)
        for each in functional.graph_signature.input_specs
        if each.kind is not InputKind.CUSTOM_OBJ and each.target in values and each.arg.name in read
    ]
    given = functional.example_inputs
    assert given is not None, "torch.export keeps the example"
    with torch.no_grad():
        pure = torch.export.export(
            _Weightless(functional, weights), (*given[0], *(values[name] for name in weights)), strict=False
        )
    pure.example_inputs = None  # the weights are among them
    return tuple(functional.graph_signature.user_inputs), tuple(weights), tuple(written), pure


def _is_whole(path: Path) -> bool:
    try:
        read_engine(path)
    except (OSError, ArtifactError):
        return False
    return True
