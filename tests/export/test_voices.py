"""Registration of voices: the recorded ones, and those whose wave or speaker network cannot be used."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from safetensors.numpy import load_file

from mingc.errors import CheckpointError
from mingc.export.assets.voices import SPEAKER_NETWORK, VoiceMaker, VoiceSource, find_voices, posterior_noise
from mingc.export.checkpoint import open_checkpoint
from mingc.export.stages import discover
from mingc.numerics.relative_error import relative_error

_DATA = Path(__file__).parents[1] / "data"
_TINY = _DATA / "tiny-ming"
_RATE = 44_100


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(_DATA / "talker.safetensors")


def test_voices_of_the_checkpoint_are_the_recorded_ones(
    golden: dict[str, np.ndarray], tmp_path: Path
) -> None:
    """From the wave file: resampling, silence on the left, latents, patch embeddings, speaker (talker.md §4.1-4.3)."""
    checkpoint = open_checkpoint(_TINY)
    configs = {name: stage.config(checkpoint) for name, stage in discover().items()}
    (tmp_path / "voices").mkdir()

    def recorded_noise(name: str, shape: tuple[int, int]) -> np.ndarray:
        noise = golden[f"voice.{name}.vae_noise"][0].T  # recorded channel-first
        assert noise.shape == shape
        return np.ascontiguousarray(noise)

    stages = {"sampler": discover()["cfm"], "vocoder": discover()["audio_vae"]}
    maker = VoiceMaker(checkpoint, configs, **stages, noise=recorded_noise)
    sources = find_voices(checkpoint, [])
    assert [(each.name, each.transcript) for each in sources] == [
        ("DB30", "感谢你的认可。"),
        ("lingguang", "诶，你今天有空吗？"),
    ]
    for source in sources:
        record = maker.register(source, tmp_path)
        made, prefix = load_file(tmp_path / record.file), f"voice.{source.name}."
        assert relative_error(made["latents"], golden[prefix + "prompt_wav_lat"]) < 1e-5
        assert relative_error(made["embeds"], golden[prefix + "prompt_wav_emb"][0]) < 1e-5
        assert relative_error(made["speaker"], golden[prefix + "spk_emb"][0]) < 1e-5
        assert record.num_patches == len(golden[prefix + "prompt_wav_emb"][0])


def test_a_wave_is_found_by_its_name_where_the_list_has_a_wrong_path(root: Path) -> None:
    """As in the released checkpoint, whose list has the paths of another machine; a path that is right stays."""
    data = root / "talker" / "data"
    entries = {
        "right": {"prompt_wav_path": "data/spks/prompt.wav", "prompt_text": "one"},
        "moved": {"prompt_wav_path": "/elsewhere/prompts/deep.wav", "prompt_text": "two"},
        "lost": {"prompt_wav_path": "data/spks/nowhere.wav", "prompt_text": "three"},
    }
    (data / "voice_name.json").write_text(json.dumps(entries), encoding="utf-8")
    (data / "spks" / "more").mkdir()
    shutil.copy(data / "spks" / "prompt.wav", data / "spks" / "more" / "deep.wav")
    notes: list[str] = []
    found = {each.name: (each.wav, each.transcript) for each in find_voices(open_checkpoint(root), notes)}
    assert found == {
        "right": (data / "spks" / "prompt.wav", "one"),
        "moved": (data / "spks" / "more" / "deep.wav", "two"),
    }
    assert (
        len(notes) == 2 and "data/spks/more/deep.wav used" in notes[0] and "voice lost left out" in notes[1]
    )
    (data / "voice_name.json").write_text('{"a": {"prompt_wav_path": "x"}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="the voice list cannot be read"):
        find_voices(open_checkpoint(root), [])
    (data / "voice_name.json").unlink()
    assert find_voices(open_checkpoint(root), notes) == () and "no voices" in notes[-1]


def test_the_noise_of_a_voice_is_seeded_by_its_whole_name() -> None:
    names = ("DB30", "DB31", "lingguang", "")
    noises = [posterior_noise(name, (4, 64)) for name in names]
    assert len({noise.tobytes() for noise in noises}) == len(names)
    for name, noise in zip(names, noises, strict=True):
        seed = np.frombuffer(hashlib.sha256(name.encode()).digest(), "<u8")[0]
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64)))
        assert np.array_equal(noise, generator.standard_normal((4, 64), dtype=np.float32))


def _register(root: Path, wave: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, np.ndarray]:
    checkpoint = open_checkpoint(root)
    configs = {name: stage.config(checkpoint) for name, stage in discover().items()}
    wav = root / "voice.wav"
    soundfile.write(wav, wave, _RATE, subtype="FLOAT")
    maker = VoiceMaker(checkpoint, configs, sampler=discover()["cfm"], vocoder=discover()["audio_vae"])
    record = maker.register(VoiceSource(name="one", wav=wav, transcript="one"), root)
    return load_file(root / record.file)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(_TINY, tmp_path / "checkpoint")
    (tmp_path / "checkpoint" / "voices").mkdir()
    return tmp_path / "checkpoint"


def test_the_first_channel_of_a_recording_is_the_voice(root: Path) -> None:
    """Not a mixture: the other channel may hold another speaker, or the first one's echo."""
    generator = np.random.default_rng(3)
    first, second = (generator.normal(0, 0.1, _RATE // 2).astype(np.float32) for _ in range(2))
    alone = _register(root, first)
    beside = _register(root, np.stack([first, second], axis=1))
    assert alone.keys() == beside.keys()
    for name, value in alone.items():
        np.testing.assert_array_equal(beside[name], value, err_msg=name)


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
