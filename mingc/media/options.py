"""Options of media decoding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mingc.errors import ConfigError
from mingc.media.limits import DEFAULT_MEDIA_BYTES

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """Limits of decoding.

    Attributes:
        max_media_memory: bytes of host memory for decoding the media of one request. Each preprocessing thread has a
            decoder process, so the total is that many times larger.
        media_decode_timeout_s: time for decoding one medium.
    """

    max_media_memory: int = DEFAULT_MEDIA_BYTES
    media_decode_timeout_s: float = DEFAULT_TIMEOUT_S

    def __post_init__(self) -> None:
        problems = []
        if self.max_media_memory < 1:
            problems.append(f"--max-media-memory is {self.max_media_memory}, which is below 1")
        if not 0 < self.media_decode_timeout_s < math.inf:
            problems.append(
                f"--media-decode-timeout is {self.media_decode_timeout_s}, not a finite number above 0"
            )
        if problems:
            raise ConfigError(
                "; ".join(problems), where="options of media decoding", fix="see `mingc serve --help`"
            )
