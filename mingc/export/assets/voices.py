"""Registration of the checkpoint's voices at export; serving then needs neither VAE encoder nor speaker network.

Source: spec talker.md §4.1-§4.3 (`Talker.register_prompt_wav` upstream). The posterior's noise is sampled from
a generator seeded by the voice's name, so that two exports give the same voice.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file

from mingc.artifacts.manifest import VoiceRecord
from mingc.errors import CheckpointError, ConfigError
from mingc.export.checkpoint import Checkpoint, lfs_problem
from mingc.export.stage import Stage, StageOptions
from mingc.export.weights.loading import float32_module
from mingc.media.dsp.fbank import kaldi_fbank
from mingc.media.dsp.resample import resample

SPEAKER_NETWORK = "campplus.onnx"
_SPEAKER_HZ = 16_000  # CAM++ was trained on 16 kHz filter banks
_SHORTEST_S = 0.1  # the speaker network looks at whole frames of 25 ms
_MANIFEST = Path("data") / "voice_name.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class VoiceSource:
    """A voice of the checkpoint: a recording and its transcript."""

    name: str
    wav: Path
    transcript: str


def find_voices(checkpoint: Checkpoint, notes: list[str]) -> tuple[VoiceSource, ...]:
    """The voices of talker/data/voice_name.json whose recording exists; appends a line to `notes` for each fix-up.

    The released manifest points at an authoring folder (spec: checkpoint.md §6), so a path that does not exist is
    searched by file name below talker/data.
    """
    talker = checkpoint.root / "talker"
    manifest = talker / _MANIFEST
    if not manifest.is_file():
        notes.append("no talker/data/voice_name.json: the artifact has no voices")
        return ()
    try:
        entries = {
            str(name): (str(entry["prompt_wav_path"]), str(entry["prompt_text"]))
            for name, entry in json.loads(manifest.read_text(encoding="utf-8")).items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"the voice list cannot be read: {error!r}",
            where=str(manifest),
            fix="give each voice a prompt_wav_path and a prompt_text",
        ) from error
    found = []
    for name, (path, transcript) in entries.items():
        given = talker / path
        wav = given
        if not given.is_file():
            candidates = sorted((talker / "data").rglob(given.name))
            if not candidates:
                notes.append(f"voice {name} left out: {given.name} was not found below talker/data")
                continue
            wav = candidates[0]
            notes.append(f"voice {name}: {path} is not there, {wav.relative_to(talker)} used")
        found.append(VoiceSource(name=name, wav=wav, transcript=transcript))
    return tuple(found)


def copy_speaker_network(checkpoint: Checkpoint, folder: Path) -> str | None:
    """Copy the speaker network into the artifact; its relative path, or None when the checkpoint has none."""
    source = checkpoint.root / "talker" / SPEAKER_NETWORK
    if not source.is_file():
        return None
    shutil.copyfile(source, folder / SPEAKER_NETWORK)
    return SPEAKER_NETWORK


def posterior_noise(name: str, shape: tuple[int, int]) -> NDArray[np.float32]:
    """Standard normal noise of the latents of the voice called `name`."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    return np.random.Generator(np.random.Philox(key=seed)).standard_normal(shape, dtype=np.float32)


class VoiceMaker:
    """Turns prompt waves into voice packs with the eager float32 modules of the sampler and the vocoder.

    The module of `sampler` has the methods `aggregate` and `speaker`, the module of `vocoder` has `encode`.
    `noise` maps a voice's name and a shape (latents, channels) to the noise of its posterior.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        configs: Mapping[str, Any],
        *,
        sampler: Stage,
        vocoder: Stage,
        noise: Callable[[str, tuple[int, int]], NDArray[np.float32]] = posterior_noise,
    ) -> None:
        self._checkpoint = checkpoint
        self._noise = noise
        self._cfm: Any = float32_module(sampler, configs[sampler.name], checkpoint)
        self._vae: Any = float32_module(vocoder, configs[vocoder.name], checkpoint)
        options = StageOptions()
        self._cfm_parameters = sampler.parameters(configs[sampler.name], options)
        self._vae_parameters = vocoder.parameters(configs[vocoder.name], options)

    def register(self, voice: VoiceSource, folder: Path) -> VoiceRecord:
        """Write `voices/<name>.safetensors` under `folder`: latents (1, 4N, 64), embeds (N, D), speaker (D,)."""
        wave, rate = _read_wave(voice.wav)
        latents = self._encode(voice.name, resample(wave, rate, self._vae_parameters.sample_rate))
        patches = latents.view(-1, self._cfm_parameters.latents_per_patch, self._cfm_parameters.latent_dim)
        with torch.no_grad():
            (embeds,) = self._cfm.aggregate(patches)
            (speaker,) = self._cfm.speaker(torch.from_numpy(self._embed_speaker(wave, rate)))
        file = f"voices/{hashlib.sha256(voice.name.encode()).hexdigest()[:16]}.safetensors"
        save_file(
            {"latents": latents[None], "embeds": embeds.contiguous(), "speaker": speaker[0].clone()},
            folder / file,
        )
        return VoiceRecord(name=voice.name, file=file, transcript=voice.transcript, num_patches=len(patches))

    def _encode(self, name: str, wave: NDArray[np.float32]) -> torch.Tensor:
        """(n,) at the VAE's rate → (latents, 64), left-padded with silence to whole patches (spec §4.2)."""
        latent_samples = self._vae_parameters.samples_per_latent
        patch_samples = self._cfm_parameters.latents_per_patch * latent_samples
        padded = np.concatenate([np.zeros(-len(wave) % patch_samples, np.float32), wave])
        frames = torch.from_numpy(padded).view(-1, latent_samples)
        noise = self._noise(name, (len(frames), self._vae_parameters.latent_dim))
        num_frames = torch.tensor([len(frames) * self._vae_parameters.frames_per_latent])
        with torch.no_grad():
            latents: torch.Tensor = self._vae.encode(frames, num_frames, torch.from_numpy(noise))[0]
        return latents.contiguous()

    def _embed_speaker(self, wave: NDArray[np.float32], rate: int) -> NDArray[np.float32]:
        """(n,) at any rate → (1, speaker dim) by the checkpoint's ONNX speaker network on the CPU."""
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError(
                "registering voices needs onnxruntime",
                where="mingc export",
                fix="pip install 'mingc[export]'",
            ) from error
        path = self._checkpoint.root / "talker" / SPEAKER_NETWORK
        if not path.is_file():
            raise CheckpointError(
                f"{SPEAKER_NETWORK} is missing", where=str(path.parent), fix="download it again"
            )
        features = kaldi_fbank(resample(wave, rate, _SPEAKER_HZ), sample_rate=_SPEAKER_HZ)
        features = features - features.mean(axis=0, keepdims=True)
        try:
            session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
            given = {session.get_inputs()[0].name: features[None].astype(np.float32)}
            embedding = np.asarray(session.run(None, given)[0], np.float32)
        except Exception as error:  # its errors share no narrower class
            raise CheckpointError(
                f"{SPEAKER_NETWORK} cannot be run: {lfs_problem(path) or error}",
                where=str(path),
                fix="download it again",
            ) from error
        result: NDArray[np.float32] = embedding.reshape(1, -1)
        if result.shape[1] != self._cfm_parameters.speaker_dim:
            raise CheckpointError(
                f"{SPEAKER_NETWORK} gives {result.shape[1]} values, not {self._cfm_parameters.speaker_dim}",
                where=str(path),
                fix="take the file that belongs to the checkpoint",
            )
        return result


def _read_wave(path: Path) -> tuple[NDArray[np.float32], int]:
    """First channel of a sound file as (n,) float32, and its rate in Hz."""
    try:
        import soundfile
    except ImportError as error:
        raise ConfigError(
            "registering voices needs soundfile", where="mingc export", fix="pip install 'mingc[export]'"
        ) from error
    try:
        samples, rate = soundfile.read(path, dtype="float32", always_2d=True)
    except soundfile.SoundFileError as error:
        raise CheckpointError(
            f"the voice's wave cannot be read: {lfs_problem(path) or error}", where=str(path)
        ) from error
    problem = ""
    if len(samples) < _SHORTEST_S * rate:
        problem = f"{len(samples)} samples"
    elif not np.isfinite(samples).all():
        problem = "values that are not finite"
    if problem:
        raise CheckpointError(
            f"the voice's wave holds {problem}",
            where=str(path),
            fix=f"record at least {_SHORTEST_S} s of speech, better some seconds",
        )
    return np.ascontiguousarray(samples[:, 0]), int(rate)
