"""Fixtures: the tiny checkpoint with image generation; config and float32 module of the stage `STAGE` of a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import nn

from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.weights.loading import float32_module


@pytest.fixture(scope="session")
def checkpoint(image_checkpoint: Path) -> Checkpoint:
    return open_checkpoint(image_checkpoint)


@pytest.fixture(scope="module")
def config(checkpoint: Checkpoint, request: pytest.FixtureRequest) -> Any:
    return request.module.STAGE.config(checkpoint)


@pytest.fixture(scope="module")
def module(checkpoint: Checkpoint, config: Any, request: pytest.FixtureRequest) -> nn.Module:
    return float32_module(request.module.STAGE, config, checkpoint)
