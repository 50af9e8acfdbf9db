"""Defects planted in a finished artifact, hashes and all: which check refuses each of them."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from artifact_defects import DEFECTS, Caught, Defect, plant_defect

from mingc.artifacts.artifact import Artifact, check_fingerprint, check_hashes, open_artifact
from mingc.errors import IntegrityError, MingcError
from mingc.host.machine import current_host
from mingc.media.decoding import InProcessDecoder
from mingc.runtime.service.builder import open_service
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.graph_goldens import replay_graph
from mingc.verify.served.cases import read_goldens
from mingc.verify.served.replay import ServedReplay
from mingc.verify.served.verification import compare_parameters, served_options
from mingc.verify.verification import engine_tolerance


def refused_by_requests(artifact: Artifact, names: tuple[str, ...]) -> Caught | None:
    """As `mingc verify`, for some of the recorded requests: whether no service opens, or an answer differs."""
    assert artifact.manifest.served_goldens is not None
    goldens = read_goldens(artifact.path(artifact.manifest.served_goldens))
    chosen = replace(goldens, cases=tuple(case for case in goldens.cases if case.name in names))
    assert len(chosen.cases) == len(names)
    log = ComparisonLog("served", goldens.tensors, tolerance=1e-4, is_exact=True)
    try:
        service = open_service(
            artifact.root, served_options("cpu", 1)["served as usual"], media=InProcessDecoder()
        )
    except MingcError:
        return "serve"

    async def run() -> None:
        try:
            if names:
                await ServedReplay(service, chosen, log).run()
        finally:
            await service.close(shutdown_timeout_s=0.0)

    asyncio.run(run())
    if log.summary().failed:
        return "requests"
    compare_parameters(artifact.manifest, goldens, log)
    return "parameters" if log.summary().failed else None


def refused_by_engine_goldens(artifact: Artifact, stages: tuple[str, ...]) -> bool:
    """As `mingc verify`, for some stages."""
    manifest = artifact.manifest
    for stage in stages:
        record = manifest.stages[stage]
        for name, graph in record.graphs.items():
            log = replay_graph(
                artifact,
                record,
                graph,
                name=f"{stage}.{name}",
                tolerance=engine_tolerance(graph, manifest.fingerprint.dtype),
            )
            if log.summary().failed:
                return True
    return False


def first_check_that_refuses(root: Path, defect: Defect) -> Caught:
    """`verify` opens the artifact, replays the goldens of its engines, builds services and sends them requests."""
    try:
        artifact = open_artifact(root)
        recorded = artifact.manifest.fingerprint
        check_fingerprint(recorded, current_host(recorded.device))
        check_hashes(artifact)  # the defect is in the content: hashes never betray it
    except MingcError as error:
        assert not isinstance(error, IntegrityError)
        return "load"
    if refused_by_engine_goldens(artifact, defect.stages):
        return "engine golden"
    return refused_by_requests(artifact, defect.requests) or "no"


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused_by_the_check_that_the_documentation_names(
    name: str, eager_artifact: Path, tmp_path: Path
) -> None:
    defect = DEFECTS[name]
    root = plant_defect(defect, eager_artifact, tmp_path)
    assert first_check_that_refuses(root, defect) == defect.caught


def test_a_copy_without_a_defect_is_refused_by_no_check(eager_artifact: Path, tmp_path: Path) -> None:
    requests = tuple({name for each in DEFECTS.values() for name in each.requests})
    none = Defect("nothing", lambda root: None, "no", ("cfm", "talker", "audio_vae", "thinker"), requests)
    root = plant_defect(none, eager_artifact, tmp_path)
    assert first_check_that_refuses(root, none) == "no"


def test_no_defect_needs_a_reference() -> None:
    assert all(each.caught != "no" for each in DEFECTS.values())
