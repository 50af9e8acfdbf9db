"""Options of media decoding."""

from __future__ import annotations

from dataclasses import dataclass

from mingc.media.limits import DEFAULT_MEDIA_BYTES
from mingc.options import BYTES, MOST_BYTES, MOST_SECONDS, SECONDS, check, option

DEFAULT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaOptions:
    """Limits of decoding, validated on construction."""

    max_media_memory: int = option(
        DEFAULT_MEDIA_BYTES, "--max-media-memory", unit=BYTES, least=1, most=MOST_BYTES, group="Media",
        help="Host memory for decoding the media of one request, in each of the decoder processes.",
    )  # fmt: skip
    media_decode_timeout_s: float = option(
        DEFAULT_TIMEOUT_S, "--media-decode-timeout", unit=SECONDS, above=0, most=MOST_SECONDS, group="Media",
        help="Time for decoding one image, clip or video.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        check(self, where="options of media decoding", fix="see `mingc serve --help`")
