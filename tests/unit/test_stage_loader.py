"""Stages of an artifact that cannot be loaded, and states that no memory holds."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.spec import GraphSpec, TensorSpec
from mingc.errors import ArtifactError, ConfigError, IntegrityError
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage


def test_weights_without_a_header_are_reported_with_their_file(artifact_path: Path) -> None:
    with pytest.raises(IntegrityError, match="the weights cannot be read") as caught:
        load_stage(open_artifact(artifact_path), "audio_encoder", torch.device("cpu"))
    assert caught.value.where == str(artifact_path / "weights" / "audio.bin")


def test_a_missing_stage_is_reported_with_the_present_ones(artifact_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no stage cfm; it has audio_encoder"):
        load_stage(open_artifact(artifact_path), "cfm", torch.device("cpu"))


class _NeverRun:
    """A graph of which only its spec is asked."""

    def __init__(self, spec: GraphSpec) -> None:
        self.spec = spec


def test_a_state_that_no_memory_holds_is_reported_with_its_size() -> None:
    pages = TensorSpec(name="k_pages", dtype="float32", shape=("KV", 2, 128))
    spec = GraphSpec(name="decode", inputs=(), outputs=(), state=(pages,))
    stage = LoadedStage("thinker", {"decode": cast(Graph, _NeverRun(spec))})
    (kept,) = stage.allocate_state({"KV": 3}, torch.device("cpu")).values()
    assert kept.shape == (3, 2, 128)
    for rows in (1 << 40, 1 << 62):
        with pytest.raises(ConfigError, match=f"state of the thinker: {rows} rows of KV") as caught:
            stage.allocate_state({"KV": rows}, torch.device("cpu"))
        assert "--max-total-tokens" in str(caught.value.fix)
