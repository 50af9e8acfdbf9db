"""What a prompt needs of a media decoder: the task it hands over and the interface; `mingc.media` implements it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.prompts.conversation import MediaKind, VideoParams
from mingc.prompts.features import Features


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaTask:
    """Decoding of one medium.

    Attributes:
        where: names the medium in errors.
        max_bytes: host memory for decoding and for the result.
        vision, audio: parameters of the encoder; which of them is set depends on `kind`.
        max_tokens: of the prompt; None: no limit.
    """

    kind: MediaKind
    where: str
    max_bytes: int
    vision: VisionParameters | None = None
    audio: AudioParameters | None = None
    video: VideoParams = field(default_factory=VideoParams)
    max_tokens: int | None = None


class MediaDecoder(Protocol):
    """Decodes media for prompts, on several threads. The service that it is given to starts and closes it."""

    @property
    def max_bytes(self) -> int:
        """Host memory for the media of one prompt, including the medium that is being decoded."""
        ...

    def start(self) -> None:
        """Prepare for the first medium."""
        ...

    def run(self, task: MediaTask, data: bytes | memoryview) -> Features:
        """Features of the encoded medium `data`.

        Raises: RequestError when it cannot be decoded or exceeds a limit, ConfigError when a library is missing.
        """
        ...

    def close(self) -> None:
        """Free what decoding needs; running tasks fail."""
        ...
