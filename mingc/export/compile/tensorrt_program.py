"""A captured graph as a TensorRT engine file.

Weights are inputs of the plan: one engine serves every rank, the engines of all batch sizes share one copy of the
weights, and the plan contains none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from mingc.artifacts.target import rtx_capabilities
from mingc.artifacts.tensorrt_engine import EngineFile, EngineHeader, read_engine, write_engine
from mingc.errors import ArtifactError, CompileError
from mingc.export.compile.engine_cache import keep, program_digest, take
from mingc.export.compile.onnx_program import WEIGHT_PREFIX, refuse_large_gathers, to_functional, translates
from mingc.export.compile.tensorrt_builder import build_plan
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import COMPILERS, TITLES, import_library

FIX = (
    "compile this stage with AOTInductor: --backend aoti:STAGE; for RTX cards, for which nothing else builds, leave it "
    "out with --stages"
)
# TensorRT for RTX 1.4 holds the scores of an attention with a mask in memory, in float32: the vision encoder of the
# tiny checkpoint asked for 64 GiB at its largest image.
_MAX_SCORE_BYTES = 16 << 30


def refuse_graph(program: torch.export.ExportedProgram, names: Sequence[str], where: str) -> None:
    """Raises: CompileError when the traced graph shows that TensorRT cannot take it.

    It finds sizes that vary (pages of a pool), operators of libraries other than torch, gathers of large weights, and
    masks of more attention scores than a GPU can hold. Other problems are found when the plan is built. `names` name
    the first inputs in errors; the other inputs are weights.
    """
    refuse_large_gathers(program, where)
    called = dict(zip(program.graph_signature.user_inputs, names, strict=False))
    for node in program.graph.nodes:
        if (problem := _problem(node, called)) is not None:
            raise CompileError(problem, where=where, fix=FIX)


def _problem(node: torch.fx.Node, names: Mapping[str, str]) -> str | None:
    """Why TensorRT does not support `node`; None when no reason is known."""
    shape, operator = getattr(node.meta.get("val"), "shape", ()), node.target
    if node.op == "placeholder" and not all(isinstance(size, int) for size in shape):
        sizes = ", ".join(map(str, shape))
        return f"{names[node.name]} ({sizes}) grows with a pool, and a TensorRT plan has sizes of one bucket"
    if not isinstance(operator, torch._ops.OpOverload):
        return None
    if operator is torch.ops.aten.scaled_dot_product_attention.default:
        given = (*node.args, *node.kwargs.values())
        query, key, *others = (each for each in given if isinstance(each, torch.fx.Node))
        size = 4 * math.prod((*query.meta["val"].shape[:-1], key.meta["val"].shape[-2]))
        if len(others) > 1 and size > _MAX_SCORE_BYTES:
            return (
                f"an attention has up to {size >> 30} GiB of scores, which TensorRT holds in memory (limit "
                f"{_MAX_SCORE_BYTES >> 30} GiB)"
            )
    return (
        None
        if translates(operator)
        else f"torch-tensorrt does not convert the operator {operator._schema.name}"
    )


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

    `slots` is the index of the input that selects the rows of states, if the program has the states of a batch.

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
    if kept is not None and take(kept, path):
        with suppress(ArtifactError):  # a damaged one is built again
            read_engine(path)
            return True
    inputs, weights, state, pure = without_weights(program, where)
    try:
        plan = build_plan(pure, (*inputs, *weights), library, cards)
    except Exception as error:  # torch-tensorrt raises many kinds; all mean that there is no plan
        lines = (f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))
        reason = " ".join("; ".join(lines).split())
        raise CompileError(
            f"{TITLES[library]} {release} by torch-tensorrt {compiler} does not take the graph: {reason}",
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
        plan_bytes=len(plan),
        slots=slots,
    )
    write_engine(path, EngineFile(header=header, plan=plan))
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
