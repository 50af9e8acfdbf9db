"""The checkpoint's voices, which an export registers so that they are ready when a server starts.

Source: spec talker.md §4.1-§4.3 (`Talker.register_prompt_wav` upstream). `mingc.runtime.talker.voice_encoder` does the
rest with the engines of the artifact, as it does for voices that a server registers.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from mingc.artifacts.manifest import Manifest, VoiceRecord
from mingc.artifacts.spec import GraphSpec
from mingc.errors import CheckpointError, ConfigError
from mingc.export.checkpoint import Checkpoint, lfs_problem
from mingc.host.speaker_network import SpeakerNetwork
from mingc.media.dsp.speaker_features import speaker_features, to_int16

SPEAKER_NETWORK = "campplus.onnx"
_SHORTEST_S = 0.1  # the speaker network looks at whole frames of 25 ms
_MANIFEST = Path("data") / "voice_name.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class VoiceSource:
    """A voice of the checkpoint: a recording and its transcript."""

    name: str
    wav: Path
    transcript: str


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RecordedVoice:
    """A voice whose recording was read: `clip` (n,) int16, and its speaker vector (D,) float32."""

    name: str
    transcript: str
    clip: NDArray[np.int16]
    sample_rate: int
    vector: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class EagerGraph:
    """A method of an eager module in the place of its engines."""

    spec: GraphSpec
    method: Callable[..., Sequence[Tensor]]

    def run(self, **tensors: Tensor) -> dict[str, Tensor]:
        """Outputs by name, as `mingc.runtime.engines.base.Graph.run` returns them."""
        outputs = self.method(*(tensors[each.name] for each in self.spec.inputs))
        return dict(zip((each.name for each in self.spec.outputs), outputs, strict=True))


OpenVoices = Callable[
    [Path, Manifest, Mapping[str, EagerGraph] | None], Callable[[RecordedVoice], VoiceRecord]
]
"""Loads the engines of an artifact's folder that register voices, or takes the given graphs, by name.

The returned function writes a voice into the folder.
"""


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


def read_voice(voice: VoiceSource, network: Path, speaker_dim: int, *, max_seconds: float) -> RecordedVoice:
    """Read the recording of a voice, its first channel, and compute its speaker vector.

    Raises: CheckpointError for a recording or a network that cannot be used, ConfigError without a library.
    """
    clip, rate = _read_wave(voice.wav)
    if len(clip) > max_seconds * rate:
        raise CheckpointError(
            f"the voice's wave has {len(clip) / rate:.1f} seconds; the VAE encodes {max_seconds:.1f}",
            where=str(voice.wav),
            fix="cut it, and its prompt_text",
        )
    if not network.is_file():
        raise CheckpointError(
            f"{SPEAKER_NETWORK} is missing", where=str(network.parent), fix="download it again"
        )
    try:
        vector = SpeakerNetwork(network).embed(speaker_features(clip, rate))
    except ImportError as error:
        raise ConfigError(
            "registering voices needs onnxruntime", where="mingc export", fix="pip install 'mingc[export]'"
        ) from error
    except Exception as error:  # its errors share no narrower class
        raise CheckpointError(
            f"{SPEAKER_NETWORK} cannot be run: {lfs_problem(network) or error}",
            where=str(network),
            fix="download it again",
        ) from error
    if len(vector) != speaker_dim:
        raise CheckpointError(
            f"{SPEAKER_NETWORK} gives {len(vector)} values, not {speaker_dim}",
            where=str(network),
            fix="take the file that belongs to the checkpoint",
        )
    return RecordedVoice(
        name=voice.name, transcript=voice.transcript, clip=clip, sample_rate=rate, vector=vector
    )


def _read_wave(path: Path) -> tuple[NDArray[np.int16], int]:
    """First channel of a sound file as (n,) int16, and its rate in Hz."""
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
    return to_int16(samples[:, 0]), int(rate)
