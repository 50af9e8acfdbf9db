"""Result files of measurements on a CPU, with their provenance; torch is asked for its version only."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from mingc.host.description import installed_version, processor_name

ROOT = Path(__file__).resolve().parent.parent
_COMMIT = re.compile(r"[0-9a-f]{40}")
_commit = ""  # set by `parse_args`
_PACKAGES = ("torch", "onnxruntime", "onnxscript", "tensorrt-rtx", "ray", "starlette", "uvicorn", "numpy")


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse the arguments of a script that has `--json`, and add `--commit`, as `harness.parse_args` does.

    With `--json` the measured commit must be known; without `--commit` it is that of the checkout, which must have no
    changes.
    """
    global _commit
    parser.add_argument("--commit", help="commit that is measured, where the checkout is no git repository")
    given = parser.parse_args()
    if given.json is not None:
        _commit = given.commit or _git("rev-parse", "--verify", "--quiet", "HEAD")
        if not _COMMIT.fullmatch(_commit):
            parser.error(f"--json needs the measured commit, found {_commit!r}: pass --commit HASH")
        if given.commit is None and _git("status", "--porcelain", "--untracked-files=no"):
            parser.error("--json needs a checkout without changes, as the result records its commit")
    return given


def write(path: Path, benchmark: str, figures: list[dict[str, Any]], **more: Any) -> None:
    """Write a result document: provenance, this machine, versions, figures."""
    import mingc

    document = {
        "schema": 1,
        "benchmark": benchmark,
        "commit": _commit,
        # Paths outside the repository are reduced to their last name: where this machine keeps files is irrelevant.
        "command": shlex.join(
            ["python", f"benchmarks/{Path(sys.argv[0]).name}"]
            + [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
        ),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": {"cpu": processor_name(), "cores": os.cpu_count(), "shared": True},
        "versions": {
            "python": platform.python_version(),
            "mingc": mingc.__version__,
            **{name: found for name in _PACKAGES if (found := installed_version(name)) is not None},
        },
        "figures": figures,
        **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, timeout=20, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip()
