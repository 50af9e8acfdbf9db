"""Engines are unpacked to be loaded: what becomes of the files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from mingc_command import ENVIRONMENT, REPOSITORY

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
