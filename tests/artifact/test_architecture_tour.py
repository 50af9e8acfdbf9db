"""The tour of docs/architecture.md names files that a spoken chat really passes, in that order."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

from mingc_command import EAGER, ENVIRONMENT

ROOT = Path(__file__).parents[2]
MAX_FILES = 20


def tour() -> list[str]:
    """Numbered files of the tour, in order."""
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    block = text.partition("<!-- tour -->")[2].partition("<!-- /tour -->")[0]
    return re.findall(r"^\d+\. `([^`]+)`", block, re.M)


def test_a_spoken_chat_passes_the_files_of_the_tour_in_order(compiled_artifact: Path) -> None:
    """In a process of its own: threads of other tests would be traced as well."""
    code = (
        "import json, sys; from pathlib import Path; from request_trace import trace_spoken_chat; "
        "print(json.dumps(trace_spoken_chat(Path(sys.argv[1]))))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(compiled_artifact)],
        capture_output=True,
        text=True,
        timeout=600,
        cwd=ROOT,
        env={"PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{EAGER.parent}", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    passed = json.loads(done.stdout.splitlines()[-1])
    named = tour()
    assert 10 <= len(named) <= MAX_FILES
    assert not [name for name in named if name not in passed]
    assert named == sorted(named, key=passed.index), [name for name in passed if name in named]
