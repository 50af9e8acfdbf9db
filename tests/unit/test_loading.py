"""What a server says of itself before any engine is loaded."""

from __future__ import annotations

import pytest

from mingc.artifacts.manifest import Manifest
from mingc.errors import ConfigError
from mingc.runtime.loading import EngineOptions, _info, host_threads


def test_clients_see_the_artifacts_name_or_the_one_asked_for(manifest: Manifest) -> None:
    assert _info(manifest, EngineOptions(), None, None).model == manifest.model
    renamed = EngineOptions(served_model_name="house/voice-1")
    assert _info(manifest, renamed, None, None).model == "house/voice-1"


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name is empty"):
        EngineOptions(served_model_name=name)


def test_beside_a_gpu_the_host_works_in_one_thread_unless_asked_otherwise() -> None:
    assert (host_threads("cuda", None), host_threads("cuda", 4)) == (1, 4)
    assert (host_threads("cpu", None), host_threads("cpu", 4)) == (None, 4)
