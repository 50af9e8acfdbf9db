"""Two exports of the same input differ in times only; an interrupted one leaves nothing but the cache.

Engines are compared by name: their bytes are the same when they come from the cache, which the backend of the tests
does not use.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from mingc_command import CHECKPOINT, ENVIRONMENT, REPOSITORY, mingc

WORDS = ("export", CHECKPOINT, "--backend", "eager", "--stages", "audio_encoder", "--jobs", 1)


def _without_times(value: Any) -> Any:
    """The document without seconds of compiling, and without the hash that covers them."""
    if isinstance(value, dict):
        return {key: _without_times(item) for key, item in value.items() if key != "compile_seconds"}
    return [_without_times(item) for item in value] if isinstance(value, list) else value


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
def test_two_exports_differ_in_time_only_and_an_interrupted_one_leaves_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "mingc", *map(str, WORDS), "--output", str(tmp_path / "one")],
        cwd=REPOSITORY,
        env=ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        for line in process.stderr:
            if line.startswith("export: 1/"):  # the weights are written
                process.send_signal(signal.SIGINT)
                break
        assert process.wait(120) == 130
    finally:
        process.kill()
        process.wait()
        process.stderr.close()
    assert not list(tmp_path.iterdir())
    documents = []
    for name, options in (("one", ()), ("two", ("--no-cache",))):
        done = mingc(*WORDS, "--output", tmp_path / name, *options)
        assert done.code == 0, done.stderr
        document = json.loads((tmp_path / name / "manifest.json").read_text())
        assert document.pop("sha256")
        files = document["files"]
        engines = [files.pop(file) for file in sorted(files) if file.startswith("engines/")]
        assert len(engines) == 1
        documents.append(_without_times(document))
    assert documents[0] == documents[1]
    assert {file.partition("/")[0] for file in documents[0]["files"]} >= {"weights", "goldens"}
