"""Voices of a checkpoint whose wave or speaker network cannot be used."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile

from mingc.errors import CheckpointError
from mingc.export.assets.voices import SPEAKER_NETWORK, VoiceMaker, VoiceSource
from mingc.export.checkpoint import open_checkpoint
from mingc.export.stages import discover

_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_RATE = 44_100


def _register(root: Path, wave: np.ndarray[tuple[int], np.dtype[np.float32]]) -> None:
    checkpoint = open_checkpoint(root)
    configs = {name: stage.config(checkpoint) for name, stage in discover().items()}
    wav = root / "voice.wav"
    soundfile.write(wav, wave, _RATE, subtype="FLOAT")
    maker = VoiceMaker(checkpoint, configs, sampler="cfm", vocoder="audio_vae")
    maker.register(VoiceSource(name="one", wav=wav, transcript="one"), root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(_TINY, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "voices").mkdir()
    return tmp_path / "checkpoint"


@pytest.mark.parametrize("length", [0, 400])  # nothing, and less than a frame of the speaker network
def test_a_voice_without_sound_is_refused(root: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match=f"the voice's wave holds {length} samples") as caught:
        _register(root, np.full(length, 0.1, np.float32))
    assert caught.value.where == str(root / "voice.wav")


def test_a_voice_that_is_no_number_is_refused(root: Path) -> None:
    wave = np.full(_RATE, 0.1, np.float32)
    wave[7] = np.nan
    with pytest.raises(CheckpointError, match="values that are not finite"):
        _register(root, wave)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_truncated_speaker_network_is_reported(root: Path, share: float) -> None:
    path = root / "talker" / SPEAKER_NETWORK
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"campplus\.onnx cannot be run") as caught:
        _register(root, np.random.default_rng(0).normal(size=_RATE).astype(np.float32))
    assert caught.value.where == str(path)
