"""The Ray instance of the tests, where it does not start."""

from __future__ import annotations

import os
from typing import Any

import pytest
import ray
from ray import serve
from ray_cluster import ray_cluster


def test_a_ray_that_does_not_start_is_not_started_again_by_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def refuse(**_: Any) -> None:
        raise RuntimeError("no raylet")

    monkeypatch.setattr(ray, "init", refuse)
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("ray"))
    monkeypatch.setattr(serve, "shutdown", lambda: calls.append("serve"))
    before = dict(os.environ)
    with pytest.raises(RuntimeError, match="no raylet"), ray_cluster():
        pass
    assert calls == ["ray"]
    assert dict(os.environ) == before
