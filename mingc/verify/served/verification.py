"""Served goldens of an artifact, replayed through services with all ways to run it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from mingc.artifacts.artifact import Artifact, check_fingerprint, open_artifact
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import Manifest
from mingc.errors import ConfigError
from mingc.host.machine import current_host
from mingc.media.decoding import InProcessDecoder
from mingc.numerics.tolerances import REFERENCE_TOLERANCES
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.step_options import StepOptions
from mingc.verify.comparison import Comparison
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.served.cases import ServedGoldens, asset_records, read_goldens
from mingc.verify.served.replay import ServedReplay

_SMALL_CHUNK = 16  # rows: most prompts are longer than two such chunks
_EVERY_PROMPT = 1 << 10  # more prompts than any chunk holds


def served_options(device: str, world_size: int) -> dict[str, EngineOptions]:
    """Ways to run an artifact, by name.

    The first is the way a server runs it, with several prompts in a chunk. The second uses the alternatives: the other
    choice of host or device sampling and of one or two patches in flight, pairs of small chunks, and no prefix cache.
    With several GPUs only the first is run: torch's symmetric memory is bound to the first process group of a process,
    and a second group waits for it for a minute.
    """
    is_cuda = device == "cuda"
    usual = {"served as usual": EngineOptions(steps=StepOptions(max_prompts=_EVERY_PROMPT))}
    if is_cuda and world_size > 1:
        return usual
    return {
        **usual,
        "served with pairs of small chunks": EngineOptions(
            steps=StepOptions(is_static=not is_cuda, two_batch_overlap=True, max_chunk=_SMALL_CHUNK),
            talker_depth=1 if is_cuda else 2,
            prefix_cache=False,
        ),
    }


def replay_served(artifact: Artifact, progress: Callable[[str], None]) -> list[ComparisonLog]:
    """Compare the parameters with the recorded ones, and replay all recorded requests in every way."""
    goldens = _read(artifact)
    fingerprint = artifact.manifest.fingerprint
    parameters = _log("parameters", artifact.manifest, replace(goldens, tensors={}))
    compare_parameters(artifact.manifest, goldens, parameters)
    logs = [parameters]
    for name, options in served_options(fingerprint.device, fingerprint.world_size).items():
        progress(name)
        log = _log(name, artifact.manifest, goldens)
        logs.append(log)
        with log.case("service"):
            service = open_service(artifact.root, options, media=InProcessDecoder())
            asyncio.run(_replay_and_close(service, goldens, log))
    return logs


@dataclass(frozen=True, kw_only=True, slots=True)
class ServiceReport:
    """Result of the recorded requests on a running service. `comparisons` has the failed ones."""

    passed: bool
    checked: int
    failed: int
    worst_error: float
    comparisons: tuple[Comparison, ...]


def check_service(service: OmniService, root: Path) -> ServiceReport:
    """Replay all recorded requests on a running service without other requests; close it when an answer differs.

    Raises: ConfigError when the artifact has none.
    """
    artifact = open_artifact(root)
    recorded = artifact.manifest.fingerprint
    check_fingerprint(recorded, current_host(recorded.device))
    if artifact.manifest.served_goldens is None:
        raise ConfigError(
            "the artifact holds no recorded requests",
            where="--self-check",
            fix="leave --self-check out, or export again from a checkpoint with tokenizers",
        )
    goldens = _read(artifact)
    log = _log("self-check", artifact.manifest, goldens)
    compare_parameters(artifact.manifest, goldens, log)

    async def run() -> None:
        try:
            with log.case("service"):
                await ServedReplay(service, goldens, log).run()
        finally:
            if log.summary().failed:
                await service.close(shutdown_timeout_s=0.0)

    asyncio.run(run())
    summary = log.summary()
    return ServiceReport(
        passed=not summary.failed,
        checked=summary.checked,
        failed=summary.failed,
        worst_error=summary.worst_error,
        comparisons=tuple(each for each in log.comparisons if each.outcome == "FAIL"),
    )


def compare_parameters(manifest: Manifest, goldens: ServedGoldens, log: ComparisonLog) -> None:
    """Compare parameters, tokenizers and voices with those that the answers were recorded with, one by one.

    No recorded request depends on some of them, such as a limit that none reaches, the default of a field that all
    set, or a voice that none uses.
    """
    parameters = encode(manifest.parameters)
    for stage in sorted({*parameters} | {*goldens.parameters}):
        given, recorded = parameters.get(stage, {}), goldens.parameters.get(stage, {})
        for name in sorted({*given} | {*recorded}):
            is_same = name in given and name in recorded and given[name] == recorded[name]
            what = f"{given.get(name)!r}, recorded with {recorded.get(name)!r}"
            log.rule(f"{stage}.{name}", is_same, what[:200])
    if goldens.assets:
        assets = asset_records(manifest, lambda file: manifest.files[file].sha256)
        for name in sorted({*assets} | {*goldens.assets}):
            is_same = assets.get(name) == goldens.assets.get(name)
            log.rule(name, is_same, "" if is_same else "not what the requests were recorded with")


async def _replay_and_close(service: OmniService, goldens: ServedGoldens, log: ComparisonLog) -> None:
    try:
        await ServedReplay(service, goldens, log).run()
    finally:
        await service.close(shutdown_timeout_s=0.0)


def _read(artifact: Artifact) -> ServedGoldens:
    file = artifact.manifest.served_goldens
    if file is None:
        return ServedGoldens(cases=(), tensors={}, sample_rate=0, parameters=artifact.manifest.parameters)
    return read_goldens(artifact.path(file))


def _log(name: str, manifest: Manifest, goldens: ServedGoldens) -> ComparisonLog:
    dtype = manifest.fingerprint.dtype
    return ComparisonLog(
        name, goldens.tensors, tolerance=REFERENCE_TOLERANCES[dtype], is_exact=dtype == "float32"
    )
