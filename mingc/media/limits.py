"""Limits of one medium: bytes of host memory while it is decoded, and tokens of the context.

Headers are checked against both before anything is decoded, so a small file cannot claim memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from mingc.errors import RequestError

MIB = 1 << 20
DEFAULT_MEDIA_BYTES = 384 * MIB
# Of a picture or a frame as it is sent: 8192 × 8192, four times the maximum of the encoder.
MAX_PIXELS = 1 << 26
MAX_VIDEO_FRAMES = 1 << 18  # in a file: 2.4 hours at 30 a second
MAX_STREAM_SECONDS = 4 * 3600  # of a file whose sound is read in blocks


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaLimits:
    """Limits of one medium.

    Attributes:
        max_bytes: most host memory for decoding and the result.
        max_tokens: what the texts and the earlier media of the prompt leave of its context; None: no limit.
        num_media: this medium and those that follow it, which share the tokens.
    """

    max_bytes: int = DEFAULT_MEDIA_BYTES
    max_tokens: int | None = None
    num_media: int = 1

    def check_bytes(self, num_bytes: int, where: str, what: str) -> None:
        """Raises: RequestError when `what` needs more than the remaining bytes."""
        if num_bytes > self.max_bytes:
            raise too_large(
                f"{what} takes {-(-num_bytes // MIB)} MiB of memory; {self.max_bytes // MIB} MiB are left for it",
                where,
            )


def stated_limits(max_bytes: int) -> dict[str, int]:
    """See `MediaDecoder.limits`."""
    return {
        "decoding_bytes": max_bytes,
        "image_pixels": MAX_PIXELS,
        "frame_pixels": MAX_PIXELS,
        "video_frames": MAX_VIDEO_FRAMES,
        "transcribed_seconds": MAX_STREAM_SECONDS,
    }


def too_large(what: str, where: str, fix: str | None = None) -> RequestError:
    """The error for a medium that is too large for memory, the encoder or the context."""
    return RequestError(
        what,
        where=where,
        fix=fix
        or "send a smaller or shorter one, or have the server started with a larger --max-media-memory",
        status=413,
        param=where,
        code="media_too_large",
    )


def undecodable(what: str, where: str, fix: str) -> RequestError:
    """The error for bytes that are no image, sound or video."""
    return RequestError(what, where=where, fix=fix, param=where, code="undecodable_media")
