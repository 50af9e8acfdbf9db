"""Runs one compiled engine once on given tensors, in one process a rank. For parity checks and `mingc verify`."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from mingc.artifacts.codec import decode, encode
from mingc.artifacts.spec import GraphSpec
from mingc.errors import WorkerError
from mingc.runtime.engines import load_engine

_TIMEOUT_S = 300


def replay(
    engine: Path,
    backend: str,
    spec: GraphSpec,
    weights: Sequence[Path],
    tensors: Mapping[str, torch.Tensor],
    device: str,
) -> dict[str, torch.Tensor]:
    """Outputs by name and `state.<name>` afterwards, of rank 0, on the CPU. `tensors` are not changed.

    One weights file: in this process. Several: one child process a rank, joined in the engine's group.
    """
    if len(weights) == 1:
        return _run(engine, backend, spec, weights[0], tensors, device)
    with tempfile.TemporaryDirectory(prefix="mingc-replay-") as name:
        folder = Path(name)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "tensors.safetensors")
        jobs = []
        for rank, path in enumerate(weights):
            job = {
                "engine": str(engine),
                "backend": backend,
                "spec": encode(spec),
                "weights": str(path),
                "device": device,
                "rank": rank,
                "world_size": len(weights),
                "folder": name,
            }
            jobs.append(
                subprocess.Popen(
                    [sys.executable, "-m", "mingc.runtime.replay", json.dumps(job)],
                    stdin=subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        try:
            for rank, process in enumerate(jobs):
                _, errors = process.communicate(timeout=_TIMEOUT_S)
                if process.returncode != 0:
                    raise WorkerError(
                        f"replay failed: {errors.strip()[-2000:]}", where=f"rank {rank}: {engine}"
                    )
        finally:
            for process in jobs:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        return load_file(folder / "outputs.safetensors")


def _run(
    engine: Path,
    backend: str,
    spec: GraphSpec,
    weights: Path,
    tensors: Mapping[str, torch.Tensor],
    device: str,
) -> dict[str, torch.Tensor]:
    place = torch.device(device)
    loaded = load_engine(backend, engine, place)
    bound = {name: value.to(place) for name, value in load_file(weights).items()}
    loaded.bind(bound)
    arguments = [tensors[each.name].clone().to(place) for each in (*spec.inputs, *spec.state)]
    with torch.no_grad():
        outputs = loaded.run(arguments)
    result = {each.name: value.cpu() for each, value in zip(spec.outputs, outputs, strict=True)}
    state = arguments[len(spec.inputs) :]
    result.update({f"state.{each.name}": value.cpu() for each, value in zip(spec.state, state, strict=True)})
    return result


def _main() -> None:
    from mingc.runtime import distributed

    job = json.loads(sys.argv[1])
    folder = Path(job["folder"])
    device = f"cuda:{job['rank']}" if job["device"] == "cuda" else job["device"]
    distributed.init(job["rank"], job["world_size"], f"file://{folder / 'rendezvous'}")
    outputs = _run(
        Path(job["engine"]),
        job["backend"],
        decode(GraphSpec, job["spec"]),
        Path(job["weights"]),
        load_file(folder / "tensors.safetensors"),
        device,
    )
    if job["rank"] == 0:
        save_file(
            {name: value.contiguous() for name, value in outputs.items()}, folder / "outputs.safetensors"
        )
    distributed.shutdown()


if __name__ == "__main__":
    _main()
