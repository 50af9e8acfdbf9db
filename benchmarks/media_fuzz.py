#!/usr/bin/env python
"""Decode mutated images, sounds and videos as the server does, and measure memory and time of its decoder processes.

Fails when a decoder crashes, a medium takes longer than the limit, an error is not one of a request, or memory exceeds
the idle process by more than 512 MiB. Mutations are drawn from a fixed seed. With --hostile the files of
`tests/support/hostile_media.py` that demand much memory are decoded instead.

    python benchmarks/media_fuzz.py --count 6000
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from mingc.artifacts.parameters import AudioParameters, VisionParameters
from mingc.errors import MingcError, RequestError
from mingc.media.decoder_pool import DecoderPool
from mingc.media.limits import DEFAULT_MEDIA_BYTES, MIB
from mingc.prompts.conversation import VideoParams
from mingc.prompts.media_decoder import MediaTask

_TIMEOUT_S = 60.0
_MAX_GROWTH_BYTES = 512 * MIB
_SAMPLE_S = 0.005
_CODES = {
    "undecodable_media",
    "media_too_large",
    "context_length_exceeded",
    "invalid_value",
    "no_audio_track",
    None,
}


@dataclass(kw_only=True)
class FuzzReport:
    """Counts by kind and outcome; memory in MiB of one decoder process; faults."""

    files: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    slowest: str = ""
    idle_mib: int = 0
    peak_mib: int = 0
    largest: str = ""
    outcomes: dict[str, dict[str, int]] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


class PeakMemory:
    """Samples the resident memory of the decoder processes of a pool; `take` returns the peak in bytes and resets."""

    def __init__(self, pool: DecoderPool) -> None:
        self._pool = pool
        self._peak = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)
        self._thread.start()

    def take(self) -> int:
        self._read()
        peak, self._peak = self._peak, 0
        return peak

    def close(self) -> None:
        self._is_closed.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._is_closed.wait(_SAMPLE_S):
            self._read()

    def _read(self) -> None:
        for pid in self._pool.pids:
            try:
                text = Path(f"/proc/{pid}/status").read_text()
            except OSError:
                continue
            if "VmRSS:" in text:  # a process that ends has none
                self._peak = max(self._peak, int(text.split("VmRSS:")[1].split()[0]) * 1024)


def tasks(vision: VisionParameters, audio: AudioParameters) -> dict[str, MediaTask]:
    """The task of each kind of medium."""
    return {
        "image": MediaTask(kind="image", where="image", max_bytes=DEFAULT_MEDIA_BYTES, vision=vision),
        "audio": MediaTask(kind="audio", where="audio", max_bytes=DEFAULT_MEDIA_BYTES, audio=audio),
        "video": MediaTask(
            kind="video",
            where="video",
            max_bytes=DEFAULT_MEDIA_BYTES,
            vision=vision,
            video=VideoParams(min_pixels=4096),
        ),
    }


def corpus() -> list[tuple[str, str, bytes]]:
    """(kind, name, bytes) of small sound files in all formats that the server takes."""
    import av
    import soundfile
    from hostile_media import encode_video, oriented_jpeg
    from PIL import Image

    generator = np.random.default_rng(7)
    small = Image.fromarray(generator.integers(0, 255, (12, 16, 3), dtype=np.uint8)).resize((160, 120))
    found = []
    for name, mode, options in (
        ("PNG", "RGB", {}),
        ("PNG", "RGBA", {}),
        ("PNG", "P", {}),
        ("JPEG", "RGB", {}),
        ("JPEG", "CMYK", {"progressive": True}),
        ("WEBP", "RGB", {}),
        ("WEBP", "RGBA", {"lossless": True}),
        ("GIF", "P", {}),
        ("BMP", "RGB", {}),
        ("TIFF", "RGB", {"compression": "tiff_lzw"}),
        ("TIFF", "RGB", {"compression": "jpeg"}),
        ("PPM", "RGB", {}),
        ("AVIF", "RGB", {"speed": 10}),
    ):
        file = io.BytesIO()
        small.convert(mode).save(file, name, **options)
        found.append(("image", f"{name} {mode}", file.getvalue()))
    found.append(("image", "JPEG EXIF", oriented_jpeg(6)))
    clip = (0.3 * np.sin(np.arange(8000) / 9)).astype(np.float32)
    for name, subtype in (
        ("WAV", "PCM_16"),
        ("WAV", "FLOAT"),
        ("WAV", "IMA_ADPCM"),
        ("FLAC", "PCM_16"),
        ("OGG", "VORBIS"),
        ("OGG", "OPUS"),
        ("MP3", "MPEG_LAYER_III"),
        ("AIFF", "PCM_16"),
        ("CAF", "PCM_16"),
    ):
        file = io.BytesIO()
        soundfile.write(file, clip, 16000, format=name, subtype=subtype)
        found.append(("audio", f"{name} {subtype}", file.getvalue()))
    for container, codec in (("mp4", "aac"), ("matroska", "pcm_s16le"), ("adts", "aac")):
        file = io.BytesIO()
        with av.open(file, "w", format=container) as output:
            stream = output.add_stream(codec, rate=16000, layout="mono")
            kind = "s16" if codec == "pcm_s16le" else "fltp"
            for start in range(0, 8000 - 1024, 1024):
                part = clip[None, start : start + 1024]
                part = (part * 32767).astype(np.int16) if kind == "s16" else np.ascontiguousarray(part)
                frame = av.AudioFrame.from_ndarray(part, format=kind, layout="mono")
                frame.sample_rate, frame.pts = 16000, start
                output.mux(stream.encode(frame))
            output.mux(stream.encode())
        found.append(("audio", f"{container} {codec}", file.getvalue()))

    def paint(index: int) -> np.ndarray:
        return np.asarray(small.rotate(10 * index).resize((96, 64)))

    for container, codec, pixels in (
        ("mp4", "libx264", "yuv420p"),
        ("mp4", "mpeg4", "yuv420p"),
        ("mp4", "libx265", "yuv420p10le"),
        ("webm", "libvpx-vp9", "yuv420p"),
        ("matroska", "ffv1", "bgr0"),
        ("avi", "mjpeg", "yuvj420p"),
        ("mpegts", "libx264", "yuv420p"),
        ("flv", "flv1", "yuv420p"),
        ("gif", "gif", "rgb8"),
    ):
        options = {"x265-params": "log-level=none"} if codec == "libx265" else {}
        data = encode_video(
            96, 64, 8, codec=codec, container=container, pix_fmt=pixels, options=options, paint=paint
        )
        found.append(("video", f"{container} {codec}", data))
    return found


def mutate(data: bytes, generator: np.random.Generator) -> bytes:
    """A damaged copy: bytes changed anywhere or in the header, a cut, a removed, repeated or zeroed piece."""
    mutant = bytearray(data)
    for _ in range(1 + int(generator.integers(3))):
        size = len(mutant)
        if size < 8:
            break
        start = int(generator.integers(size))
        length = 1 + int(generator.integers(min(size - start, 256)))
        match int(generator.integers(7)):
            case 0 | 1:
                for place in generator.integers(0, size, 1 + int(generator.integers(20))):
                    mutant[place] = int(generator.integers(256))
            case 2:
                for place in generator.integers(0, min(size, 200), 1 + int(generator.integers(4))):
                    mutant[place] = int(generator.choice([0, 1, 0x7F, 0x80, 0xFF, generator.integers(256)]))
            case 3:
                del mutant[start:]
            case 4:
                del mutant[start : start + length]
            case 5:
                mutant[start:start] = mutant[start : start + length] * int(generator.integers(1, 5))
            case 6:
                # a number of four bytes, as sizes and counts are
                value = int(generator.choice([0, 1, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 0x00FFFFFF]))
                mutant[start : start + 4] = value.to_bytes(4, str(generator.choice(["big", "little"])))
    return bytes(mutant)


def decode_all(
    files: Iterator[tuple[MediaTask, str, bytes]],
    *,
    max_seconds: float,
    each: Callable[[str, str, float, int], None] | None = None,
) -> FuzzReport:
    """Decode the files one after the other. `each` gets name, outcome, seconds and peak bytes above idle."""
    report = FuzzReport()
    pool = DecoderPool(timeout_s=_TIMEOUT_S)
    memory = PeakMemory(pool)
    outcomes: dict[str, Counter[str]] = {}
    try:
        for task, name, data in files:
            if report.seconds > max_seconds:
                break
            if report.files == 0:
                _run(pool, task, b"")  # starts the process
                report.idle_mib = memory.take() // MIB
            began = time.monotonic()
            outcome, fault = _run(pool, task, data)
            seconds, peak = time.monotonic() - began, memory.take()
            outcomes.setdefault(task.kind, Counter())[outcome] += 1
            growth = peak - report.idle_mib * MIB
            if growth > _MAX_GROWTH_BYTES:
                fault = f"{growth // MIB} MiB above idle"
            if fault:
                report.faults.append(f"{name}: {fault}")
            report.files += 1
            report.seconds += seconds
            if seconds > report.slowest_s:
                report.slowest_s, report.slowest = round(seconds, 2), name
            if peak // MIB > report.peak_mib:
                report.peak_mib, report.largest = peak // MIB, name
            if each is not None:
                each(name, outcome, seconds, growth)
    finally:
        memory.close()
        pool.close()
    report.seconds = round(report.seconds, 1)
    report.outcomes = {kind: dict(counts) for kind, counts in outcomes.items()}
    return report


def _run(pool: DecoderPool, task: MediaTask, data: bytes) -> tuple[str, str]:
    """(outcome, fault) of one file; the fault is empty when a client's error explains it."""
    try:
        pool.run(task, data)
    except RequestError as error:
        if "by signal" in error.message or f"more than {_TIMEOUT_S:g} s" in error.message:
            return "crash", error.message
        return error.code or "refused", "" if error.code in _CODES else f"code {error.code}"
    except MingcError as error:
        return "error", f"{type(error).__name__}: {error.message}"
    return "decoded", ""


def mutants(
    vision: VisionParameters, audio: AudioParameters, *, count: int, seed: int
) -> Iterator[tuple[MediaTask, str, bytes]]:
    """`count` mutants, over all files of the corpus in turn."""
    generator = np.random.default_rng(seed)
    files, kinds = corpus(), tasks(vision, audio)
    for index in range(count):
        kind, name, data = files[index % len(files)]
        yield kinds[kind], f"{name} #{index}", mutate(data, generator)


def hostile(vision: VisionParameters, audio: AudioParameters) -> Iterator[tuple[MediaTask, str, bytes]]:
    """The files that demand much memory."""
    from hostile_media import hostile_files

    kinds = tasks(vision, audio)
    for kind, name, params, data in hostile_files():
        yield dataclasses.replace(kinds[kind], video=params), name, data


def main() -> int:
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from preprocess_data import audio_parameters, vision_parameters

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=3600.0, help="stop after this long")
    parser.add_argument("--hostile", action="store_true")
    arguments = parser.parse_args()
    # limits of the released artifact
    vision = dataclasses.replace(vision_parameters(), max_patches=65536)
    if arguments.hostile:
        report = decode_all(
            hostile(vision, audio_parameters()),
            max_seconds=arguments.seconds,
            each=lambda name, outcome, seconds, peak: print(
                f"{name}: {outcome}, {seconds:.2f} s, {max(0, peak) // MIB} MiB above idle", flush=True
            ),
        )
    else:
        files = mutants(vision, audio_parameters(), count=arguments.count, seed=arguments.seed)
        report = decode_all(files, max_seconds=arguments.seconds)
    print(json.dumps(asdict(report), indent=1))
    return 1 if report.faults else 0


if __name__ == "__main__":
    sys.exit(main())
