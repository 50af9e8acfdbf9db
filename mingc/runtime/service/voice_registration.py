"""Voices that are registered without a server, with its code and engines: at export, and by `mingc voices add`."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file

from mingc.artifacts.artifact import Artifact, check_fingerprint
from mingc.artifacts.manifest import Manifest, VoiceRecord
from mingc.errors import ArtifactError
from mingc.host.machine import current_host
from mingc.prompts.media_decoder import MediaDecoder
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.service.served_stages import SpeechStages, find_speech_stages
from mingc.runtime.service.speech_builder import create_speech_planner, create_voice_encoder
from mingc.runtime.service.voice_store import VoiceStore
from mingc.runtime.service.voices import Voices
from mingc.runtime.talker.voice_encoder import VoiceEncoder, VoiceGraph
from mingc.runtime.voices import NewVoice, VoiceInfo


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
    encoder = _load_encoder(Artifact(folder, manifest), stages, graphs)
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


def add_voice(artifact: Artifact, folder: Path, voice: NewVoice, media: MediaDecoder) -> VoiceInfo:
    """Register a voice with the engines of `artifact`, and keep it in `folder`.

    Raises: RequestError when it cannot be used or kept, ConfigError, ArtifactError.
    """
    recorded = artifact.manifest.fingerprint
    check_fingerprint(recorded, current_host(recorded.device))
    stages = find_speech_stages(artifact.manifest)
    if stages is None:
        raise ArtifactError("an artifact without speech has no voices", where=str(artifact.root))
    store, planner = VoiceStore(folder), create_speech_planner(artifact, stages)
    encoder = _load_encoder(artifact, stages)
    with ThreadPoolExecutor(1) as thread:
        voices = Voices(artifact, stages, planner, encoder, thread.submit, media=media, store=store)
        return asyncio.run(voices.add(voice, asyncio.to_thread))


def _load_encoder(
    artifact: Artifact, stages: SpeechStages, graphs: Mapping[str, VoiceGraph] | None = None
) -> VoiceEncoder:
    if graphs is not None:
        return create_voice_encoder(graphs, graphs, stages, torch.device("cpu"))
    device = torch.device(artifact.manifest.fingerprint.device)
    sampler, vocoder = (load_stage(artifact, name, device) for name in (stages.sampler, stages.vocoder))
    return create_voice_encoder(sampler, vocoder, stages, device)
