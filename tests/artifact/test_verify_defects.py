"""Defects planted in a finished artifact, hashes and all: which check refuses each of them."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from artifact_defects import DEFECTS, Caught, Defect, defect_table, plant_defect

from mingc.artifacts.artifact import Artifact, check_fingerprint, check_hashes, open_artifact
from mingc.errors import IntegrityError, MingcError
from mingc.host import current_host
from mingc.runtime.service.builder import open_service
from mingc.verify import self_check
from mingc.verify.verification import engine_tolerance

DOCUMENT = Path(__file__).parents[2] / "docs" / "verification.md"


def refused_by_serve(root: Path) -> bool:
    try:
        service = open_service(root)
    except MingcError:
        return True
    asyncio.run(service.close(shutdown_timeout_s=1.0))
    return False


def refused_by_engine_goldens(artifact: Artifact, stages: tuple[str, ...]) -> bool:
    """As `mingc verify`, for some stages."""
    manifest = artifact.manifest
    for stage in stages:
        record = manifest.stages[stage]
        for name, graph in record.graphs.items():
            log = self_check.replay(
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
    """`verify` opens the artifact and replays its goldens; `serve` opens it and builds a service."""
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
    return "serve" if refused_by_serve(root) else "no"


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused_by_the_check_that_the_documentation_names(
    name: str, eager_artifact: Path, tmp_path: Path
) -> None:
    defect = DEFECTS[name]
    root = plant_defect(defect, eager_artifact, tmp_path)
    assert first_check_that_refuses(root, defect) == defect.caught


def test_a_copy_without_a_defect_is_refused_by_no_check(eager_artifact: Path, tmp_path: Path) -> None:
    none = Defect("nothing", lambda root: None, "no", ("cfm", "talker", "audio_vae", "thinker"))
    root = plant_defect(none, eager_artifact, tmp_path)
    assert first_check_that_refuses(root, none) == "no"


def test_the_documentation_has_the_table_of_defects() -> None:
    assert len(DEFECTS) >= 40
    assert defect_table() in DOCUMENT.read_text(encoding="utf-8")
