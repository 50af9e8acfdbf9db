"""Child process that parses an ONNX model and builds its TensorRT plan.

The builder can crash, as TensorRT for RTX 1.4 does on an attention whose queries, keys and values are one
tensor. Here a crash ends only this process, and the export reports it. Neither torch nor onnx is imported.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mingc.artifacts.codec import decode
from mingc.host.parent_watchdog import watch_pipe
from mingc.host.tensorrt_library import import_library, make_logger

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """The smallest, usual and largest shape of an input with dims that vary."""

    name: str
    shapes: tuple[Shape, Shape, Shape]


@dataclass(frozen=True, kw_only=True, slots=True)
class BuildJob:
    """One build.

    `cards` are names such as `SM89`; None: the GPU of this machine; empty: the library chooses.
    """

    library: str
    ranges: tuple[Range, ...]
    cards: tuple[str, ...] | None


class RefusedError(Exception):
    """TensorRT refused a model; the message says why."""


def build_plan(model: bytes, job: BuildJob) -> bytes:
    """The serialized plan of an ONNX model. Raises: RefusedError."""
    trt = import_library(job.library)
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
    """Build `plan` in the given folder from its `model.onnx` and `job.json`; the reason of a refusal goes to `refused`.

    stdin is a pipe that ends with the parent.
    """
    watch_pipe(sys.stdin.fileno())
    folder = Path(sys.argv[1])
    job = decode(BuildJob, json.loads((folder / "job.json").read_text(encoding="utf-8")))
    try:
        (folder / "plan").write_bytes(build_plan((folder / "model.onnx").read_bytes(), job))
    except RefusedError as error:
        (folder / "refused").write_text(str(error), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
