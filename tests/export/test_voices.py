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
import torch
from safetensors.numpy import load_file

from mingc.errors import CheckpointError, RequestError
from mingc.export.assets.voices import (
    SPEAKER_NETWORK,
    EagerGraph,
    RecordedVoice,
    VoiceSource,
    find_voices,
    read_voice,
)
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages import discover
from mingc.export.weights.loading import float32_module
from mingc.numerics.relative_error import relative_error
from mingc.runtime.talker.voice_encoder import VoiceEncoder, posterior_noise

_DATA = Path(__file__).parents[1] / "data"
_TINY = _DATA / "tiny-ming"
_RATE = 44_100


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(_DATA / "talker.safetensors")


def _encoder(checkpoint: Checkpoint, **options: Any) -> VoiceEncoder:
    """With eager modules, padded like engines."""
    stages = {"audio_vae": ("encode",), "cfm": ("aggregate", "speaker")}
    graphs, parameters = {}, {}
    for name, methods in stages.items():
        stage = discover()[name]
        config = stage.config(checkpoint)
        module = float32_module(stage, config, checkpoint)
        parameters[name] = stage.parameters(config, StageOptions())
        for graph in stage.graphs(config, Shard(), StageOptions()):
            if graph.spec.name in methods:
                graphs[graph.spec.name] = EagerGraph(
                    graph.spec, torch.no_grad()(getattr(module, graph.method))
                )
    return VoiceEncoder(
        **graphs, flow=parameters["cfm"], vae=parameters["audio_vae"], device=torch.device("cpu"), **options
    )


def test_voices_of_the_checkpoint_are_the_recorded_ones(golden: dict[str, np.ndarray]) -> None:
    """From the wave file: resampling, silence on the left, latents, patch embeddings, speaker (talker.md §4.1-4.3)."""
    checkpoint = open_checkpoint(_TINY)
    sources = find_voices(checkpoint, [])
    assert [(each.name, each.transcript) for each in sources] == [
        ("DB30", "感谢你的认可。"),
        ("lingguang", "诶，你今天有空吗？"),
    ]
    for source in sources:
        prefix = f"voice.{source.name}."

        def recorded_noise(clip: np.ndarray, shape: tuple[int, int], prefix: str = prefix) -> np.ndarray:
            noise = golden[prefix + "vae_noise"][0].T  # recorded channel-first
            assert noise.shape == shape
            return np.ascontiguousarray(noise)

        encoder = _encoder(checkpoint, noise=recorded_noise)
        voice = _read(source, _TINY)
        made = encoder.encode(encoder.prepare(voice.clip, voice.sample_rate), voice.vector)
        assert relative_error(made.latents, golden[prefix + "prompt_wav_lat"][0]) < 1e-5
        assert relative_error(made.embeds, golden[prefix + "prompt_wav_emb"][0]) < 1e-5
        assert relative_error(made.speaker, golden[prefix + "spk_emb"][0]) < 1e-5


@pytest.mark.parametrize("rate", [8000, 48_000])
def test_the_longest_recording_is_the_same_at_every_rate(rate: int) -> None:
    """As long as the engines are, in silence at its rate."""
    encoder = _encoder(open_checkpoint(_TINY))
    samples = int(encoder.max_seconds * rate)
    assert encoder.prepare(np.zeros(samples, np.int16), rate).frames.size / _RATE == encoder.max_seconds
    with pytest.raises(RequestError, match=f"has {encoder.max_seconds + 1:.1f} seconds; this model takes"):
        encoder.prepare(np.zeros(samples + rate, np.int16), rate)


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


def test_the_noise_of_a_voice_is_seeded_by_its_samples() -> None:
    clips = [np.arange(length, dtype=np.int16) for length in (1, 500, 501)]
    noises = [posterior_noise(clip, (4, 64)) for clip in clips]
    assert len({noise.tobytes() for noise in noises}) == len(clips)
    for clip, noise in zip(clips, noises, strict=True):
        content = b"".join(int(sample).to_bytes(2, "little") for sample in clip)
        seed = np.frombuffer(hashlib.sha256(content).digest(), "<u8")[0]
        generator = np.random.Generator(np.random.Philox(key=np.array([seed, 0], np.uint64)))
        assert np.array_equal(noise, generator.standard_normal((4, 64), dtype=np.float32))


def _read(source: VoiceSource, root: Path) -> RecordedVoice:
    return read_voice(source, root / "talker" / SPEAKER_NETWORK, 192, max_seconds=40.0)


def _read_wave(
    root: Path, wave: np.ndarray[Any, np.dtype[np.float32]], subtype: str = "FLOAT"
) -> RecordedVoice:
    wav = root / "voice.wav"
    soundfile.write(wav, wave, _RATE, subtype=subtype)
    return _read(VoiceSource(name="one", wav=wav, transcript="one"), root)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    shutil.copytree(_TINY, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_the_first_channel_of_a_recording_is_the_voice(root: Path) -> None:
    """Not a mixture: the other channel may hold another speaker, or the first one's echo."""
    generator = np.random.default_rng(3)
    first, second = (generator.normal(0, 0.1, _RATE // 2).astype(np.float32) for _ in range(2))
    alone = _read_wave(root, first)
    beside = _read_wave(root, np.stack([first, second], axis=1))
    np.testing.assert_array_equal(beside.clip, alone.clip)
    np.testing.assert_array_equal(beside.vector, alone.vector)


def test_samples_of_16_bits_are_kept_as_they_are(root: Path) -> None:
    samples = np.random.default_rng(3).integers(-32768, 32768, _RATE, dtype=np.int16)
    np.testing.assert_array_equal(_read_wave(root, samples, "PCM_16").clip, samples)


def test_a_wave_that_is_too_long_is_refused_before_anything_is_compiled(root: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has 40\.5 seconds; the VAE encodes 40\.0"):
        _read_wave(root, np.full(int(40.5 * _RATE), 0.1, np.float32))


@pytest.mark.parametrize("length", [0, 400])  # nothing, and less than a frame of the speaker network
def test_a_voice_without_sound_is_refused(root: Path, length: int) -> None:
    with pytest.raises(CheckpointError, match=f"the voice's wave holds {length} samples") as caught:
        _read_wave(root, np.full(length, 0.1, np.float32))
    assert caught.value.where == str(root / "voice.wav")


def test_a_voice_that_is_no_number_is_refused(root: Path) -> None:
    wave = np.full(_RATE, 0.1, np.float32)
    wave[7] = np.nan
    with pytest.raises(CheckpointError, match="values that are not finite"):
        _read_wave(root, wave)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_truncated_speaker_network_is_reported(root: Path, share: float) -> None:
    path = root / "talker" / SPEAKER_NETWORK
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(CheckpointError, match=r"campplus\.onnx cannot be run") as caught:
        _read_wave(root, np.random.default_rng(0).normal(size=_RATE).astype(np.float32))
    assert caught.value.where == str(path)
