"""Artifacts of the tiny checkpoint, exported once per test run with `mingc export`.

Two are compiled, as what users get: `artifact` and the thinker of `two_rank_artifact`. The others are `eager`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from eager_export import export_eager
from mingc_command import CACHE, CHECKPOINT, Server, mingc, serving

_WIDE_THINKER = (
    *("--stages", "thinker", "--batch-sizes", "1,8,32"),
    *("--max-model-len", 256, "--prefill-chunk-size", 64),
)
_OTHER_STAGES = "vision_encoder,audio_encoder,talker,cfm,audio_vae"


def _export_once(factory: pytest.TempPathFactory, name: str, *options: object) -> Path:
    """The artifact `name` of this run: the first of pytest's workers to ask exports it, the others wait for it."""
    shared = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # a worker's own folder lies in that of the run
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = folder / "report.json"
        if not report.exists():
            words = ("--output", folder / "tiny", "--jobs", 2, "--cache", CACHE, "--json", *options)
            done = mingc("export", CHECKPOINT, *words)
            assert done.code == 0, done.stderr
            report.write_text(done.stdout, encoding="utf-8")
    return folder / "tiny"


@pytest.fixture(scope="session")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages of the tiny checkpoint, one rank."""
    return _export_once(tmp_path_factory, "one-rank")


@pytest.fixture(scope="session")
def two_rank_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with the thinker sharded over two ranks; the other stages, the same for any number, are `eager`."""
    return _export_once(
        tmp_path_factory, "two-ranks", "--tp", 2, "--backend", "aoti", "--backend", f"eager:{_OTHER_STAGES}"
    )


@pytest.fixture(scope="session")
def wide_thinker_artifact() -> Path:
    """The thinker alone, for batches of up to 32, nothing compiled."""
    return export_eager(*_WIDE_THINKER)


@pytest.fixture(scope="session")
def synthetic_thinker_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with random weights, exported from configs alone."""
    configs = tmp_path_factory.mktemp("configs")
    for name in ("config.json", "preprocessor_config.json"):
        shutil.copy(CHECKPOINT / name, configs)
    return export_eager(*_WIDE_THINKER, "--synthetic", checkpoint=configs)


@pytest.fixture(scope="session")
def server(artifact: Path) -> Iterator[Server]:
    with serving(artifact) as running:
        yield running


@pytest.fixture(scope="session")
def two_rank_server(two_rank_artifact: Path) -> Iterator[Server]:
    with serving(two_rank_artifact) as running:
        yield running
