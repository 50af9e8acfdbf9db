"""Engine files of TensorRT: a header that is checked before the library reads the plan, then the plan.

A file is the magic, the length of the header (4 bytes, little endian), the header as JSON, and the serialized plan.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from mingc.artifacts.codec import decode, encode
from mingc.errors import ArtifactError, ManifestError

SUFFIX = ".trt"
_MAGIC = b"MINGCTRT"
_LENGTH = struct.Struct("<I")
_FIX = "copy the artifact again, or export again"


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineHeader:
    """The builder of an engine and the cards it is for.

    Attributes:
        library, version: `tensorrt_rtx` or `tensorrt`, and its version; no other version loads the plan.
        capabilities: compute capabilities of the GPUs that run it, as `8.9`.
        inputs, weights: names of the inputs that are given in every call, then of the weights.
        outputs: names of results, then of new states.
        state: for each new state the index of the input that it replaces.
        slots: index of the input that selects the rows of states. The plan takes only these rows, after row 0, which
            is padding; None: it takes whole states.
        plan_bytes: size of the plan.
    """

    library: str
    version: str
    capabilities: tuple[str, ...]
    inputs: tuple[str, ...]
    weights: tuple[str, ...]
    outputs: tuple[str, ...]
    state: tuple[int, ...]
    plan_bytes: int
    slots: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineFile:
    """A whole engine file."""

    header: EngineHeader
    plan: bytes


def write_engine(path: Path, engine: EngineFile) -> None:
    """Write `engine`; equal engines give equal files."""
    header = json.dumps(encode(engine.header), sort_keys=True).encode()
    path.write_bytes(_MAGIC + _LENGTH.pack(len(header)) + header + engine.plan)


def read_engine(path: Path) -> EngineFile:
    """The engine file at `path`. Raises: ArtifactError when it is not an engine file, or is truncated."""
    content = path.read_bytes()
    begin = len(_MAGIC) + _LENGTH.size
    if len(content) < begin or not content.startswith(_MAGIC):
        raise ArtifactError("the engine is not a TensorRT engine of mingc", where=str(path), fix=_FIX)
    (length,) = _LENGTH.unpack_from(content, len(_MAGIC))
    try:
        header = decode(EngineHeader, json.loads(content[begin : begin + length]))
    except (ValueError, RecursionError, ManifestError) as error:
        raise ArtifactError(
            f"the header of the engine is damaged: {type(error).__name__}: {error}", where=str(path), fix=_FIX
        ) from error
    plan = content[begin + length :]
    if len(plan) != header.plan_bytes:
        raise ArtifactError(
            f"the plan of the engine has {len(plan)} bytes, its header states {header.plan_bytes}",
            where=str(path),
            fix=_FIX,
        )
    return EngineFile(header=header, plan=plan)
