"""`mingc export` with a backend whose library ends its process: while it compiles, is checked, or is timed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mingc_command import CHECKPOINT, EAGER, REPOSITORY, mingc_here

from mingc.artifacts.artifact import open_artifact
from mingc.export.compile.backends.aoti import BACKEND as AOTI
from mingc.export.compile.backends.onnx import BACKEND as ONNX

FATAL = REPOSITORY / "tests" / "support" / "fatal"
REASONS = {
    "aggregate": "its process died (signal 6)",  # while it compiles
    "speaker": "its process died (exit code 7)",  # while its engine is checked
    "sample": "its process died (signal 9: out of memory?)",  # while its engine is timed
}


@pytest.fixture(scope="module")
def installed() -> Iterator[None]:
    """The backends `eager` and `fatal`, here and in the processes of exports; `auto` tries no other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FATAL))
        patch.setenv("PYTHONPATH", os.pathsep.join(map(str, (REPOSITORY, EAGER, FATAL))))
        for backend in (AOTI, ONNX):
            patch.setattr(type(backend), "unsupported_reason", lambda *_: "compiles for minutes")
        yield


@pytest.mark.exhaustive
@pytest.mark.usefixtures("installed")
def test_auto_goes_on_without_it_and_records_how_its_process_ended(tmp_path: Path) -> None:
    root = tmp_path / "cfm"
    words = ("--backend", "auto", "--stages", "cfm", "--no-cache", "--jobs", 2, "--output", root)
    done = mingc_here("export", CHECKPOINT, *words, "--json")
    assert done.code == 0, done.stderr
    manifest = open_artifact(root).manifest
    graphs = manifest.stages["cfm"].graphs
    assert {name: graph.backends for name, graph in graphs.items()} == dict.fromkeys(REASONS, ("eager",))
    for name, graph in graphs.items():
        assert graph.trial is not None
        refused = {each.backend: each.reason for each in graph.trial.refused}
        assert refused["fatal"] == REASONS[name]
        # One backend alone is not timed, unless the others are refused only then.
        assert {each.backend for each in graph.trial.timings} == ({"eager"} if name == "sample" else set())
        assert f"fatal was not used for cfm.{name}: {REASONS[name]}" in done.document["notes"]
    assert {path.suffix for path in (root / "engines").iterdir()} == {".eager"}
    verified = mingc_here("verify", root, "--json")
    assert verified.code == 0, verified.stderr


@pytest.mark.usefixtures("installed")
def test_a_backend_that_was_asked_for_ends_the_export(tmp_path: Path) -> None:
    root = tmp_path / "encoder"
    words = ("--backend", "fatal", "--stages", "audio_encoder", "--no-cache", "--jobs", 1, "--output", root)
    failed = mingc_here("export", CHECKPOINT, *words)
    assert failed.code == 1 and "the process that worked on this died (out of memory?)" in failed.stderr
    assert "where: audio_encoder.encode" in failed.stderr and not root.exists()
