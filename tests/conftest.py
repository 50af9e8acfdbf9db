"""Fixtures for every folder of tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from eager_export import export_eager


@pytest.fixture(scope="session")
def eager_artifact() -> Path:
    """All stages of the tiny checkpoint, one rank, float32 on the CPU, nothing compiled. Not to be written into."""
    return export_eager()
