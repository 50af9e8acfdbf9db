"""Served goldens of an artifact, replayed through services that run it in every way it can be run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest
from mingc.runtime.service.builder import EngineOptions, open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.thinker.worker import StepOptions
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.served.cases import ServedGoldens, read_goldens
from mingc.verify.served.replay import ServedReplay

_SMALL_CHUNK = 16  # rows: most prompts are longer than two such chunks
_EVERY_PROMPT = 1 << 10  # more prompts than any chunk holds


def served_options(device: str, world_size: int) -> dict[str, EngineOptions]:
    """Ways to run an artifact, by name.

    The first is the way it is served, with several prompts in a chunk. The second is the other one of host and device
    sampling, of one and two patches in flight, with small chunks in pairs.
    """
    is_cuda = device == "cuda"
    return {
        "served as usual": EngineOptions(steps=StepOptions(max_prompts=_EVERY_PROMPT)),
        "served with pairs of small chunks": EngineOptions(
            steps=StepOptions(is_static=not is_cuda, two_batch_overlap=True, max_chunk=_SMALL_CHUNK),
            talker_depth=1 if is_cuda else 2,
        ),
    }


def replay_served(
    artifact: Artifact, progress: Callable[[str], None], *, tolerances: Mapping[str, float]
) -> list[ComparisonLog]:
    """Replay all recorded requests in every way. `tolerances`: by dtype, see `ComparisonLog`."""
    goldens = _read(artifact)
    fingerprint = artifact.manifest.fingerprint
    logs = []
    for name, options in served_options(fingerprint.device, fingerprint.world_size).items():
        progress(name)
        log = _log(name, artifact.manifest, goldens, tolerances)
        logs.append(log)
        with log.case("service"):
            service = open_service(artifact.root, options)
            asyncio.run(_replay_and_close(service, goldens, log))
    return logs


async def check_service(
    service: OmniService, artifact: Artifact, *, tolerances: Mapping[str, float]
) -> ComparisonLog:
    """Replay all recorded requests on a running service, on its event loop."""
    goldens = _read(artifact)
    log = _log("self-check", artifact.manifest, goldens, tolerances)
    await ServedReplay(service, goldens, log).run()
    return log


async def _replay_and_close(service: OmniService, goldens: ServedGoldens, log: ComparisonLog) -> None:
    try:
        await ServedReplay(service, goldens, log).run()
    finally:
        await service.close(shutdown_timeout_s=0.0)


def _read(artifact: Artifact) -> ServedGoldens:
    file = artifact.manifest.served_goldens
    return ServedGoldens(cases=(), tensors={}) if file is None else read_goldens(artifact.path(file))


def _log(
    name: str, manifest: Manifest, goldens: ServedGoldens, tolerances: Mapping[str, float]
) -> ComparisonLog:
    dtype = manifest.fingerprint.dtype
    return ComparisonLog(name, goldens.tensors, tolerance=tolerances[dtype], is_exact=dtype == "float32")
