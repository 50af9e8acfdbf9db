"""Runs one compiled engine once on given tensors, for every rank in turn. For parity checks and `mingc verify`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open

from mingc.artifacts.spec import GraphSpec, join_path
from mingc.rank_outputs import whole_output
from mingc.runtime.engines import load_engine


def replay(
    engine: Path,
    backend: str,
    spec: GraphSpec,
    weights: Sequence[Path],
    tensors: Mapping[str, torch.Tensor],
    device: str,
) -> dict[str, torch.Tensor]:
    """Outputs by name and `state.<name>` afterwards, on the CPU. `tensors` are not changed.

    Args:
        weights: one file a rank, of which the first instance's weights are used. Ranks do not meet: their outputs are
            put together here. The state is rank 0's.
    """
    ranks = [_run(engine, backend, spec, path, tensors, torch.device(device)) for path in weights]
    result = {each.name: whole_output(each, [rank[each.name] for rank in ranks]) for each in spec.outputs}
    result.update({f"state.{each.name}": ranks[0][f"state.{each.name}"] for each in spec.state})
    return result


def _run(
    engine: Path,
    backend: str,
    spec: GraphSpec,
    weights: Path,
    tensors: Mapping[str, torch.Tensor],
    place: torch.device,
) -> dict[str, torch.Tensor]:
    loaded = load_engine(backend, engine, place)
    with safe_open(weights, framework="pt") as file:

        def read(names: Sequence[str]) -> dict[str, torch.Tensor]:
            return {name: file.get_tensor(join_path(spec.instances[0], name)).to(place) for name in names}

        loaded.bind(read(loaded.constants()))
        given = read(spec.weights)
    arguments = [tensors[each.name].clone().to(place) for each in (*spec.inputs, *spec.state)]
    with torch.no_grad():
        outputs = loaded.run([*arguments, *given.values()])
    result = {each.name: value.cpu() for each, value in zip(spec.outputs, outputs, strict=True)}
    state = arguments[len(spec.inputs) :]
    result.update({f"state.{each.name}": value.cpu() for each, value in zip(spec.state, state, strict=True)})
    return result
