"""Self-check of one graph: the golden inputs, state and outputs that the export recorded in the artifact."""

from __future__ import annotations

import torch
from safetensors.torch import load_file

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import EngineRecord, GraphRecord, StageRecord
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.engine_replay import replay as replay_engine
from mingc.verify.engines import to_numpy


def replay(
    artifact: Artifact, stage: StageRecord, graph: GraphRecord, *, name: str, tolerance: float
) -> ComparisonLog:
    """Run the graph's engine on the recorded tensors for every rank; compare outputs and state."""
    recorded = load_file(artifact.path(graph.golden))
    references = {key: to_numpy(value) for key, value in recorded.items()}
    log = ComparisonLog(name, references, tolerance=tolerance, is_exact=False)
    given: dict[str, torch.Tensor] = {}
    for key, value in recorded.items():
        kind, _, tensor = key.partition(".")
        if kind in ("in", "state"):
            given[tensor] = value
            log.input(key)
    with log.case("replay"):
        _check_recorded(graph, given, name)
        engine = _engine(graph, given)
        (made,) = replay_engine(
            artifact.path(engine.file),
            engine.backend,
            graph.spec,
            [artifact.region(weights) for weights in stage.weights],
            [given],
            artifact.manifest.fingerprint.device,
        )
        for key in references:
            kind, _, tensor = key.partition(".")
            if kind == "out":
                log.tensor(key, to_numpy(made[tensor]))
            elif kind == "state_after":
                log.tensor(key, to_numpy(made[f"state.{tensor}"]))
        if not log.comparisons:
            raise ArtifactError(f"{graph.golden} records no output", where=name, fix="export again")
    return log


def _check_recorded(graph: GraphRecord, given: dict[str, torch.Tensor], name: str) -> None:
    """Raises: ArtifactError when the recorded inputs and state are not those of the graph's signature."""
    for spec in (*graph.spec.inputs, *graph.spec.state):
        recorded = given.get(spec.name)
        if recorded is None or recorded.dtype != torch_dtype(spec.dtype):
            found = "nothing" if recorded is None else str(recorded.dtype).removeprefix("torch.")
            raise ArtifactError(
                f"{graph.golden} records {found} as {spec.name}, the signature says {spec.dtype}",
                where=name,
                fix="copy the artifact again, or export again",
            )


def _engine(graph: GraphRecord, given: dict[str, torch.Tensor]) -> EngineRecord:
    """The engine compiled for the recorded sizes, or one that takes every size."""
    sizes = {
        size: given[tensor.name].shape[axis]
        for tensor in graph.spec.inputs
        for axis, size in enumerate(tensor.shape)
        if isinstance(size, str)
    }
    for engine in graph.engines:
        if engine.dims is None or all(sizes.get(name, size) == size for name, size in engine.dims.items()):
            return engine
    return graph.engines[0]
