"""Grids and launch configurations on an H200 stay those that were measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mingc

ROOT = Path(__file__).parents[2]
EXPECTED = Path(__file__).with_name("h200_launches.jsonl")


def test_launches_on_an_h200_are_unchanged() -> None:
    """Recorded at commit adf7c56, before configurations moved to the GPU table.

    A change that is meant: `python tests/support/triton_launches.py`, one launch a line.
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(mingc.__file__).parents[1])}
    script = ROOT / "tests" / "support" / "triton_launches.py"
    output = subprocess.run(
        [sys.executable, script], env=environment, check=True, capture_output=True, timeout=300
    ).stdout
    expected = [json.loads(line) for line in EXPECTED.read_text(encoding="utf-8").splitlines()]
    assert json.loads(output) == expected
