"""Small media files that claim much: memory, time, or a size that they do not have."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

_CONTAINERS = (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts")
_Box = tuple[bytes, "bytes | list[_Box]"]
_STBL = (b"moov", b"trak", b"mdia", b"minf", b"stbl")


def encode_video(
    width: int,
    height: int,
    num_frames: int,
    *,
    fps: int = 5,
    codec: str = "libx264",
    container: str = "mp4",
    pix_fmt: str = "yuv420p",
    options: dict[str, str] | None = None,
    paint: Callable[[int], NDArray[np.uint8]] | None = None,
) -> bytes:
    """A video of black frames, or of the (H, W, 3) frames that `paint` gives."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps, options=options or {"preset": "ultrafast"})
        stream.width, stream.height, stream.pix_fmt = width, height, pix_fmt
        black = av.VideoFrame(width, height, pix_fmt)
        for plane in black.planes:
            plane.update(bytes(plane.buffer_size))
        for index in range(num_frames):
            frame = black if paint is None else av.VideoFrame.from_ndarray(paint(index), format="rgb24")
            frame.pts, frame.time_base = index, Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def small_video() -> bytes:
    """Twelve grey frames of 96×64 at 5 a second."""
    return encode_video(
        96, 64, 12, paint=lambda index: np.full((64, 96, 3), 20 * index, np.uint8), codec="mpeg4", options={}
    )


def index_bomb(num_samples: int) -> bytes:
    """A small MP4 whose tables say that it has `num_samples` frames of one byte in one chunk."""
    boxes = _parse(small_video())
    _replace(boxes, (*_STBL, b"stsz"), struct.pack(">III", 0, 1, num_samples))
    _replace(boxes, (*_STBL, b"stsc"), struct.pack(">IIIII", 0, 1, 1, num_samples, 1))
    _replace(boxes, (*_STBL, b"stts"), struct.pack(">IIII", 0, 1, num_samples, 512))
    return _serialize(boxes)


def edit_bomb(num_frames: int, *, edits: int) -> bytes:
    """An MP4 whose edit list plays the whole video `edits` times, which FFmpeg writes out when it opens the file."""
    boxes = _parse(encode_video(64, 64, num_frames))
    entries = struct.pack(">IiI", 1000 * num_frames, 0, 1 << 16) * edits
    _replace(boxes, (b"moov", b"trak", b"edts", b"elst"), struct.pack(">II", 0, edits) + entries)
    return _serialize(boxes)


def _parse(data: bytes) -> list[_Box]:
    boxes: list[_Box] = []
    start = 0
    while start + 8 <= len(data):
        size, name = struct.unpack(">I4s", data[start : start + 8])
        body = data[start + 8 : start + size]
        boxes.append((name, _parse(body) if name in _CONTAINERS else body))
        start += size
    return boxes


def _serialize(boxes: list[_Box]) -> bytes:
    parts = []
    for name, content in boxes:
        body = _serialize(content) if isinstance(content, list) else content
        parts.append(struct.pack(">I4s", len(body) + 8, name) + body)
    return b"".join(parts)


def _replace(boxes: list[_Box], path: tuple[bytes, ...], body: bytes) -> None:
    for index, (name, content) in enumerate(boxes):
        if name == path[0]:
            if isinstance(content, list):
                _replace(content, path[1:], body)
            else:
                boxes[index] = (name, body)
            return
    raise ValueError(f"the file has no {path[0].decode()} box")
