"""Write a stage's weights tensor by tensor, and fill a module from their files by memory map.

The safetensors format is written here because the library's writer needs every tensor in memory at once; a rank
of the released thinker has 50 GB. Format: 8-byte little-endian header length, JSON header, raw tensors.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import safe_open
from torch import nn

from mingc.artifacts.artifact import writing
from mingc.artifacts.spec import Quantization, join_path
from mingc.dtypes import SAFETENSORS_NAMES
from mingc.errors import ExportError
from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import Shard, Stage, WeightSource
from mingc.export.weights.quantization import prepare, stored_names, stored_tensors

_T = TypeVar("_T")
_ALIGNMENT = 64  # vector loads of a memory-mapped weight start on a cache line
# Files are hashed and copied in parallel; registries and object stores refuse too large ones.
FILE_BYTES = 4 << 30


def check_weights(checkpoint: Checkpoint, sources: Sequence[WeightSource]) -> list[str]:
    """One line per tensor that the sources need and the checkpoint lacks or holds in another shape."""
    problems = []
    for source in sources:
        part = checkpoint.parts.get(source.part)
        for name, shape in zip(source.tensors, source.shapes, strict=True):
            entry = part.tensors.get(name) if part else None
            if entry is None:
                problems.append(f"missing: {source.part}: {name} {list(shape)}")
            elif entry.shape != tuple(shape):
                problems.append(
                    f"misshaped: {source.part}: {name} is {list(entry.shape)}, expected {list(shape)}"
                )
    return problems


def write_weights(
    checkpoint: Checkpoint,
    stage: Stage,
    config: object,
    shard: Shard,
    dtype: torch.dtype,
    path: Path,
    quantization: Quantization | None = None,
    *,
    omitted: Collection[str] = (),
    device: torch.device | None = None,
    file_bytes: int = FILE_BYTES,
) -> int:
    """Write the weights of one shard to files in the folder `path`, one weight in memory at a time.

    Args:
        omitted: paths of submodules whose weights are left out.
        device: where weights are quantized; None for the CPU.
        file_bytes: most bytes of a file's tensors, unless it holds a single weight.

    Returns: bytes written.

    Raises: CheckpointError; ExportError when the names of sources and module differ.
    """
    sources = stage.weights(config, shard)
    expected = meta_module(stage, config, shard, sources, quantization).state_dict()
    names = [name for source in sources for name in stored_names(source, quantization)]
    if set(names) != set(expected):
        raise ExportError(
            f"the names of weight sources and module differ: {sorted(set(names) ^ set(expected))[:5]}",
            where=stage.name,
        )
    sources = [source for source in sources if not any(_is_within(source.name, each) for each in omitted)]
    dtypes = _stored_dtypes(expected, sources, quantization, dtype)
    sizes = {name: expected[name].numel() * each.itemsize for name, each in dtypes.items()}
    path.mkdir(exist_ok=True)

    def size_of(source: WeightSource) -> int:
        return sum(sizes[name] for name in stored_names(source, quantization))

    for index, group in enumerate(file_groups(sources, size_of, file_bytes)):
        names = [name for source in group for name in stored_names(source, quantization)]
        header = safetensors_header({name: (dtypes[name], expected[name].shape) for name in names})
        target = path / f"{index:03}.safetensors"
        with writing(target, len(header) + sum(sizes[name] for name in names)), target.open("wb") as file:
            file.write(header)
            for source in group:
                value = _compute(checkpoint, source)
                tensors = stored_tensors(source, value, quantization, dtypes[source.name], device)
                del value
                for name, value in tensors.items():
                    if value.shape != expected[name].shape:
                        raise ExportError(
                            f"weight {name} was computed with shape {list(value.shape)}, "
                            f"the module expects {list(expected[name].shape)}",
                            where=stage.name,
                        )
                    file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return sum(sizes.values())


def weights_files(path: Path) -> list[Path]:
    """The files that `write_weights` wrote to the folder `path`, in order."""
    return sorted(path.iterdir())


def file_groups(
    weights: Iterable[_T], size_of: Callable[[_T], int], file_bytes: int = FILE_BYTES
) -> Iterator[list[_T]]:
    """The weights of each file, in order; one file without weights when there are none.

    A file has at most `file_bytes` by `size_of`, unless it holds a single weight.
    """
    group, held = list[_T](), 0
    for weight in weights:
        size = size_of(weight)
        if group and held + size > file_bytes:
            yield group
            group, held = [], 0
        group.append(weight)
        held += size
    yield group


def safetensors_header(tensors: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bytes:
    """The bytes before the tensors, which follow in this order; `tensors` maps names to dtypes and shapes."""
    header: dict[str, object] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {
            "dtype": SAFETENSORS_NAMES[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-(len(encoded) + 8) % _ALIGNMENT)
    return struct.pack("<Q", len(encoded)) + encoded


def meta_module(
    stage: Stage,
    config: object,
    shard: Shard,
    sources: Sequence[WeightSource],
    quantization: Quantization | None,
) -> nn.Module:
    """The module of a shard with the shapes of its weights, but no values; what is not quantized is float32."""
    with torch.device("meta"):
        module = stage.build(config, shard)
    return prepare(module, sources, quantization)


def stored_meta_module(
    stage: Stage, config: object, shard: Shard, quantization: Quantization | None, dtype: torch.dtype
) -> nn.Module:
    """The module of a shard with the shapes and dtypes of the weights that `write_weights` stores, but no values."""
    sources = stage.weights(config, shard)
    module = meta_module(stage, config, shard, sources, quantization)
    expected = module.state_dict()
    dtypes = _stored_dtypes(expected, sources, quantization, dtype)
    return _fill(module, "", {name: value.to(dtypes[name]) for name, value in expected.items()})


def _stored_dtypes(
    expected: Mapping[str, torch.Tensor],
    sources: Sequence[WeightSource],
    quantization: Quantization | None,
    dtype: torch.dtype,
) -> dict[str, torch.dtype]:
    """The dtype in which each weight of `sources` is stored, by name; `expected` are the tensors of a `meta_module`."""
    dtypes: dict[str, torch.dtype] = {}
    for source in sources:
        stored = {name: expected[name].dtype for name in stored_names(source, quantization)}
        if len(stored) == 1:
            is_float = expected[source.name].is_floating_point()
            stored[source.name] = source.dtype or (dtype if is_float else stored[source.name])
        dtypes.update(stored)
    return dtypes


def _compute(
    checkpoint: Checkpoint, source: WeightSource, device: torch.device | str = "cpu"
) -> torch.Tensor:
    part = checkpoint.part(source.part)
    try:
        return source.compute(*[part.read(name).to(device) for name in source.tensors]).to(device)
    finally:
        part.close()  # or the pages of every shard read so far would stay resident


def load_module(
    stage: Stage,
    config: object,
    shard: Shard,
    path: Path,
    quantization: Quantization | None = None,
    *,
    submodule: str = "",
) -> nn.Module:
    """The stage's module with the memory-mapped weights in the folder `path`; in eval mode, without gradients.

    With `submodule`, only the submodule at this path.
    """
    module = meta_module(stage, config, shard, stage.weights(config, shard), quantization)
    tensors: dict[str, torch.Tensor] = {}
    for each in weights_files(path):
        with safe_open(each, framework="pt") as file:
            names = [name for name in file.keys() if _is_within(name, submodule)]  # noqa: SIM118 - not a dict
            tensors |= {name: file.get_tensor(name) for name in names}
    return _fill(module, submodule, tensors)


def float32_module(
    stage: Stage,
    config: object,
    checkpoint: Checkpoint,
    *,
    submodule: str = "",
    device: torch.device | str = "cpu",
) -> nn.Module:
    """The reference: the unsharded module with the checkpoint's weights, on `device`, computing in float32.

    Weights are float32 except routed experts, which keep the checkpoint's dtype and are converted, exactly, one at a
    time when they run: the experts of one released layer take 13 GB in float32. With `submodule`, only the submodule
    at this path; no other weight is read.
    """
    with torch.device("meta"):
        module = stage.build(config, Shard())
    tensors = {}
    for source in stage.weights(config, Shard()):
        if _is_within(source.name, submodule):
            value = _compute(checkpoint, source, device)
            is_kept = _is_routed(source, value) or not value.is_floating_point()
            tensors[source.name] = value if is_kept else value.float()
    return _fill(module, submodule, tensors)


def _is_routed(source: WeightSource, value: torch.Tensor) -> bool:
    """Whether a weight holds routed experts (E, …): their torch reference converts only the experts that it uses."""
    return source.quantizable == "experts" and value.dim() == 3


def _fill(module: nn.Module, submodule: str, tensors: dict[str, torch.Tensor]) -> nn.Module:
    """The submodule at this path with the weights `tensors`, named as in the whole module."""
    filled, start = module.get_submodule(submodule), len(join_path(submodule, ""))
    filled.load_state_dict({name[start:]: value for name, value in tensors.items()}, strict=True, assign=True)
    return filled.eval().requires_grad_(False)


def _is_within(name: str, submodule: str) -> bool:
    return name.startswith(join_path(submodule, ""))
