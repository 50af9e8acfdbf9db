"""Small media files that claim much: memory, time, or a size that they do not have."""

from __future__ import annotations

import io
import struct
from collections.abc import Callable, Iterator
from fractions import Fraction

import av
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from mingc.prompts.conversation import VideoParams

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


def oriented_jpeg(orientation: int, width: int = 160, height: int = 120) -> bytes:
    """A JPEG with an orientation in its EXIF data."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    Image.new("RGB", (width, height), (9, 99, 199)).save(file, "JPEG", exif=exif.tobytes())
    return file.getvalue()


def _picture(kind: str, mode: str, width: int, height: int, **options: object) -> bytes:
    file = io.BytesIO()
    Image.new(mode, (width, height)).save(file, kind, **options)
    return file.getvalue()


def _sound(kind: str, subtype: str, samples: NDArray[np.float32], rate: int) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, format=kind, subtype=subtype)
    return file.getvalue()


def hostile_files() -> Iterator[tuple[str, str, VideoParams, bytes]]:
    """(kind, name, fields of the request, bytes) of files that are small and claim much."""
    plain = VideoParams()
    small = encode_video(96, 64, 8)
    yield (
        "video",
        "MP4 of 8 frames, video_min_pixels = video_max_pixels = 2^26",
        VideoParams(min_pixels=1 << 26, max_pixels=1 << 26),
        small,
    )
    yield (
        "video",
        "MP4 of 1,200 frames, video_fps 30, video_max_frames 60000",
        VideoParams(fps=30.0, max_frames=60_000),
        encode_video(640, 480, 1200, fps=30),
    )
    yield "video", "MP4 of 20 frames of 8192×8192", plain, encode_video(8192, 8192, 20, fps=2)
    yield (
        "video",
        "the same as MPEG-TS",
        plain,
        encode_video(8192, 8192, 4, fps=2, container="mpegts"),
    )
    yield "video", "MP4, 4K, 60 frames, 1 reference", plain, encode_video(3840, 2160, 60, fps=2)
    many = {"preset": "ultrafast", "refs": "16", "x264-params": "ref=16:bframes=0"}
    yield (
        "video",
        "MP4, 4K, 40 frames, 16 references",
        plain,
        encode_video(3840, 2160, 40, fps=2, options=many),
    )
    yield (
        "video",
        "MP4, 4K at 10 bits, 40 frames, 16 references",
        plain,
        encode_video(3840, 2160, 40, fps=2, options=many, pix_fmt="yuv420p10le"),
    )
    yield "video", "MP4 with an index of 60,000,000 frames", plain, index_bomb(60_000_000)
    yield "video", "MP4 with 60,000 edits of 2,000 frames", plain, edit_bomb(2000, edits=60_000)
    yield "image", "PNG of 20000×20000, 1 bit", plain, _picture("PNG", "1", 20_000, 20_000)
    yield "image", "PNG of 8192×8192, RGBA", plain, _picture("PNG", "RGBA", 8192, 8192, compress_level=1)
    yield "image", "PNG of 8192×8192, RGB", plain, _picture("PNG", "RGB", 8192, 8192, compress_level=1)
    yield "image", "PNG of 6000×6000, RGBA", plain, _picture("PNG", "RGBA", 6000, 6000, compress_level=1)
    yield "image", "WebP of 12000×12000", plain, _picture("WEBP", "RGB", 12_000, 12_000, method=0)
    yield "image", "WebP of 4200×4200", plain, _picture("WEBP", "RGB", 4200, 4200, method=0)
    yield (
        "image",
        "progressive JPEG of 8000×8000",
        plain,
        _picture("JPEG", "RGB", 8000, 8000, progressive=True),
    )
    yield (
        "image",
        "progressive JPEG of 5600×5600",
        plain,
        _picture("JPEG", "RGB", 5600, 5600, progressive=True),
    )
    yield "image", "JPEG of 8064×6048, turned by EXIF", plain, oriented_jpeg(6, 8064, 6048)
    silence = np.zeros(48_000 * 1800, np.float32)
    yield "audio", "FLAC of 30 minutes of silence", plain, _sound("FLAC", "PCM_16", silence, 48_000)
    yield "audio", "MP3 of 30 minutes of silence", plain, _sound("MP3", "MPEG_LAYER_III", silence, 48_000)
    wide = np.zeros((400_000, 64), np.float32)
    yield "audio", "FLAC of 8 channels", plain, _sound("FLAC", "PCM_16", wide[:, :8], 192_000)
    yield "audio", "WAV of 64 channels at 384 kHz", plain, _sound("WAV", "PCM_U8", wide, 384_000)
