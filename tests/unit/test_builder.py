"""What a server says of itself before any engine is loaded."""

from __future__ import annotations

from typing import Any

import pytest

from mingc.artifacts.manifest import Manifest
from mingc.errors import ConfigError
from mingc.runtime.service.builder import EngineOptions, _info, host_threads


def test_clients_see_the_artifacts_name_or_the_one_asked_for(manifest: Manifest) -> None:
    assert _info(manifest, EngineOptions(), None, None).model == manifest.model
    renamed = EngineOptions(served_model_name="house/voice-1")
    assert _info(manifest, renamed, None, None).model == "house/voice-1"


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name is empty"):
        EngineOptions(served_model_name=name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"served_model_name": "house\nvoice"}, r"--served-model-name 'house\\nvoice' holds"),
        ({"max_total_tokens": 10**30}, "--max-total-tokens is 10+, which is above 1099511627776"),
        ({"num_torch_threads": 10**11}, "--threads is 10+, which is above 1024"),
        ({"step_timeout_s": 1e300}, r"--step-timeout is 1e\+300, which is above 1000000000"),
    ],
)
def test_what_no_machine_has_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineOptions(**options)


def test_beside_a_gpu_the_host_works_in_one_thread_unless_asked_otherwise() -> None:
    assert (host_threads("cuda", None), host_threads("cuda", 4)) == (1, 4)
    assert (host_threads("cpu", None), host_threads("cpu", 4)) == (None, 4)
