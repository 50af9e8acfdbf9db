"""Artifacts of the tiny checkpoint of other shapes and ranks, nothing compiled, and servers of artifacts."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from eager_export import export_eager, joined
from mingc_command import CHECKPOINT, Server, serving

_WIDE_THINKER = (
    *("--stages", "thinker", "--batch-sizes", "1,8,32"),
    *("--max-model-len", 256, "--prefill-chunk-size", 64),
)


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
def two_rank_artifact(eager_artifact: Path) -> Path:
    """The same with the thinker sharded over two ranks, nothing compiled."""
    return joined(eager_artifact, export_eager("--tp", 2, "--stages", "thinker"))


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
