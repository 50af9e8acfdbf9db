"""A captured graph as a TensorRT plan, built from the ONNX model of the ONNX backend.

Weights are inputs of the plan, as in the model: one engine serves every rank, the engines of all batch sizes share one
copy of the weights, and the plan contains none.
"""

from __future__ import annotations

import hashlib
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
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
    to_onnx,
    translates,
)
from mingc.export.compile.tensorrt_builder import BuildJob, Range
from mingc.host.machine import gpu
from mingc.host.tensorrt_library import RTX, TITLES, import_library

FIX = (
    "compile this stage with AOTInductor: --backend aoti:STAGE; for RTX cards, for which nothing else builds, leave it "
    "out with --stages"
)
# A plan reserves memory for the largest sizes of its dims; state that grows with a pool has no largest size.
_MAX_STATE_BYTES = 256 << 30
# TensorRT for RTX 1.4 holds the scores of an attention with a mask in memory, in float32: the vision encoder of the
# tiny checkpoint asked for 64 GiB at its largest image.
_MAX_SCORE_BYTES = 16 << 30
_FOURIER = ("_fft_", "fft_", "stft", "istft")
_NARROW = (torch.bfloat16,)  # TensorRT for RTX 1.7 refuses a transposed convolution of these


def refuse_graph(program: torch.export.ExportedProgram, names: Sequence[str], where: str) -> None:
    """Raises: CompileError when the traced graph shows that TensorRT, or ONNX on the way to it, cannot take it.

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
        return f"the operator {space}::{name} has no ONNX translation, through which TensorRT reads a graph"
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

    Raises: CompileError when the graph has no ONNX model, or TensorRT refuses it.
    """
    model = to_onnx(program, where)
    content: bytes = model.SerializeToString(deterministic=True)
    (entry,) = [each.value for each in model.metadata_props if each.key == METADATA_KEY]
    layout = json.loads(entry)
    names = [each.name for each in model.graph.input]
    count = len(names) - layout["weights"]
    ranges = _ranges(program, names[:count], where)
    trt = import_library(library)
    cards = rtx_capabilities(target)
    capabilities = cards if cards is not None else (gpu().capability,)
    key = _key(content, ranges, library, trt.__version__, capabilities, slots, is_current=cards is None)
    kept = cache / f"{key}{path.suffix}" if cache else None
    if kept is not None and _is_whole(kept) and take(kept, path):
        return True
    names_of_cards = None if cards is None else tuple(sm_name(each).upper() for each in cards)
    plan = _build(content, BuildJob(library=library, ranges=tuple(ranges), cards=names_of_cards), where)
    carried = content if cards is not None else b""
    header = EngineHeader(
        library=library,
        version=trt.__version__,
        capabilities=tuple("{}.{}".format(*each) for each in capabilities),
        inputs=tuple(names[:count]),
        weights=tuple(name.removeprefix(WEIGHT_PREFIX) for name in names[count:]),
        outputs=tuple(each.name for each in model.graph.output),
        state=tuple(index for index, _ in layout["state"]),
        model_bytes=len(carried),
        plan_bytes=len(plan),
        slots=slots,
    )
    write_engine(path, EngineFile(header=header, model=carried, plan=plan))
    if kept is not None:
        keep(path, kept)
    return False


def _is_whole(path: Path) -> bool:
    try:
        read_engine(path)
    except (OSError, ArtifactError):
        return False
    return True


def _key(
    content: bytes,
    ranges: Sequence[Range],
    library: str,
    version: str,
    capabilities: Sequence[Capability],
    slots: int | None,
    *,
    is_current: bool,
) -> str:
    """sha256 of everything that affects the plan."""
    digest = hashlib.sha256(content)
    choices = (tuple(ranges), library, version, tuple(capabilities), slots, is_current)
    digest.update(repr(choices).encode())
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


def _build(model: bytes, job: BuildJob, where: str) -> bytes:
    """The plan of an ONNX model, built in a separate process. Raises: CompileError."""
    title = TITLES[job.library]
    with tempfile.TemporaryDirectory(prefix="mingc-tensorrt-") as name:
        folder = Path(name)
        (folder / "model.onnx").write_bytes(model)
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
