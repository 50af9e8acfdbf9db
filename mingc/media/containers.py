"""Opens untrusted videos and sounds with PyAV, within limits.

The demuxers of FFmpeg that are not allowed here read further files (concat), open sockets (SDP, RTSP) or decode
pictures of any size while they probe.
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
    """The option that makes FFmpeg refuse larger frames. It has a margin, as FFmpeg compares the padded buffer."""
    return {"max_pixels": str(max_pixels + max_pixels // 8 + (1 << 14))}


def open_container(av: Any, data: bytes, *, max_pixels: int) -> Any:
    """Open a container; probing decodes no frame above `max_pixels`. Raises: av.FFmpegError, ValueError."""
    return av.open(
        io.BytesIO(data),
        options={
            "format_whitelist": _FORMATS,
            "protocol_whitelist": "",
            "max_streams": _MAX_STREAMS,
            **pixel_limit(max_pixels),
        },
    )
