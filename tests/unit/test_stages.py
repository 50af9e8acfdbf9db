"""Stages of a bundle that cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mingc.artifacts.bundle import open_bundle
from mingc.errors import BundleError, IntegrityError
from mingc.runtime.stages import load_stage


def test_weights_without_a_header_are_told_with_their_file(bundle_path: Path) -> None:
    with pytest.raises(IntegrityError, match="the weights cannot be read") as caught:
        load_stage(open_bundle(bundle_path), "audio_encoder", torch.device("cpu"))
    assert caught.value.where == str(bundle_path / "weights" / "audio.bin")


def test_a_stage_that_is_not_there_is_told_with_those_that_are(bundle_path: Path) -> None:
    with pytest.raises(BundleError, match="no stage cfm; it has audio_encoder"):
        load_stage(open_bundle(bundle_path), "cfm", torch.device("cpu"))
