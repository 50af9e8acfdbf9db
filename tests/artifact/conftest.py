"""Artifacts of the tiny checkpoint, exported once per test run with `mingc export`.

One is compiled, as what users get: `compiled_artifact`. Four of its 17 graphs are left out, those that no server runs;
`make test-all` compiles them in tests/export/test_cfm.py and test_audio_vae.py. The other artifacts are `eager`;
tests/export/test_thinker_shards.py has a compiled engine of several ranks.
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

_COMPILED = (
    *("--backend", "aoti:audio_encoder,vision_encoder,thinker,talker"),
    *("--backend", "partly:cfm,audio_vae"),
)


def _export_once(factory: pytest.TempPathFactory, name: str, *options: object) -> Path:
    """The artifact `name` of this run: the first of pytest's workers to ask exports it, the others wait for it."""
    shared, jobs = factory.getbasetemp(), 2
    if "PYTEST_XDIST_WORKER" in os.environ:
        # A worker's own folder lies in that of the run. Other workers keep the other processors busy.
        shared, jobs = shared.parent, 1
    folder = shared / name
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        report = folder / "report.json"
        if not report.exists():
            words = ("--output", folder / "tiny", "--jobs", jobs, "--cache", CACHE, "--json", *options)
            done = mingc("export", CHECKPOINT, *words)
            assert done.code == 0, done.stderr
            report.write_text(done.stdout, encoding="utf-8")
    return folder / "tiny"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Move files that need the compiled artifact behind the others, but the first of them.

    Its worker exports the artifact, and other workers have no need to wait.
    """
    places = [index for index, item in enumerate(items) if item.path.parent == Path(__file__).parent]
    ours = [items[index] for index in places]
    _, *later = dict.fromkeys(item.path for item in ours if _needs_compiled(item)) or (None,)
    ours.sort(key=lambda item: item.path in later)
    for index, item in zip(places, ours, strict=True):
        items[index] = item


def _needs_compiled(item: pytest.Item) -> bool:
    return "compiled_artifact" in getattr(item, "fixturenames", ())


@pytest.fixture(scope="session")
def compiled_artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All stages of the tiny checkpoint, one rank. Of `cfm` and `audio_vae`, what a server runs is compiled."""
    return _export_once(tmp_path_factory, "one-rank", *_COMPILED)


@pytest.fixture(scope="session")
def two_rank_artifact() -> Path:
    """The same with the thinker sharded over two ranks, nothing compiled."""
    return export_eager("--tp", 2)


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
def server(compiled_artifact: Path) -> Iterator[Server]:
    with serving(compiled_artifact) as running:
        yield running


@pytest.fixture(scope="session")
def two_rank_server(two_rank_artifact: Path) -> Iterator[Server]:
    with serving(two_rank_artifact) as running:
        yield running
