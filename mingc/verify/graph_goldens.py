"""Replay of one graph: the inputs, state and outputs that the export recorded in the artifact."""

from __future__ import annotations

from collections.abc import Collection

import torch
from safetensors.torch import load_file

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import EngineRecord, GraphRecord, StageRecord
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError, MingcError
from mingc.runtime.engines.stage_loader import weights_regions
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.engine_run import run_engine, to_numpy


def replay_graph(
    artifact: Artifact, stage: StageRecord, graph: GraphRecord, *, name: str, tolerance: float
) -> ComparisonLog:
    """Run the graph's engine on the recorded tensors for every rank; compare outputs and state."""
    recorded = load_file(artifact.path(graph.golden))
    references = {key: to_numpy(value) for key, value in recorded.items()}
    log = ComparisonLog(name, references, tolerance=tolerance, is_exact=False)
    log.note = "self-check"
    given: dict[str, torch.Tensor] = {}
    for key, value in recorded.items():
        kind, _, tensor = key.partition(".")
        if kind in ("in", "state"):
            given[tensor] = value
            log.input(key)
    with log.case("replay"):
        _check_recorded(graph, given, name)
        _check_complete(stage, graph, references, name)
        made = _run(artifact, stage, graph, _engine(graph, given), given)
        for key in references:
            kind, _, tensor = key.partition(".")
            if kind == "out":
                log.tensor(key, to_numpy(made[tensor]))
            elif kind == "state_after":
                log.tensor(key, to_numpy(made[f"state.{tensor}"]))
    return log


def _check_recorded(graph: GraphRecord, given: dict[str, torch.Tensor], name: str) -> None:
    """Raises: ArtifactError when the recorded inputs and state do not fit the graph's signature."""
    for spec in (*graph.spec.inputs, *graph.spec.state):
        recorded = given.get(spec.name)
        if recorded is None or recorded.dtype != torch_dtype(spec.dtype):
            found = "nothing" if recorded is None else str(recorded.dtype).removeprefix("torch.")
            raise ArtifactError(
                f"{graph.golden} records {found} as {spec.name}, the signature says {spec.dtype}",
                where=name,
                fix="copy the artifact again, or export again",
            )


def _check_complete(stage: StageRecord, graph: GraphRecord, recorded: Collection[str], name: str) -> None:
    """Raises: ArtifactError when an output or a state of the graph's signature is not recorded.

    The export records no state of sharded stages, because every rank has another one.
    """
    expected = [f"out.{each.name}" for each in graph.spec.outputs]
    if len(stage.weights) == 1:
        expected += [f"state_after.{each.name}" for each in graph.spec.state]
    absent = [key for key in expected if key not in recorded]
    if absent:
        raise ArtifactError(f"{graph.golden} records no {absent[0]}", where=name, fix="export again")


def _run(
    artifact: Artifact,
    stage: StageRecord,
    graph: GraphRecord,
    engine: EngineRecord,
    given: dict[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Outputs and state of one call. Raises: ArtifactError when the engine fails."""
    try:
        (made,) = run_engine(
            artifact.path(engine.file),
            engine.backend,
            graph.spec,
            [weights_regions(artifact, stage, rank) for rank in range(len(stage.weights))],
            [given],
            artifact.manifest.fingerprint.device,
        )
    except (MingcError, MemoryError, torch.OutOfMemoryError):  # the command says how to get memory
        raise
    except Exception as error:  # errors of backends have no other class in common
        raise ArtifactError(
            f"the engine does not run on the recorded inputs: {type(error).__name__}: {str(error)[:200]}",
            where=engine.file,
            fix="copy the artifact again, or export again",
        ) from error
    return made


def _engine(graph: GraphRecord, given: dict[str, torch.Tensor]) -> EngineRecord:
    """Find the engine compiled for the recorded sizes, or one that takes every size."""
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
