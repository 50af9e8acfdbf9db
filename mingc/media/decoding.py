"""Decodes one medium in this process."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import replace

import msgspec

from mingc.media.audio import Wave, audio_blocks, load_audio
from mingc.media.image import load_image, load_reference
from mingc.media.limits import (
    DEFAULT_MEDIA_BYTES,
    MAX_STREAM_SECONDS,
    MediaLimits,
    stated_limits,
    too_large,
)
from mingc.media.speech import BlockReader, SpeechFinder
from mingc.media.video import load_video
from mingc.media.voice_clip import check_speech, load_voice_clip
from mingc.prompts.features import Features, VideoFeatures, VoiceClip
from mingc.prompts.media_decoder import MediaTask, TurnRules


class InProcessDecoder:
    """A `MediaDecoder` without processes, for trusted media: nothing ends a decoder that crashes or hangs."""

    def __init__(self, max_bytes: int = DEFAULT_MEDIA_BYTES) -> None:
        self.max_bytes = max_bytes

    def prepare(self) -> None:
        """Nothing to prepare."""

    def start(self) -> None:
        """Nothing to wait for: libraries are loaded at the first medium that needs them."""

    @property
    def limits(self) -> Mapping[str, int]:
        """See `MediaDecoder`."""
        return stated_limits(self.max_bytes)

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        """See `MediaDecoder`."""
        features = run_task(task, data)
        if isinstance(features, VoiceClip):
            check_speech(features, task.where)
        return features

    def read_speech(self, task: MediaTask, data: bytes | memoryview, rules: TurnRules) -> BlockReader:
        """See `MediaDecoder`."""
        return BlockReader(speech_finder(task, rules), blocks_of(task, bytes(data)))

    def close(self) -> None:
        """Nothing to free."""


def run_task(task: MediaTask, data: bytes | memoryview) -> Features:
    """Features of the encoded medium `data`.

    Raises: RequestError when it cannot be decoded or exceeds a limit, ConfigError when a library is missing.
    """
    data = bytes(data)
    limits = MediaLimits(max_bytes=task.max_bytes, max_tokens=task.max_tokens, num_media=task.num_media)
    try:
        if task.kind == "voice":
            return load_voice_clip(data, task.where, limits)
        if task.kind == "reference":
            return load_reference(data, task, limits)
        if task.kind == "audio":
            assert task.audio is not None
            return load_audio(data, task.audio, task.where, limits)
        assert task.vision is not None
        if task.kind == "video":
            return load_video(data, task.vision, task.video, task.where, limits)
        return load_image(data, task.vision, task.where, limits, max_pixels=task.max_pixels)
    except MemoryError as error:
        raise too_large(
            f"decoding the {task.kind} takes more memory than its header says", task.where
        ) from error


def blocks_of(task: MediaTask, data: bytes) -> Iterator[Wave]:
    """The sound of a file in blocks. Raises: see `run_task`."""
    return audio_blocks(data, task.where, max_seconds=MAX_STREAM_SECONDS)


def speech_finder(task: MediaTask, rules: TurnRules) -> SpeechFinder:
    """Finds speech in the sound of a task; no segment is longer than the encoder takes."""
    audio = task.audio
    assert audio is not None
    longest_ms = audio.max_frames * audio.hop_samples * 1000 // audio.sample_rate
    max_ms = longest_ms if rules.max_ms is None else min(rules.max_ms, longest_ms)
    return SpeechFinder(audio, replace(rules, max_ms=max_ms), task.where)


def digest_of(task: MediaTask, data: bytes | memoryview) -> bytes:
    """32 bytes that differ for media whose features differ: a hash of the file and of all settings of `run_task`.

    Hashing a file takes a fraction of the time for its features: 0.4 ms for 1,024 patches.
    """
    of_kind = {
        "video": task.video,
        "image": task.max_pixels,
        "reference": (task.asked, task.aspect, task.resolution),
    }.get(task.kind)
    settings = (task.kind, task.vision, task.audio, of_kind)
    digest = hashlib.sha256(msgspec.json.encode(settings))
    digest.update(data)
    return digest.digest()


def with_digest(features: Features, digest: bytes) -> Features:
    """`features` with their `digest_of`."""
    if isinstance(features, VideoFeatures):
        return replace(features, vision=replace(features.vision, digest=digest))
    return replace(features, digest=digest)
