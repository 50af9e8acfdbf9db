"""Generated files decoded here and by an `ffmpeg` program: lengths, times of frames, pixels, levels.

Files are made with PyAV, soundfile and Pillow: containers, codecs, rates, channels, frames at irregular times, damage.
Every file is decoded here and by `ffmpeg`, and a file that `ffmpeg` cannot decode must be refused here.

    python benchmarks/media_ffmpeg.py --ffmpeg /usr/bin/ffmpeg --json benchmarks/results/media-ffmpeg-….json
"""

from __future__ import annotations

import argparse
import io
import re
import struct
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import cpu_result
import numpy as np
import soundfile
from numpy.typing import NDArray
from PIL import Image

from mingc.errors import RequestError
from mingc.media.audio import decode_audio
from mingc.media.image import decode_image
from mingc.media.limits import MediaLimits
from mingc.media.video import FrameSource, open_video
from mingc.prompts.conversation import MediaKind

RATE_HZ = 16000
_CLIP_S = 3.0
_CODEC_DELAY = 2304  # samples: two frames of MP3
# Seconds at which frames are shown.
PATTERNS: dict[str, list[float]] = {
    "30 fps": [i / 30 for i in range(100)],
    "29.97 fps": [i * 1001 / 30000 for i in range(100)],
    "12 fps": [i / 12 for i in range(40)],
    "1 fps": [float(i) for i in range(10)],
    "screen: 3 s at 30 fps, 7 s at 1 fps": [i / 30 for i in range(90)] + [3.0 + i for i in range(7)],
    "webcam: 30, then 15 fps": [i / 30 for i in range(90)] + [3 + i / 15 for i in range(75)],
    "still, then motion": [0.0] + [7 + i / 30 for i in range(90)],
    "motion, then still": [i / 30 for i in range(60)] + [9.5],
    "every seventh frame dropped": [i / 30 for i in range(150) if i % 7],
    "slides": [0.0, 5.0, 8.0, 15.0, 16.0],
}
CONSTANT = ("30 fps", "29.97 fps", "12 fps", "1 fps")
_CODECS = {  # container: codec, pixels, ticks per second; a tick of AVI is a frame
    "mp4": ("libx264", "yuv420p", 90_000),
    "webm": ("libvpx-vp9", "yuv420p", 1000),
    "matroska": ("ffv1", "bgr0", 1000),
    "mov": ("mpeg4", "yuv420p", 30_000),
    "mpegts": ("libx264", "yuv420p", 90_000),
    "flv": ("flv1", "yuv420p", 1000),
    "gif": ("gif", "rgb8", 100),
    "avi": ("mjpeg", "yuvj420p", 0),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class File:
    """A generated file. `times`: of the frames of a video, in seconds; `is_cut`: its end is missing."""

    kind: MediaKind
    name: str
    data: bytes = field(repr=False)
    times: Sequence[float] = ()
    is_cut: bool = False


def video(
    times: Sequence[float], container: str = "mp4", *, sound: NDArray[np.float32] | None = None
) -> bytes:
    """Frames of 96×64 whose grey rises with time; `sound`: a mono clip of 16 kHz beside them, in AAC."""
    codec, pixels, ticks = _CODECS[container]
    gaps = np.diff(times)
    rate = Fraction(1 / float(gaps.min())).limit_denominator(1001)
    tick = Fraction(1, ticks) if ticks else 1 / rate
    options = {"preset": "ultrafast"} if codec == "libx264" else {"cpu-used": "8", "deadline": "realtime"}
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate, options=options)
        stream.width, stream.height, stream.pix_fmt = 96, 64, pixels
        stream.codec_context.time_base = tick
        heard: Any = None if sound is None else output.add_stream("aac", rate=RATE_HZ, layout="mono")
        for index, seconds in enumerate(times):
            level = 20 + 200 * index // len(times)
            frame: Any = av.VideoFrame.from_ndarray(np.full((64, 96, 3), level, np.uint8), format="rgb24")
            frame.pts, frame.time_base = round(seconds / tick), tick
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
        if sound is not None:
            for start in range(0, len(sound), 1024):
                part: Any = av.AudioFrame.from_ndarray(
                    sound[None, start : start + 1024], format="fltp", layout="mono"
                )
                part.sample_rate, part.pts = RATE_HZ, start
                output.mux(heard.encode(part))
            output.mux(heard.encode())
    return file.getvalue()


def videos() -> Iterator[File]:
    for pattern, times in PATTERNS.items():
        for container in _CODECS:
            if container != "avi" or pattern in CONSTANT:
                data = video(times, container)
                yield File(kind="video", name=f"{container}, {pattern}", data=data, times=times)
    for container in _CODECS:
        data = video(PATTERNS["30 fps"], container)
        yield File(kind="video", name=f"{container}, cut", data=data[: len(data) * 3 // 5], is_cut=True)


def clip(channels: int, rate: int) -> NDArray[np.float32]:
    """(n, channels): a tone that swells, louder in each further channel."""
    at = np.arange(round(_CLIP_S * rate)) / rate
    tone = 0.4 * np.sin(2 * np.pi * 300 * at) * np.sin(np.pi * at / _CLIP_S)
    return (tone[:, None] * (1 + np.arange(channels)) / channels).astype(np.float32)


def _sound(kind: str, subtype: str, rate: int = RATE_HZ, channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, clip(channels, rate), rate, format=kind, subtype=subtype)
    return file.getvalue()


def _encoded(container: str, codec: str, rate: int = RATE_HZ, channels: int = 1) -> bytes:
    file = io.BytesIO()
    layout = "mono" if channels == 1 else "stereo"
    with av.open(file, "w", format=container) as output:
        stream: Any = output.add_stream(codec, rate=rate, layout=layout)
        stream.bit_rate = 128_000
        resampler = av.AudioResampler(format=stream.format, layout=layout, rate=rate)
        fifo = av.AudioFifo()
        frame: Any = av.AudioFrame.from_ndarray(
            np.ascontiguousarray(clip(channels, rate).reshape(1, -1)), format="flt", layout=layout
        )
        frame.sample_rate = rate
        for part in resampler.resample(frame):
            part.pts = None
            fifo.write(part)
        size = stream.codec_context.frame_size or 1024
        while (each := fifo.read(size, partial=True)) is not None:
            output.mux(stream.encode(each))
        output.mux(stream.encode())
    return file.getvalue()


def _wav_sizes(data: bytes, riff: int, size: int) -> bytes:
    """`data`, a WAV, with other lengths in its header."""
    place = data.index(b"data") + 4
    return b"RIFF" + struct.pack("<I", riff) + data[8:place] + struct.pack("<I", size) + data[place + 4 :]


def clips() -> Iterator[File]:
    def file(name: str, data: bytes, *, is_cut: bool = False) -> File:
        return File(kind="audio", name=name, data=data, is_cut=is_cut)

    for rate in (8000, 16000, 22050, 44100, 48000, 96000):
        for channels in (1, 2, 6):
            yield file(f"WAV PCM_16, {rate} Hz, {channels} channels", _sound("WAV", "PCM_16", rate, channels))
    for kind, subtype in (
        ("WAV", "PCM_U8"), ("WAV", "PCM_24"), ("WAV", "PCM_32"), ("WAV", "FLOAT"), ("WAV", "ULAW"),
        ("WAV", "IMA_ADPCM"),         ("RF64", "PCM_16"), ("W64", "PCM_16"), ("AIFF", "PCM_16"), ("AU", "PCM_16"),
        ("CAF", "PCM_16"), ("FLAC", "PCM_24"),
        ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III"),
    ):  # fmt: skip
        yield file(f"{kind} {subtype}", _sound(kind, subtype, 48000, 2))
    for container, codec in (
        ("mp4", "aac"), ("adts", "aac"), ("mpegts", "mp2"), ("webm", "libopus"), ("ogg", "libopus"),
        ("matroska", "flac"), ("ipod", "alac"), ("asf", "wmav2"), ("ac3", "ac3"), ("mp3", "libmp3lame"),
        ("avi", "pcm_s16le"), ("tta", "tta"), ("wv", "wavpack"),
    ):  # fmt: skip
        for channels in (1, 2):
            yield file(
                f"{container} {codec}, {channels} channels", _encoded(container, codec, 48000, channels)
            )
    whole = _sound("WAV", "PCM_16", 48000, 2)
    for riff, size in ((0, 0), (2**32 - 1, 2**32 - 1), (0, 2**31), (36, 0), (2**32 - 1, 0), (77, 1_000_001)):
        yield file(f"WAV with the lengths {riff} and {size}", _wav_sizes(whole, riff, size))
    for kind, subtype in (
        ("WAV", "PCM_16"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("MP3", "MPEG_LAYER_III"),
    ):
        data = _sound(kind, subtype, 48000, 2)
        yield file(f"{kind}, cut", data[: len(data) * 3 // 5 + 1], is_cut=True)
    for container, codec in (("adts", "aac"), ("webm", "libopus"), ("mpegts", "mp2"), ("matroska", "flac")):
        data = _encoded(container, codec, 48000)
        yield file(f"{container} {codec}, cut", data[: len(data) * 3 // 5], is_cut=True)


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def with_chunk(png: bytes, name: bytes, body: bytes, *, is_sound: bool, before: bytes = b"IDAT") -> bytes:
    """A PNG with one more chunk, whose CRC may be wrong."""
    place = png.index(before) - 4
    crc = zlib.crc32(name + body) ^ (not is_sound)
    chunk = struct.pack(">I4s", len(body), name) + body + struct.pack(">I", crc)
    return png[:place] + chunk + png[place:]


def pictures() -> Iterator[File]:
    def file(name: str, data: bytes, *, is_cut: bool = False) -> File:
        return File(kind="image", name=name, data=data, is_cut=is_cut)

    noise = np.random.default_rng(3).integers(0, 255, (12, 16, 4), dtype=np.uint8)
    picture = Image.fromarray(noise[..., :3]).resize((160, 120), Image.Resampling.BICUBIC)
    grey16 = Image.fromarray((np.asarray(picture.convert("L")).astype(np.uint16) << 8) + 77)
    alpha = picture.copy()
    alpha.putalpha(128)
    for mode in ("1", "L", "P", "RGB"):
        for kind in ("PNG", "BMP", "GIF", "TIFF"):
            if (mode, kind) != ("1", "TIFF"):
                yield file(f"{kind}, {mode}", _saved(picture.convert(mode), kind))
    yield file("PNG, RGBA", _saved(alpha, "PNG"))
    yield file("PNG, 16-bit grey", _saved(grey16, "PNG"))
    for quality in (40, 95):
        for progressive in (False, True):
            data = _saved(picture, "JPEG", quality=quality, progressive=progressive)
            name = f"JPEG, quality {quality}{', progressive' * progressive}"
            yield file(name, data)
            yield file(f"{name}, no end marker", data[:-2])
            yield file(f"{name}, half an end marker", data[:-1])
            yield file(f"{name}, cut", data[: len(data) * 3 // 5], is_cut=True)
    yield file("JPEG, grey", _saved(picture.convert("L"), "JPEG"))
    yield file("JPEG, 4:4:4", _saved(picture, "JPEG", subsampling=0))
    yield file("WebP", _saved(picture, "WEBP", lossless=True))
    yield file("WebP, lossy", _saved(picture, "WEBP"))
    yield file("AVIF", _saved(picture, "AVIF", speed=10))
    yield file("TIFF, LZW", _saved(picture, "TIFF", compression="tiff_lzw"))
    yield file("TIFF, Deflate", _saved(picture, "TIFF", compression="tiff_adobe_deflate"))
    yield file("PPM", _saved(picture, "PPM"))
    yield file(
        "GIF, three frames", _saved(picture, "GIF", save_all=True, append_images=[picture.rotate(9)] * 2)
    )
    png = _saved(picture, "PNG")
    yield file("PNG, text with a wrong CRC", with_chunk(png, b"tEXt", b"a\0b", is_sound=False))
    yield file(
        "PNG, text with a wrong CRC at its end",
        with_chunk(png, b"tEXt", b"a\0b", is_sound=False, before=b"IEND"),
    )
    yield file("PNG, damaged profile", with_chunk(png, b"iCCP", b"garbage", is_sound=True))
    yield file("PNG, no end chunk", png[:-12])
    yield file("PNG, cut", png[: len(png) * 3 // 5], is_cut=True)


class Program:
    """The `ffmpeg` program, as the other side of the comparison."""

    def __init__(self, path: str) -> None:
        self._path = path

    @property
    def version(self) -> str:
        return self._run(["-version"])[0].split(b"\n")[0].decode()

    def _run(self, words: Sequence[str]) -> tuple[bytes, str]:
        done = subprocess.run([self._path, *words], capture_output=True, check=False)
        return done.stdout, done.stderr.decode(errors="replace")

    def decode(self, data: bytes, words: Sequence[str]) -> tuple[bytes, str]:
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            return self._run(["-hide_banner", "-nostats", "-i", file.name, *words, "-"])

    def times(self, data: bytes) -> NDArray[np.float64]:
        """Seconds at which frames are shown, from the first on."""
        words = ["-an", "-vf", "showinfo", "-fps_mode", "passthrough", "-f", "null"]
        found = [float(each) for each in re.findall(r"pts_time:(\S+)", self.decode(data, words)[1])]
        return np.asarray(found) - (found[0] if found else 0)

    def pixels(self, data: bytes, size: tuple[int, int]) -> NDArray[np.uint8]:
        """(frames, H, W, 3) uint8."""
        # Colours between their samples are interpolated, as libjpeg, libwebp and libavif do.
        scale = "scale=flags=bilinear+full_chroma_int+full_chroma_inp+accurate_rnd"
        words = ["-an", "-fps_mode", "passthrough", "-vf", scale, "-f", "rawvideo", "-pix_fmt", "rgb24"]
        raw = np.frombuffer(self.decode(data, words)[0], np.uint8)
        count = raw.size // (3 * size[0] * size[1])
        return raw[: count * 3 * size[0] * size[1]].reshape(count, *size, 3)

    def samples(self, data: bytes) -> NDArray[np.float32]:
        """The mean of all channels of a clip, at its own rate."""
        text = self.decode(data, ["-f", "null"])[1]
        found = re.search(r"Stream #0.*?Audio: .*?, (mono|stereo|5\.1|(\d+) channels)", text)
        channels = {"mono": 1, "stereo": 2, "5.1": 6}[found[1]] if found else 1
        raw = np.frombuffer(self.decode(data, ["-vn", "-f", "f32le"])[0], np.float32)
        return raw.reshape(-1, channels).mean(axis=1)


def source_times(source: FrameSource) -> NDArray[np.float64]:
    """Seconds at which the frames of `source` are shown, and its end."""
    if source.times is not None:
        return source.times
    return np.arange(source.num_frames + 1) / source.fps


def compared(file: File, program: Program) -> dict[str, Any]:
    """Figures of one file: `here` and `ffmpeg`, `difference`, and whether they agree."""
    try:
        return {"name": file.name, "kind": file.kind, **_COMPARE[file.kind](file, program)}
    except (RequestError, av.FFmpegError) as error:
        return {"name": file.name, "kind": file.kind, "refused": str(error), "agrees": file.is_cut}


def _compare_video(file: File, program: Program) -> dict[str, Any]:
    source = open_video(file.data, "video", MediaLimits())
    expected = program.times(file.data)
    if file.is_cut:
        source.count_decodable()
    times = source_times(source)
    wanted = sorted({*np.linspace(0, source.num_frames - 1, 5).astype(int).tolist()})
    frames = np.stack([frame for _, frame in source.frames(wanted)])
    pixels = program.pixels(file.data, (64, 96))
    same = len(pixels) == source.num_frames
    difference = np.abs(frames.astype(int) - pixels[wanted]).mean() if same else 255.0
    late = float(np.abs(times[:-1] - expected).max()) if len(expected) == source.num_frames else 99.0
    return {
        "here": {"frames": source.num_frames, "seconds": round(float(times[-1]), 3)},
        "ffmpeg": {"frames": len(expected), "last_frame_at": round(float(expected[-1]), 3)},
        "difference": {"times_s": round(late, 4), "levels": round(float(difference), 2)},
        "agrees": bool(late <= 0.05 and difference < 2),
    }


def _compare_clip(file: File, program: Program) -> dict[str, Any]:
    wave = decode_audio(file.data, "clip", max_seconds=60)
    expected = program.samples(file.data)
    if not len(wave.samples) and not len(expected):
        return {"here": {"samples": 0}, "ffmpeg": {"samples": 0}, "agrees": file.is_cut}
    levels = [float(np.sqrt(np.square(each, dtype=np.float64).mean())) for each in (wave.samples, expected)]
    return {
        "here": {"samples": len(wave.samples), "rate": wave.sample_rate, "level": round(levels[0], 5)},
        "ffmpeg": {"samples": len(expected), "level": round(levels[1], 5)},
        "difference": {
            "samples": len(wave.samples) - len(expected),
            "level": round(levels[0] / levels[1] - 1, 5),
        },
        "agrees": abs(len(wave.samples) - len(expected)) <= _CODEC_DELAY
        and abs(levels[0] / levels[1] - 1) < 0.03,
    }


def _compare_picture(file: File, program: Program) -> dict[str, Any]:
    pixels = decode_image(file.data, "picture")
    expected = program.pixels(file.data, (120, 160))
    difference = np.abs(pixels.astype(int) - expected[0]).mean() if len(expected) else 255.0
    return {
        "here": {"size": list(pixels.shape[:2]), "mean": round(float(pixels.mean()), 2)},
        "ffmpeg": {"mean": round(float(expected[0].mean()), 2) if len(expected) else None},
        "difference": {"levels": round(float(difference), 2)},
        "agrees": bool(difference < 1) and not file.is_cut,
    }


_COMPARE = {"video": _compare_video, "audio": _compare_clip, "image": _compare_picture}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ffmpeg", default="ffmpeg", help="the program to compare with")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = cpu_result.parse_args(parser)
    program = Program(args.ffmpeg)
    print(program.version, flush=True)
    figures = []
    for file in (*videos(), *clips(), *pictures()):
        figures.append(compared(file, program))
        print("" if figures[-1]["agrees"] else "DIFFERS", figures[-1], flush=True)
    failed = [figure["name"] for figure in figures if not figure["agrees"]]
    counts = {kind: sum(figure["kind"] == kind for figure in figures) for kind in _COMPARE}
    print(f"{counts}; {len(failed)} differ: {failed}")
    if args.json:
        cpu_result.write(args.json, "media_ffmpeg", figures, ffmpeg=program.version)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
