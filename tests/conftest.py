"""Fixtures for every folder of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from eager_export import export_eager

EXPORTED = {
    "artifact",
    "eager_artifact",
    "synthetic_thinker_artifact",
    "two_rank_artifact",
    "wide_thinker_artifact",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Limit the tests of artifacts themselves: their first one waits for an export, which has a limit of its own."""
    for item in items:
        if EXPORTED & {*getattr(item, "fixturenames", ())} and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(120, func_only=True))


@pytest.fixture(scope="session")
def eager_artifact() -> Path:
    """All stages of the tiny checkpoint, one rank, float32 on the CPU, nothing compiled. Not to be written into."""
    return export_eager()
