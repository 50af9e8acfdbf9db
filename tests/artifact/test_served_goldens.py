"""The requests that an export records; `test_eager_artifact.py` replays them through services."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest
from eager_export import copy_of
from manifest_edit import edit_manifest
from mingc_command import mingc, serving
from safetensors.numpy import load_file

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.parameters import TalkerParameters
from mingc.errors import ConfigError
from mingc.verify.served.cases import ServedGoldens, read_goldens, write_goldens
from mingc.verify.served.verification import check_service

_KINDS = ("text", "long text", "second turn", "image", "two images", "video", "audio", "image, audio")


def test_every_kind_of_request_is_recorded(eager_artifact: Path) -> None:
    artifact = open_artifact(eager_artifact)
    assert artifact.manifest.served_goldens is not None
    goldens = read_goldens(artifact.path(artifact.manifest.served_goldens))
    cases = {case.name: case for case in goldens.cases}
    assert {*_KINDS, "audio, image", "spoken chat"} <= set(cases)
    speech = [case for case in goldens.cases if case.speech is not None]
    assert {case.speech.voice for case in speech if case.speech} >= {None, "lingguang"}
    settings = cases["speech with settings"].speech
    assert settings is not None and settings.instructions and settings.temperature
    assert len({settings.guidance, settings.sigma, settings.temperature}) == 3, "each has a value of its own"
    assert len(goldens.get(cases["speech in segments"], "patches")) >= 3
    stopping = cases["speech until it stops"]
    talker = artifact.manifest.parameters_of("talker", TalkerParameters)
    stop = goldens.get(stopping, "stop")
    assert len(stop) > talker.min_stop_step + 1 and stop[-1] > talker.stop_threshold
    assert stopping.speech is not None and stopping.speech.max_steps != len(stop), "the stop rule ended it"


def test_requests_differ(eager_artifact: Path) -> None:
    """Answers that do not depend on the input would hide a wrong input."""
    tensors = load_file(eager_artifact / "goldens" / "served.safetensors")
    first = {name: value[0] for name, value in tensors.items() if name.endswith(".logits")}
    for name, logits in first.items():
        for other, others in first.items():
            assert name == other or np.abs(logits - others).max() > 0.05 * np.abs(logits).max(), (name, other)


def test_a_server_checks_itself_before_its_port_opens(eager_artifact: Path, tmp_path: Path) -> None:
    """With three of the recorded requests; `test_eager_artifact.py` replays all of them."""
    artifact = open_artifact(copy_of(eager_artifact, tmp_path))
    path = artifact.path("goldens/served.safetensors")
    goldens = read_goldens(path)
    cases = tuple(case for case in goldens.cases if case.name in ("text", "video", "spoken chat"))
    assert len(cases) == 3

    def store(goldens: ServedGoldens) -> None:
        write_goldens(path, goldens)
        record = {"size_bytes": path.stat().st_size, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        edit_manifest(
            artifact.root, lambda document: document["files"].update({"goldens/served.safetensors": record})
        )

    store(replace(goldens, cases=cases))
    with serving(artifact.root, "--self-check") as server:
        assert httpx.get(f"{server.url}/health", timeout=10).status_code == 200
    tensors = dict(goldens.tensors)
    tensors["video.logits"] = np.roll(tensors["video.logits"], 1, axis=1)
    store(replace(goldens, cases=cases, tensors=tensors))
    done = mingc("serve", artifact.root, "--port", 0, "--self-check")
    assert done.code == 3 and not done.stdout, "no address is announced"
    assert "video.logits" in done.stderr and "FAIL" in done.stderr


def test_an_artifact_without_recorded_requests_cannot_check_itself(
    eager_artifact: Path, tmp_path: Path
) -> None:
    artifact = copy_of(eager_artifact, tmp_path)
    edit_manifest(artifact, lambda document: document.update(served_goldens=None))
    with pytest.raises(ConfigError, match="no recorded requests"):
        check_service(None, artifact)  # type: ignore[arg-type]
