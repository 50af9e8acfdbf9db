"""Engines are unpacked to be loaded and keep their weights: what becomes of the files and the weights."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_checks import compiled_file
from mingc_command import ENVIRONMENT, REPOSITORY
from safetensors.torch import load_file
from torch.multiprocessing.reductions import StorageWeakRef

from mingc.artifacts.artifact import open_artifact
from mingc.runtime.engines.backends.aoti import AotiEngine
from mingc.runtime.engines.stage_loader import weights_regions
from mingc.verify.engine_run import run_engine

LOAD = """
import os, sys
from pathlib import Path
import torch
from mingc.artifacts.artifact import open_artifact
from mingc.runtime.engines.stage_loader import load_stage
stage = load_stage(open_artifact(Path(sys.argv[1])), "thinker", torch.device("cpu"))
if sys.argv[2] == "killed":
    os._exit(9)
"""


def test_a_process_leaves_nothing_and_removes_what_a_killed_one_left(
    compiled_artifact: Path, tmp_path: Path
) -> None:
    def load(end: str) -> int:
        command = [sys.executable, "-c", LOAD, str(compiled_artifact), end]
        environment = {**ENVIRONMENT, "TMPDIR": str(tmp_path)}
        return subprocess.run(command, cwd=REPOSITORY, env=environment, timeout=120, check=False).returncode

    assert load("in order") == 0
    assert list(tmp_path.iterdir()) == []
    assert load("killed") == 9
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("mingc-engines-") and list(left.iterdir())
    assert load("in order") == 0
    assert list(tmp_path.iterdir()) == []


def test_a_run_for_a_check_keeps_no_weights(compiled_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AOTInductor's engines keep what was bound to them for as long as the process lives."""
    artifact = open_artifact(compiled_artifact)
    stage = artifact.manifest.stages["audio_encoder"]
    graph = stage.graphs["encode"]
    golden = load_file(artifact.path(graph.golden))
    call = {name.removeprefix("in."): value for name, value in golden.items() if name.startswith("in.")}
    weak: Any = StorageWeakRef  # it has no types
    storages = []
    bind = AotiEngine.bind

    def watched(engine: AotiEngine, weights: Mapping[str, torch.Tensor]) -> None:
        storages.extend(weak(each.untyped_storage()) for each in weights.values())
        bind(engine, weights)

    monkeypatch.setattr(AotiEngine, "bind", watched)
    engine = compiled_file(compiled_artifact, "audio_encoder", "encode")
    run_engine(engine, "aoti", graph.spec, [weights_regions(artifact, stage, 0)], [call], "cpu")
    gc.collect()
    assert storages and all(each.expired() for each in storages)
