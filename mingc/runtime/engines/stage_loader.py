"""Loads the stages of an artifact on one device: engines, bound weights, state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.manifest import EngineRecord, GraphRecord, StageRecord
from mingc.artifacts.spec import GraphSpec, TensorSpec, join_path
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError, ConfigError, IntegrityError
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.base import Engine, Graph
from mingc.runtime.engines.device_copies import copy_to_device
from mingc.runtime.engines.packed_weights import PackedWeights
from mingc.runtime.engines.random_layers import drawn_like

_STATE_DIMS = {"KV": "rows of KV", "S": "slots"}

_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class LoadedStage:
    """The graphs of one stage, which share one set of weights, named as in the stage.

    A graph of several layers has the weights of the first one; `layer_instances` gives all.
    """

    name: str
    graphs: Mapping[str, Graph]
    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)

    @property
    def is_capturable(self) -> bool:
        """Whether all graphs are (`Engine.is_capturable`)."""
        return all(graph.is_capturable for graph in self.graphs.values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights of this rank."""
        return sum(each.nbytes for each in self.weights.values())

    def __getitem__(self, graph: str) -> Graph:
        found = self.graphs.get(graph)
        if found is None:
            raise ArtifactError(
                f"stage {self.name} has no graph {graph}; it has {', '.join(sorted(self.graphs))}",
                where="manifest.json",
                fix="copy the artifact again, or export again",
            )
        return found

    def layer_instances(self, graph: str) -> dict[str, Graph]:
        """The graph once for each layer instance, with its weights, in order."""
        first = self[graph]
        return {
            instance: Graph(first.spec, first.engines, weights_within(self.weights, instance))
            for instance in first.spec.layer_instances
        }

    def state_specs(self) -> dict[str, TensorSpec]:
        """All state tensors of the stage by name; graphs that share a name share the tensor."""
        return {
            join_path(instance, tensor.name): tensor
            for graph in self.graphs.values()
            for instance in graph.spec.layer_instances
            for tensor in graph.spec.state
        }

    def allocate_state(self, dims: Mapping[str, int], device: torch.device) -> dict[str, torch.Tensor]:
        """Allocate the state tensors, filled with zeros; `dims` sizes their named dims (`KV` rows, `S` slots).

        Raises: ConfigError when the memory of `device` does not suffice.
        """
        try:
            return {
                name: torch.zeros(tensor.shape_at(dims), dtype=torch_dtype(tensor.dtype), device=device)
                for name, tensor in self.state_specs().items()
            }
        except RuntimeError as error:
            asked = ", ".join(f"{size} {_STATE_DIMS.get(dim, dim)}" for dim, size in dims.items())
            raise ConfigError(
                f"not enough memory for the state of the {self.name}: {asked}",
                where=str(device),
                fix="pass a smaller --max-total-tokens or --max-speech-seqs, or stop other processes that use it",
            ) from error


def load_stage(
    artifact: Artifact,
    name: str,
    device: torch.device,
    *,
    rank: int = 0,
    only_first: bool = False,
    copied: Mapping[str, torch.Tensor] | None = None,
    phase: Callable[[str], AbstractContextManager[None]] = lambda name: nullcontext(),
) -> LoadedStage:
    """Load every engine of stage `name` and bind the weights of `rank`; `phase` times both parts.

    With `only_first`, every graph gets the weights of its first layer instance alone: enough to run every engine, in
    little of a decoder's memory. Do not call `LoadedStage.layer_instances` then.

    `copied`: the stage's weights on another device, which are copied from there instead of being read.

    Raises: IntegrityError when the weights cannot be read; ArtifactError when the artifact lacks the stage, or an
    engine needs a weight that is missing.
    """
    record = artifact.manifest.stages.get(name)
    if record is None:
        held = ", ".join(sorted(artifact.manifest.stages))
        raise ArtifactError(f"the artifact has no stage {name}; it has {held}", where=str(artifact.root))
    left_out = {
        instance
        for graph in record.graphs.values()
        for instance in graph.spec.layer_instances[1:]
        if only_first
    }
    with phase("weights to the device (CPU: map)"):
        if copied is None:
            weights = _read_weights(artifact, record, device, rank, left_out)
        else:
            weights = {name: value.to(device) for name, value in copied.items()}
    graphs = {}
    files: dict[str, Engine] = {}
    with phase("load engines"):
        for graph_name, graph in record.graphs.items():
            graphs[graph_name] = _load_graph(artifact, name, graph, weights, device, files, left_out)
    return LoadedStage(name, graphs, weights)


def _engine_key(spec: GraphSpec, record: EngineRecord) -> tuple[int, ...] | None:
    if record.dims is None:
        return None
    return tuple(record.dims[dim.name] for dim in spec.dims if dim.buckets)


def _load_graph(
    artifact: Artifact,
    stage: str,
    graph: GraphRecord,
    weights: Mapping[str, torch.Tensor],
    device: torch.device,
    files: dict[str, Engine],
    left_out: Collection[str],
) -> Graph:
    engines: dict[tuple[int, ...] | None, Engine] = {}
    first = weights_within(weights, graph.spec.layer_instances[0])
    for record in graph.engines:
        engine = files.get(record.file)
        if engine is None:
            engine = files[record.file] = load_engine(record.backend, artifact.path(record.file), device)
            absent = [
                path
                for instance in graph.spec.layer_instances
                if instance not in left_out
                for name in (*engine.constants(), *graph.spec.weights)
                if (path := join_path(instance, name)) not in weights
            ]
            if absent:
                raise ArtifactError(
                    f"engine needs weights that the artifact lacks: {', '.join(absent[:5])}",
                    where=f"{stage}.{graph.spec.name}: {record.file}",
                    fix="export again",
                )
            engine.bind(first)
        engines[_engine_key(graph.spec, record)] = engine
    return Graph(graph.spec, engines, first)


def weights_within(weights: Mapping[str, _Value], instance: str) -> dict[str, _Value]:
    """The weights of a layer instance, by the names that its engine uses."""
    start = join_path(instance, "")
    return {name[len(start) :]: value for name, value in weights.items() if name.startswith(start)}


def rank_weight_bytes(artifact: Artifact, name: str, rank: int) -> int:
    """`LoadedStage.weight_bytes` of stage `name` on another rank, from its weights files."""
    record = artifact.manifest.stages[name]
    with opened_weights(weights_regions(artifact, record, rank)) as files:
        # Tensors are mapped here, not read.
        sizes: dict[str, int] = {key: file.get_tensor(key).nbytes for key, file in files.items()}
    copies = sum(sum(weights_within(sizes, source).values()) for source in record.repeated.values())
    return sum(sizes.values()) + copies


def _read_weights(
    artifact: Artifact, record: StageRecord, device: torch.device, rank: int, left_out: Collection[str]
) -> dict[str, torch.Tensor]:
    """Read the weights of a rank: they are memory-mapped on the CPU, and copied once to a GPU.

    Instances `left_out` are not read. A repeated layer gets its own random weights, so caches cannot flatter its timing
    and its router chooses other experts.
    """
    starts = tuple(join_path(instance, "") for instance in left_out)
    is_copied = device.type == "cuda"
    with opened_weights(weights_regions(artifact, record, rank), located=is_copied) as files:
        read = {name: file for name, file in files.items() if not name.startswith(starts)}
        try:
            weights = (
                copy_to_device(read, device)
                if is_copied
                else {name: file.get_tensor(name) for name, file in read.items()}
            )
        except OSError as error:
            raise IntegrityError(
                f"the weights cannot be read: {error.strerror}",
                where=str(error.filename or artifact.root),
                fix="copy the artifact again, or export again",
            ) from error
    for instance, source in record.repeated.items():
        if instance not in left_out:
            for name, value in weights_within(weights, source).items():
                path = join_path(instance, name)
                weights[path] = drawn_like(value, path)
    return weights


def weights_regions(artifact: Artifact, record: StageRecord, rank: int) -> list[FileRegion]:
    """The weights files of a rank of the stage `record`."""
    return [artifact.region(file) for file in record.weights[rank if record.is_sharded else 0]]


@contextmanager
def opened_weights(
    sources: Sequence[Path | FileRegion], *, located: bool = False
) -> Iterator[dict[str, Any]]:
    """Open the weights files of a rank. Yields each tensor's name with the open file, whose `get_tensor` reads it.

    `located`: the files of `sources`, which are regions, have the method `location`, too.

    Raises: IntegrityError when a header is damaged.
    """
    files: dict[str, Any] = {}  # safetensors has no types
    with ExitStack() as stack:
        for source in sources:
            try:
                if isinstance(source, FileRegion) and (located or not source.is_whole):
                    file: Any = PackedWeights(source)
                else:
                    path = source.path if isinstance(source, FileRegion) else source
                    file = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise IntegrityError(
                    f"the weights cannot be read: {error}",
                    where=str(source),
                    fix="copy the artifact again, or export again",
                ) from error
            files |= dict.fromkeys(file.keys(), file)
        yield files
