"""The tiny checkpoint as real artifacts, exported once a session by the command a user would type."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
DATA = REPOSITORY / "tests" / "data"
CHECKPOINT = DATA / "tiny-ming"
_END_S = 30


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of this folder share the exported artifacts: one worker runs them, and exports take their time."""
    for item in items:
        if Path(item.fspath).parent == Path(__file__).parent:
            item.add_marker(pytest.mark.xdist_group("artifact"))
            item.add_marker(pytest.mark.timeout(1800))


@dataclass(frozen=True)
class Finished:
    """What a command gave back."""

    code: int
    stdout: str
    stderr: str

    @property
    def document(self) -> Any:
        return json.loads(self.stdout)


def mingc(*words: object) -> Finished:
    """Run `mingc WORDS` to its end in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "mingc", *map(str, words)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=1500,
    )
    return Finished(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Server:
    """A served artifact: its process and base URL."""

    process: subprocess.Popen[str]
    url: str


@contextmanager
def serving(artifact: Path, *options: object) -> Iterator[Server]:
    """`mingc serve` on a port of the system's choice; ended by SIGTERM when the block is left."""
    process = subprocess.Popen(
        [sys.executable, "-m", "mingc", "serve", str(artifact), "--port", "0", *map(str, options)],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        assert url.startswith("http://127.0.0.1:"), f"the server said {url!r} and ended with {process.poll()}"
        yield Server(process, url)
    finally:
        process.terminate()
        try:
            process.wait(_END_S)
        finally:
            process.kill()
            process.wait()
            process.stdout.close()


def _export(folder: Path, *options: object) -> Path:
    # Engines of the same graphs are compiled once a machine; a clean clone starts with an empty folder.
    cache = Path(os.environ.get("MINGC_TEST_CACHE", REPOSITORY / "build" / "engines"))
    artifact = folder / "tiny"
    done = mingc(
        "export", CHECKPOINT, "--output", artifact, "--jobs", 2, "--cache", cache, "--json", *options
    )
    assert done.code == 0, done.stderr
    (folder / "report.json").write_text(done.stdout, encoding="utf-8")
    return artifact


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages of the tiny checkpoint, one rank."""
    return _export(tmp_path_factory.mktemp("one-rank"))


@pytest.fixture(scope="session")
def two_rank_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the thinker cut for two ranks."""
    return _export(tmp_path_factory.mktemp("two-ranks"), "--tp", 2)


@pytest.fixture(scope="session")
def server(artifact: Path) -> Iterator[Server]:
    with serving(artifact) as running:
        yield running


@pytest.fixture(scope="session")
def two_rank_server(two_rank_artifact: Path) -> Iterator[Server]:
    with serving(two_rank_artifact) as running:
        yield running
