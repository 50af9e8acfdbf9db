"""Bugs planted in the code that serves, one at a time: recorded requests of `mingc verify` notice each of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from served_bugs import BUGS

from mingc.artifacts.artifact import open_artifact
from mingc.media.decoding import InProcessDecoder
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.talker.worker import TalkerWorker
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.served import replay
from mingc.verify.served.cases import ServedGoldens, read_goldens
from mingc.verify.served.replay import ServedReplay
from mingc.verify.served.verification import served_options


@pytest.fixture(scope="module")
def goldens(eager_artifact: Path) -> ServedGoldens:
    artifact = open_artifact(eager_artifact)
    assert artifact.manifest.served_goldens is not None
    return read_goldens(artifact.path(artifact.manifest.served_goldens))


def opened(artifact: Path) -> OmniService:
    return open_service(artifact, served_options("cpu", 1)["served as usual"], media=InProcessDecoder())


@pytest.fixture(scope="module")
def service(eager_artifact: Path) -> Iterator[OmniService]:
    service = opened(eager_artifact)
    yield service
    asyncio.run(service.close(shutdown_timeout_s=0.0))


def failing_rows(service: OmniService, goldens: ServedGoldens, cases: set[str]) -> list[str]:
    """Rows of `mingc verify` that fail, when only these requests are recorded."""
    chosen = replace(goldens, cases=tuple(case for case in goldens.cases if case.name in cases))
    assert len(chosen.cases) == len(cases)
    log = ComparisonLog("served", goldens.tensors, tolerance=1e-4, is_exact=True)
    (loop,) = service.talkers
    assert isinstance(loop.worker, TalkerWorker)
    loop.worker._prefixes.clear()  # of a voice, computed by another version of the code
    asyncio.run(ServedReplay(service, chosen, log).run())
    return [each.name.removeprefix("served: ") for each in log.comparisons if each.outcome == "FAIL"]


def test_without_a_bug_no_row_fails(service: OmniService, goldens: ServedGoldens) -> None:
    assert failing_rows(service, goldens, {name for bug in BUGS.values() for name in bug.cases}) == []


@pytest.mark.parametrize("name", [name for name in BUGS if "disconnect" not in name])
def test_recorded_requests_notice_a_bug(
    name: str, service: OmniService, goldens: ServedGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    bug = BUGS[name]
    monkeypatch.setattr(bug.owner, bug.name, bug.make(getattr(bug.owner, bug.name)))
    assert failing_rows(service, goldens, {*bug.cases})[:1] == [bug.row]


@pytest.mark.parametrize("name", [name for name in BUGS if "disconnect" in name])
def test_recorded_requests_notice_that_a_client_who_leaves_goes_on(
    name: str, eager_artifact: Path, goldens: ServedGoldens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a service of its own, which keeps the request until it ends."""
    bug = BUGS[name]
    monkeypatch.setattr(bug.owner, bug.name, bug.make(getattr(bug.owner, bug.name)))
    monkeypatch.setattr(replay, "_FREED_S", 0.5)
    service = opened(eager_artifact)
    try:
        assert failing_rows(service, goldens, {*bug.cases})[:1] == [bug.row]
    finally:
        asyncio.run(service.close(shutdown_timeout_s=0.0))
