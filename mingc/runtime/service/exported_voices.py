"""Voices of a checkpoint, registered while its artifact is exported, with the code and the engines of a server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest, VoiceRecord
from mingc.errors import ArtifactError
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.service.served_stages import find_speech_stages
from mingc.runtime.talker.voice_encoder import VoiceEncoder, VoiceGraph


class Recording(Protocol):
    """A recording with its transcript: `clip` (n,) int16, and its speaker vector (D,) float32."""

    @property
    def name(self) -> str: ...
    @property
    def transcript(self) -> str: ...
    @property
    def clip(self) -> NDArray[np.int16]: ...
    @property
    def sample_rate(self) -> int: ...
    @property
    def vector(self) -> NDArray[np.float32]: ...


def open_voices(
    folder: Path, manifest: Manifest, graphs: Mapping[str, VoiceGraph] | None = None
) -> Callable[[Recording], VoiceRecord]:
    """Load the engines of the artifact in `folder` that register voices, or take `graphs`, by name, on the CPU.

    The returned function writes `voices/<hash>.safetensors`: latents (1, 4N, 64), embeds (N, D), speaker (D,).
    """
    stages = find_speech_stages(manifest)
    if stages is None:
        raise ArtifactError("an artifact without speech has no voices", where=str(folder))
    device = torch.device("cpu" if graphs is not None else manifest.fingerprint.device)
    if graphs is None:
        artifact = Artifact(folder, manifest)
        sampler, vocoder = (load_stage(artifact, name, device) for name in (stages.sampler, stages.vocoder))
        graphs = {"encode": vocoder["encode"], **{name: sampler[name] for name in ("aggregate", "speaker")}}
    encoder = VoiceEncoder(
        encode=graphs["encode"],
        aggregate=graphs["aggregate"],
        speaker=graphs["speaker"],
        flow=stages.flow,
        vae=stages.vae,
        device=device,
    )
    (folder / "voices").mkdir(exist_ok=True)

    def register(voice: Recording) -> VoiceRecord:
        pack = encoder.encode(
            encoder.prepare(voice.clip, voice.sample_rate),
            voice.vector,
            name=voice.name,
            transcript=voice.transcript,
        )
        file = f"voices/{hashlib.sha256(voice.name.encode()).hexdigest()[:16]}.safetensors"
        save_file(
            {"latents": pack.latents[None], "embeds": pack.embeds, "speaker": pack.speaker}, folder / file
        )
        return VoiceRecord(
            name=voice.name, file=file, transcript=voice.transcript, num_patches=len(pack.embeds)
        )

    return register
