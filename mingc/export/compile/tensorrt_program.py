"""A captured graph as a TensorRT plan.

For the GPU of this machine torch-tensorrt converts the exported program. It cannot be imported on a machine without a
GPU (2.11 to 2.13 ask the driver for a compute capability), so plans for RTX cards are built from the ONNX model of the
ONNX backend, with which ONNX Runtime also checks them.

Weights are inputs of both: one engine serves every rank, the engines of all batch sizes share one copy of the weights,
and the plan contains none.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind

from mingc.artifacts.codec import encode
from mingc.artifacts.target import Capability, rtx_capabilities, sm_name
from mingc.artifacts.tensorrt_engine import EngineFile, EngineHeader, read_engine, write_engine
from mingc.errors import ArtifactError, CompileError
from mingc.export.compile.engine_cache import keep, take
from mingc.export.compile.onnx_program import (
    METADATA_KEY,
    WEIGHT_PREFIX,
    refuse_large_gathers,
    size_bounds,
    to_functional,
    to_onnx,
    translates,
)
from mingc.export.compile.tensorrt_builder import BuildJob, Range
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import COMPILERS, RTX, TITLES, import_library

FIX = (
    "compile this stage with AOTInductor: --backend aoti:STAGE; for RTX cards, for which nothing else builds, leave it "
    "out with --stages"
)
# A plan reserves memory for the largest sizes of its dims; state that grows with a pool has no largest size.
_MAX_STATE_BYTES = 256 << 30
# TensorRT for RTX 1.4 holds the scores of an attention with a mask in memory, in float32: the vision encoder of the
# tiny checkpoint asked for 64 GiB at its largest image.
_MAX_SCORE_BYTES = 16 << 30
# torch-tensorrt (2.11) converts an attention only if queries, keys and values have one shape and it is a CUDA
# kernel, so a program traced on a CPU would have none. TensorRT itself fuses products and softmax.
DECOMPOSES_ATTENTION = True
_FOURIER = ("_fft_", "fft_", "stft", "istft")
_NARROW = (torch.bfloat16,)  # TensorRT for RTX 1.7 refuses a transposed convolution of these


def refuse_graph(program: torch.export.ExportedProgram, names: Sequence[str], where: str) -> None:
    """Raises: CompileError when the traced graph shows that TensorRT cannot take it.

    `names` name the first inputs in errors; the other inputs are weights.
    It finds Fourier transforms, transposed convolutions in bfloat16, operators of libraries other than torch, gathers
    of large weights, state that grows with a pool (paged KV), and masks of more attention scores than a GPU can hold.
    Other problems are found when the plan is built.
    """
    refuse_large_gathers(program, where)
    inputs = [
        each.arg.name for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT
    ]
    _ranges(program, [*names, *inputs[len(names) :]], where)
    for node in program.graph.nodes:
        problem = _node_problem(node)
        if problem is not None:
            raise CompileError(problem, where=where, fix=FIX)


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
        return f"neither torch-tensorrt nor torch.onnx converts the operator {space}::{name}"
    return None


def _score_bytes(node: torch.fx.Node) -> int:
    """Bytes of the scores of an attention with a mask at the sizes of the graph, in float32; 0 with dynamic sizes.

    Without a mask, TensorRT has kernels that do not store them.
    """
    query, key, *_ = (each.meta["val"] for each in node.args if isinstance(each, torch.fx.Node))
    mask = node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")
    sizes = (*query.shape[:-1], key.shape[-2])
    if mask is None or not all(isinstance(size, int) for size in sizes):
        return 0
    size_bytes: int = 4 * math.prod(sizes)
    return size_bytes


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

    For an RTX target the file also contains the ONNX model, with which a machine without the GPU checks it. `slots` is
    the index of the input that selects the rows of states, if the program has the states of a batch.

    Raises: CompileError when the graph has no ONNX model, or torch-tensorrt or TensorRT refuses it.
    """
    cards = rtx_capabilities(target)
    graph = (
        program_graph(program, library, where)
        if cards is None
        else _onnx_graph(program, library, cards, where)
    )
    trt = import_library(library)
    capabilities = cards if cards is not None else (gpu().capability,)
    compiler = "" if cards is not None else version(COMPILERS[library])
    key = _key(graph, trt.__version__, compiler, capabilities, slots)
    kept = cache / f"{key}{path.suffix}" if cache else None
    if kept is not None and _is_whole(kept) and take(kept, path):
        return True
    plan = _build(graph.content, graph.job, where)
    carried = graph.content if cards is not None else b""
    header = EngineHeader(
        library=library,
        version=trt.__version__,
        capabilities=tuple("{}.{}".format(*each) for each in capabilities),
        inputs=graph.inputs,
        weights=graph.weights,
        outputs=graph.outputs,
        state=graph.state,
        model_bytes=len(carried),
        plan_bytes=len(plan),
        slots=slots,
    )
    write_engine(path, EngineFile(header=header, model=carried, plan=plan))
    if kept is not None:
        keep(path, kept)
    return False


@dataclass(frozen=True, kw_only=True)
class _Graph:
    """What a plan is built from, and what its header says of it; `text` identifies the graph for the cache."""

    content: bytes
    text: bytes
    job: BuildJob
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[int, ...]


def _onnx_graph(
    program: torch.export.ExportedProgram, library: str, cards: Sequence[Capability], where: str
) -> _Graph:
    model = to_onnx(program, where)
    content: bytes = model.SerializeToString(deterministic=True)
    (entry,) = [each.value for each in model.metadata_props if each.key == METADATA_KEY]
    layout = json.loads(entry)
    names = [each.name for each in model.graph.input]
    count = len(names) - layout["weights"]
    ranges = _ranges(program, names[:count], where)
    return _Graph(
        content=content,
        text=content,
        job=BuildJob(
            library=library,
            ranges=tuple(ranges),
            cards=tuple(sm_name(each).upper() for each in cards),
        ),
        inputs=tuple(names[:count]),
        weights=tuple(name.removeprefix(WEIGHT_PREFIX) for name in names[count:]),
        outputs=tuple(each.name for each in model.graph.output),
        state=tuple(index for index, _ in layout["state"]),
    )


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


def program_graph(program: torch.export.ExportedProgram, library: str, where: str) -> _Graph:
    """`program` as one that takes its weights after its inputs, and returns new states after its outputs.

    Raises: CompileError when a size varies: plans for a GPU have the sizes of one bucket.
    """
    written, functional = to_functional(program, where)
    arguments = [
        each for each in functional.graph_signature.input_specs if each.kind is not InputKind.CUSTOM_OBJ
    ]
    inputs = [each.arg.name for each in arguments if each.kind is InputKind.USER_INPUT]
    for each in _ranges(functional, inputs, where):
        raise CompileError(
            f"{each.name} has no fixed shape ({each.shapes[0]} to {each.shapes[2]})", where=where, fix=FIX
        )
    read = {node.name for node in functional.graph.find_nodes(op="placeholder") if node.users}
    values = functional.state_dict
    weights = [str(each.target) for each in arguments if each.target in values and each.arg.name in read]
    given = functional.example_inputs
    assert given is not None, "torch.export keeps the example"
    with torch.no_grad():
        pure = torch.export.export(
            _Weightless(functional, weights), (*given[0], *(values[name] for name in weights)), strict=False
        )
    pure.example_inputs = None  # the weights are among them
    saved = io.BytesIO()
    torch.export.save(pure, saved)
    outputs = tuple(f"output{index}" for index in range(len(pure.graph_signature.output_specs)))
    return _Graph(
        content=saved.getvalue(),
        text=re.sub(r"#.*", "", str(pure)).encode() + _constants(pure),
        job=BuildJob(
            library=library,
            inputs=(*inputs, *weights),
            outputs=len(outputs),
            decomposes_attention=DECOMPOSES_ATTENTION,
        ),
        inputs=tuple(inputs),
        weights=tuple(name.removeprefix(WEIGHT_PREFIX) for name in weights),
        outputs=outputs,
        state=tuple(written),
    )


def _constants(program: torch.export.ExportedProgram) -> bytes:
    """Values of the tensors that are written in the code of a graph."""
    values = [
        value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for _, value in sorted(program.constants.items())
        if isinstance(value, Tensor)
    ]
    return b"".join(values)


def _is_whole(path: Path) -> bool:
    try:
        read_engine(path)
    except (OSError, ArtifactError):
        return False
    return True


def _key(
    graph: _Graph, release: str, compiler: str, capabilities: Sequence[Capability], slots: int | None
) -> str:
    """sha256 of everything that affects the plan; `release` and `compiler` are versions."""
    digest = hashlib.sha256(graph.text)
    builder = Path(__file__).with_name("tensorrt_builder.py").read_bytes()
    digest.update(
        repr((graph.job, release, compiler, torch.__version__, tuple(capabilities), slots)).encode() + builder
    )
    return digest.hexdigest()


def _ranges(program: torch.export.ExportedProgram, names: Sequence[str], where: str) -> list[Range]:
    """Ranges of the inputs with dims that vary, in the program's order. Raises: CompileError if one is too large."""
    given = [
        each.arg.name for each in program.graph_signature.input_specs if each.kind is InputKind.USER_INPUT
    ]
    values = {node.name: node.meta["val"] for node in program.graph.find_nodes(op="placeholder")}
    found = []
    for name, argument in zip(names, given, strict=True):
        value = values[argument]
        bounds = [size_bounds(size) for size in value.shape]
        if all(low == high for low, high in bounds):
            continue
        largest = torch.Size([high for _, high in bounds]).numel() * value.element_size()
        if largest > _MAX_STATE_BYTES:
            raise CompileError(
                f"{name} may have up to {largest >> 30} GiB, and TensorRT plans for the largest sizes (limit "
                f"{_MAX_STATE_BYTES >> 30} GiB), so it cannot hold pages of a pool",
                where=where,
                fix=FIX,
            )
        usual = tuple(round((low * high) ** 0.5) for low, high in bounds)
        found.append(
            Range(
                name=name, shapes=(tuple(low for low, _ in bounds), usual, tuple(high for _, high in bounds))
            )
        )
    return found


def _build(graph: bytes, job: BuildJob, where: str) -> bytes:
    """The plan of an ONNX model or an exported program, built in a separate process. Raises: CompileError."""
    title = TITLES[job.library]
    with tempfile.TemporaryDirectory(prefix="mingc-tensorrt-") as name:
        folder = Path(name)
        (folder / "graph").write_bytes(graph)
        (folder / "job.json").write_text(json.dumps(encode(job)), encoding="utf-8")
        words = [sys.executable, "-X", "faulthandler", "-m", "mingc.export.compile.tensorrt_builder", name]
        with (folder / "errors").open("wb") as errors:
            child = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=errors, stderr=subprocess.STDOUT)
            try:
                child.wait()
            finally:
                child.kill()
                child.wait()
                assert child.stdin is not None
                child.stdin.close()
        refused, plan = folder / "refused", folder / "plan"
        if refused.exists():
            raise CompileError(f"{title} {refused.read_text(encoding='utf-8')}", where=where, fix=FIX)
        if child.returncode or not plan.exists():
            log = (folder / "errors").read_text(encoding="utf-8", errors="replace").strip()
            raise CompileError(
                f"the process in which {title} built the graph ended with {child.returncode}: {log[-1500:]}",
                where=where,
                fix=FIX,
            )
        return plan.read_bytes()


def rtx_problem(target: str) -> str | None:
    """Why the installed TensorRT for RTX cannot build for the cards of `target`; None when it can."""
    try:
        cards = rtx_capabilities(target) or ()
    except ValueError:
        return None  # the recipe reports it
    trt = import_library(RTX)
    absent = [sm_name(each) for each in cards if not hasattr(trt.ComputeCapability, sm_name(each).upper())]
    return f"{TITLES[RTX]} {trt.__version__} cannot build for {', '.join(absent)}" if absent else None
