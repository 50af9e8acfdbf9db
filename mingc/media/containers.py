"""Opening untrusted videos and sounds with PyAV, within limits.

FFmpeg's other demuxers read further files (concat), open sockets (SDP, RTSP) or decode pictures of any size while they
probe.
"""

from __future__ import annotations

import io
from typing import Any

_FORMATS = (
    "mov,mp4,matroska,webm,avi,asf,flv,gif,mpegts,mpeg,ogg,nut,"
    "aac,ac3,aiff,amr,ape,au,caf,eac3,flac,mp3,tta,w64,wav,wv"
)
_MAX_STREAMS = "32"


def pixel_limit(max_pixels: int) -> dict[str, str]:
    """The option with which FFmpeg refuses larger frames.

    With a margin, because it compares the padded size of a buffer.
    """
    return {"max_pixels": str(max_pixels + max_pixels // 8 + (1 << 14))}


def open_container(av: Any, data: bytes, *, max_pixels: int) -> Any:
    """An opened container; probing it decodes no frame above `max_pixels`. Raises: av.FFmpegError, ValueError."""
    return av.open(
        io.BytesIO(data),
        options={
            "format_whitelist": _FORMATS,
            "protocol_whitelist": "",
            "max_streams": _MAX_STREAMS,
            **pixel_limit(max_pixels),
        },
    )
