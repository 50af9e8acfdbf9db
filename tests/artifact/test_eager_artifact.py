"""The artifact without compiled engines computes what the reference does: other tests rely on it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from eager_engine import EagerEngine
from eager_export import export_eager
from golden_checks import check_goldens

from mingc.artifacts.artifact import open_artifact
from mingc.media.decoding import InProcessDecoder
from mingc.runtime.service.builder import open_service
from mingc.verify.served import verification as served
from mingc.verify.verification import verify


def test_no_engine_is_compiled(eager_artifact: Path) -> None:
    stages = open_artifact(eager_artifact).manifest.stages.values()
    engines = [each for stage in stages for graph in stage.graphs.values() for each in graph.engines]
    assert engines and {each.backend for each in engines} == {"eager"}


@pytest.mark.exhaustive
def test_every_golden_is_met(eager_artifact: Path) -> None:
    check_goldens(eager_artifact)


@pytest.mark.exhaustive
def test_pictures_that_an_export_records_are_drawn_again(image_checkpoint: Path) -> None:
    """`image_artifact` is joined from two exports, of which neither records pictures."""
    report = verify(export_eager(checkpoint=image_checkpoint))
    assert {each.outcome for each in report.comparisons} == {"pass"}
    assert any("changed picture" in each.name for each in report.comparisons)


@pytest.mark.exhaustive
def test_state_that_is_not_updated_is_found_out(
    eager_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The test above sees that engines write into the state that they are given; recorded requests in one way do."""
    run, ways = EagerEngine.run, served.served_options

    def run_on_copies(engine: EagerEngine, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return run(engine, [tensor.clone() for tensor in tensors])

    monkeypatch.setattr(EagerEngine, "run", run_on_copies)
    monkeypatch.setattr(served, "served_options", lambda *given: dict([*ways(*given).items()][:1]))
    outcomes = {each.name: each.outcome for each in verify(eager_artifact).comparisons}
    states = {name for name in outcomes if "state_after." in name}
    failed = {name for name, outcome in outcomes.items() if outcome == "FAIL"}
    requests = {name for name in failed if name.startswith("served")}
    assert states == failed - requests != set()
    assert requests, "requests that are served are wrong as well"


def test_it_opens_as_a_service(eager_artifact: Path) -> None:
    service = open_service(eager_artifact, media=InProcessDecoder())
    try:
        info = service.info
        assert info.has_speech and info.has_image and info.has_audio_input
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))
