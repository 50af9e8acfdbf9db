"""One Ray instance for the tests that need one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from ray_cluster import prepare_environment, ray_cluster

prepare_environment()  # before a test file imports Ray


@pytest.fixture(scope="module")
def proxy() -> Iterator[str]:
    """URL of the proxy of a Ray instance with Serve."""
    with ray_cluster() as url:
        yield url
