"""Run one compiled engine on given tensors, rank by rank, for parity checks and `mingc verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.file_region import FileRegion
from mingc.artifacts.spec import GraphSpec, join_path
from mingc.errors import ArtifactError
from mingc.numerics.gather_shards import gather_shards
from mingc.runtime.engines.backends import load_engine
from mingc.runtime.engines.stage_loader import opened_weights


def run_engine(
    engine: Path,
    backend: str,
    spec: GraphSpec,
    weights: Sequence[Sequence[Path | FileRegion]],
    calls: Sequence[Mapping[str, torch.Tensor]],
    device: str,
) -> list[dict[str, torch.Tensor]]:
    """Run the calls in order. Returns every call's outputs by name and its new `state.<name>`, on the CPU.

    Args:
        weights: the files of each rank; the weights of the first layer instance are used. Ranks run without
            collectives and their outputs are combined here. The state is rank 0's.
        calls: inputs and state by name; they are not modified.
    """
    ranks = [_run_rank(engine, backend, spec, files, calls, torch.device(device)) for files in weights]
    results = []
    for parts in zip(*ranks, strict=True):
        made = {each.name: gather_shards(each, [part[each.name] for part in parts]) for each in spec.outputs}
        made.update({f"state.{each.name}": parts[0][f"state.{each.name}"] for each in spec.state})
        results.append(made)
    return results


def _run_rank(
    engine: Path,
    backend: str,
    spec: GraphSpec,
    weights: Sequence[Path | FileRegion],
    calls: Sequence[Mapping[str, torch.Tensor]],
    place: torch.device,
) -> list[dict[str, torch.Tensor]]:
    loaded = load_engine(backend, engine, place)
    with opened_weights(weights) as files:

        def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
            paths = {name: join_path(spec.layer_instances[0], name) for name in names}
            absent = sorted({*paths.values()} - files.keys())
            if absent:
                raise ArtifactError(
                    f"engine needs weights that the artifact lacks: {', '.join(absent[:5])}",
                    where=f"{engine.name}, {', '.join(each.name for each in weights)}",
                    fix="copy the artifact again, or export again",
                )
            with torch.inference_mode():  # or a view keeps its base, also when it is emptied
                return {name: files[path].get_tensor(path).to(place) for name, path in paths.items()}

        bound = read(loaded.constants())
        loaded.bind(bound)
        given = read(spec.weights)
    results = []
    for tensors in calls:
        arguments = [tensors[each.name].clone().to(place) for each in (*spec.inputs, *spec.state)]
        with torch.no_grad():
            outputs = loaded.run([*arguments, *given.values()])
        made = {each.name: value.cpu() for each, value in zip(spec.outputs, outputs, strict=True)}
        state = arguments[len(spec.inputs) :]
        made.update(
            {f"state.{each.name}": value.cpu() for each, value in zip(spec.state, state, strict=True)}
        )
        results.append(made)
    with torch.inference_mode():
        for weight in bound.values():
            # AOTInductor's engines (torch 2.11 to 2.13) never give up their reference to a bound tensor.
            weight.set_()  # type: ignore[call-overload]
    return results


def to_numpy(value: torch.Tensor) -> NDArray[np.generic]:
    """Copy `value` to the host; floats become float32."""
    value = value.detach().cpu()
    array: NDArray[np.generic] = (value.float() if value.is_floating_point() else value).numpy()
    return array
