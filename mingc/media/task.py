"""Decoding of one medium, with everything it depends on: the task of a decoder process."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, replace
from typing import Literal

import msgspec

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.media.audio import AudioFeatures, load_audio
from mingc.media.image import VisionFeatures, load_image
from mingc.media.limits import MediaLimits, too_large
from mingc.media.video import VideoFeatures, load_video
from mingc.runtime.request import VideoParams

DecodedMedia = VisionFeatures | VideoFeatures | AudioFeatures


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTask:
    """Parameters of one decoding.

    `where` names the medium in errors; `vision` or `audio` is set according to `kind`.
    """

    kind: Literal["image", "audio", "video"]
    where: str
    vision: VisionParameters | None = None
    audio: AudioParameters | None = None
    video: VideoParams = field(default_factory=VideoParams)
    limits: MediaLimits = field(default_factory=MediaLimits)


def run_task(task: MediaTask, data: bytes | memoryview) -> DecodedMedia:
    """Features of the encoded medium `data`.

    Raises: RequestError when it cannot be decoded or exceeds a limit, ConfigError when a library is missing.
    """
    data = bytes(data)
    try:
        if task.kind == "audio":
            assert task.audio is not None
            return load_audio(data, task.audio, task.where, task.limits)
        assert task.vision is not None
        if task.kind == "video":
            return load_video(data, task.vision, task.video, task.where, task.limits)
        return load_image(data, task.vision, task.where, task.limits)
    except MemoryError as error:
        raise too_large(
            f"decoding the {task.kind} takes more memory than its header says", task.where
        ) from error


def digest_of(task: MediaTask, data: bytes | memoryview) -> bytes:
    """32 bytes that differ for media whose features differ: a hash of the file, and of all that `run_task` does to it.

    A file is a fraction of its features, which take 0.4 ms for 1,024 patches.
    """
    settings = (task.kind, task.vision, task.audio, task.video if task.kind == "video" else None)
    digest = hashlib.sha256(msgspec.json.encode(settings))
    digest.update(data)
    return digest.digest()


def with_digest(features: DecodedMedia, digest: bytes) -> DecodedMedia:
    """`features` with their `digest_of`."""
    if isinstance(features, VideoFeatures):
        return replace(features, vision=replace(features.vision, digest=digest))
    return replace(features, digest=digest)


def num_bytes(features: DecodedMedia) -> int:
    """Host memory of the features."""
    if isinstance(features, AudioFeatures):
        return features.mel.nbytes
    vision = features.vision if isinstance(features, VideoFeatures) else features
    return vision.patches.nbytes
