"""Cost of media on the host: decoding per core, and gaps of a server's event loop. No GPU.

Media are made here: a JPEG of 1920×1080, a FLAC of 30 s, an H.264 clip of 10 s of 1280×720, and for the event loop also
one that is slow to decode (a PNG of 48 million pixels) and a large one (a WAV of 86 MB). They are decoded one after the
other through `run_task`, which decoder processes run for a server, and through the pool with its copies; rates per core
are by processor time. The event loop is that of `media_server.py`, with the clients beside it.

    python benchmarks/media_decode.py --json benchmarks/results/media-decode-cpu-….json
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import cpu_result
import numpy as np
from arguments import whole
from media_server import STEP_S, audio_parameters, vision_parameters
from numpy.typing import NDArray
from part_driver import python_path

from mingc.media.decoder_pool import DecoderPool
from mingc.media.decoding import digest_of, run_task
from mingc.media.limits import DEFAULT_MEDIA_BYTES
from mingc.prompts.media_decoder import MediaTask
from mingc.runtime.request import ServiceInfo
from mingc.server.http.body import decode_base64
from mingc.server.http.parsing import parse_chat
from mingc.server.options import ServeOptions

_TIMEOUT_S = 600.0  # on a machine that does much else
_QUIET_S = 5.0  # of the stream alone, before media are sent
_FIELDS = {"image": ("image_url", "image_url"), "audio": ("audio_url", "audio_url"),
           "video": ("video_url", "video_url")}  # fmt: skip
_INFO = ServiceInfo(
    model="no model", sample_rate=0, voices=(), default_voice=None, has_text=True,
    has_image=True, has_video=True, has_audio_input=True, has_speech=False,
)  # fmt: skip
_LIBRARIES = ("pillow", "soundfile", "av", "opencv-python-headless")
Figure = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Medium:
    """An encoded file. `seconds`: its length; 0 for an image. `is_timed`: decoding it is measured alone as well."""

    name: str
    kind: Literal["image", "audio", "video"]
    data: bytes
    seconds: float = 0.0
    is_timed: bool = True

    @property
    def task(self) -> MediaTask:
        if self.kind == "audio":
            return MediaTask(
                kind="audio", where="clip", max_bytes=DEFAULT_MEDIA_BYTES, audio=audio_parameters()
            )
        return MediaTask(
            kind=self.kind, where="picture", max_bytes=DEFAULT_MEDIA_BYTES, vision=vision_parameters()
        )

    def body(self) -> bytes:
        """A chat request with this medium that asks for one token."""
        kind, field = _FIELDS[self.kind]
        url = f"data:{self.kind}/any;base64,{base64.b64encode(self.data).decode()}"
        content = [{"type": kind, field: {"url": url}}, {"type": "text", "text": "What is this?"}]
        return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 1}).encode()


def picture(height: int, width: int, phase: float = 0.0) -> NDArray[np.uint8]:
    """(H, W, 3): waves of several lengths with grain, which compress about as a photograph does."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float32)
    generator = np.random.default_rng(5)
    channels = []
    for number in range(3):
        waves = sum(
            np.sin(x / length + y / (length * (1.3 + number)) + phase * number)
            for length in (3.0, 11.0, 47.0, 190.0)
        )
        channels.append(127 + 24 * waves + generator.normal(0, 3, (height, width)).astype(np.float32))
    return np.stack(channels, -1).clip(0, 255).astype(np.uint8)


def jpeg(height: int, width: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray(picture(height, width)).save(file, "JPEG", quality=90)
    return file.getvalue()


def plain_png(height: int, width: int) -> bytes:
    """A picture that compresses well, so that the file is small and decoding it takes long."""
    from PIL import Image

    file = io.BytesIO()
    rows = np.arange(height, dtype=np.uint8)[:, None, None]
    columns = np.arange(width, dtype=np.uint8)[None, :, None]
    pixels = rows + columns + np.arange(3, dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG", compress_level=1)
    return file.getvalue()


def sound(seconds: float, rate: int, kind: str, subtype: str) -> bytes:
    """Two channels of tones that swell, with noise."""
    import soundfile

    at = np.arange(round(seconds * rate)) / rate
    noise = np.random.default_rng(6).normal(0, 0.01, (len(at), 2))
    tones = sum(np.sin(2 * np.pi * hertz * at) for hertz in (140, 280, 700, 2400)) / 8
    file = io.BytesIO()
    soundfile.write(
        file, noise + (tones * (0.6 + 0.4 * np.sin(7 * at)))[:, None], rate, format=kind, subtype=subtype
    )
    return file.getvalue()


def clip(seconds: int, height: int, width: int, fps: int = 30) -> bytes:
    """An H.264 video of a picture that moves sideways, as MP4."""
    import av

    wide = picture(height, 2 * width)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream: Any = output.add_stream("libx264", rate=fps, options={"preset": "veryfast", "crf": "23"})
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for index in range(seconds * fps):
            start = 3 * index % width
            frame = av.VideoFrame.from_ndarray(
                np.ascontiguousarray(wide[:, start : start + width]), format="rgb24"
            )
            frame.pts, frame.time_base = index, Fraction(1, fps)
            output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return file.getvalue()


def media() -> list[Medium]:
    return [
        Medium(name="JPEG of 1920×1080", kind="image", data=jpeg(1080, 1920)),
        Medium(name="FLAC of 30 s", kind="audio", data=sound(30, 44_100, "FLAC", "PCM_16"), seconds=30),
        Medium(name="H.264 of 10 s, 1280×720", kind="video", data=clip(10, 720, 1280), seconds=10),
        Medium(name="PNG of 48 million pixels", kind="image", data=plain_png(6000, 8000), is_timed=False),
        Medium(
            name="WAV of 300 s, 86 MB",
            kind="audio",
            data=sound(300, 48_000, "WAV", "PCM_24"),
            seconds=300,
            is_timed=False,
        ),
    ]


def times(work: Callable[[], object], count: int) -> Figure:
    """Milliseconds of `count` calls, after one that is not counted: elapsed, and of the processor.

    Processor time is that of all threads of this process; other work on the machine hardly changes it.
    """
    work()
    elapsed, used = [], []
    for _ in range(count):
        start, start_used = time.perf_counter(), time.process_time()
        work()
        elapsed.append(1e3 * (time.perf_counter() - start))
        used.append(1e3 * (time.process_time() - start_used))
    return {"processor": summary(used), "elapsed": summary(elapsed)}


def summary(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": float(f"{ordered[len(ordered) // 2]:.4g}"),
        "min": float(f"{ordered[0]:.4g}"),
        "p95": float(f"{ordered[int(0.95 * (len(ordered) - 1))]:.4g}"),
        "n": len(ordered),
    }


def decoding(medium: Medium, pool: DecoderPool, count: int) -> Figure:
    """Milliseconds of the steps of one medium, and what a second of processor time decodes."""
    task, data, body = medium.task, medium.data, medium.body()
    features = run_task(task, data)
    encoded = memoryview(base64.b64encode(data))
    decode = times(lambda: run_task(task, data), count)
    rate = 1e3 / decode["processor"]["median"]
    return {
        "name": "decoding",
        "medium": medium.name,
        "bytes": len(data),
        "feature_bytes": features.num_bytes,
        "unit": "ms",
        "decode": decode,
        # Processor time of the server alone: copies to and from the decoder process.
        "decode_through_the_pool": times(lambda: pool.run(task, data), count),
        "parse_the_body": times(lambda: parse_chat(body, _INFO, ServeOptions()), count),
        "decode_base64": times(lambda: decode_base64(encoded, is_escaped=True), count),
        "hash_the_file": times(lambda: digest_of(task, data), count),
        "per_core": {
            "files_per_s": round(rate, 2),
            "mb_per_s": round(rate * len(data) / 1e6, 2),
            **({"media_seconds_per_s": round(rate * medium.seconds, 1)} if medium.seconds else {}),
        },
    }


class Stream:
    """A streamed answer that a thread reads for as long as it runs. `take`: how late its chunks came."""

    def __init__(self, url: str, tokens: int) -> None:
        self._lock = threading.Lock()
        self._between: list[float] = []
        body = json.dumps(
            {
                "messages": [{"role": "user", "content": "Count."}],
                "max_tokens": tokens,
                "ignore_eos": True,
                "stream": True,
            }
        )
        self._connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
        self._connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
        self._response = self._connection.getresponse()
        if self._response.status != 200:
            raise RuntimeError(self._response.read().decode())
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        before = time.perf_counter()
        for line in self._response:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                with self._lock:
                    self._between.append(1e3 * (now - before))
                before = now

    def take(self) -> list[float]:
        """Milliseconds between chunks since the last call. Raises: RuntimeError when the stream has ended."""
        with self._lock:
            found, self._between = self._between, []
        if not self._thread.is_alive():
            raise RuntimeError("the stream ended before the media did")
        return found

    def close(self) -> None:
        self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._connection.close()


@contextmanager
def server() -> Iterator[tuple[str, Callable[[], Figure]]]:
    """URL of a server process, and what reads the gaps of its event loop."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("media_server.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": python_path()},
    )
    assert process.stdin is not None and process.stdout is not None
    stdin, stdout = process.stdin, process.stdout

    def gaps() -> Figure:
        stdin.write("\n")
        stdin.flush()
        found: Figure = json.loads(stdout.readline())
        return found

    try:
        yield stdout.readline().strip(), gaps
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def send(url: str, body: bytes) -> float:
    """Seconds of a request for one token."""
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
    start = time.perf_counter()
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {answer[:500].decode()}")
    connection.close()
    return time.perf_counter() - start


def loop_gaps(found: list[Medium], count: int, clients: int) -> list[Figure]:
    """Gaps of the event loop beside a stream: without media, then with `count` requests of each medium."""
    figures = []
    with server() as (url, gaps):
        for medium in found[:3]:
            send(url, medium.body())
        stream = Stream(url, 120_000)

        def measure(name: str, work: Callable[[], list[float]], clients: int) -> None:
            gaps()
            stream.take()
            took = work()
            between = stream.take()
            figures.append(
                {
                    "name": "event_loop",
                    "medium": name,
                    "clients": clients,
                    "unit": "ms",
                    **gaps(),
                    "between_chunks": {**summary(between), "longest": round(max(between), 2)},
                    **({"request": summary([1e3 * each for each in took])} if took else {}),
                }
            )
            print(figures[-1], flush=True)

        def alone() -> list[float]:
            time.sleep(_QUIET_S)
            return []

        time.sleep(1.0)
        measure("none", alone, 0)
        for number in sorted({1, clients}):
            for medium in found:
                body = medium.body()
                measure(medium.name, lambda body=body, number=number: load(url, body, count, number), number)
        stream.close()
    return figures


def load(url: str, body: bytes, count: int, clients: int) -> list[float]:
    """Send `body` `count` times from `clients` threads; seconds of each request."""
    took: list[float] = []
    errors: list[Exception] = []

    def run(number: int) -> None:
        try:
            for _ in range(number, count, clients):
                took.append(send(url, body))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return took


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=whole(1), default=40, help="timed runs of each step")
    parser.add_argument("--requests", type=whole(1), default=20, help="requests with each medium")
    parser.add_argument("--clients", type=whole(1, 16), default=2, help="clients that send media at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to FILE")
    args = cpu_result.parse_args(parser)
    if "OPENBLAS_NUM_THREADS" not in os.environ:
        # One thread, as in a decoder process; numpy reads it when it is loaded.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "OPENBLAS_NUM_THREADS": "1"})
    found = media()
    load_before = os.getloadavg()
    figures = []
    pool = DecoderPool(timeout_s=_TIMEOUT_S)
    try:
        pool.start()
        for medium in found:
            if medium.is_timed:
                figures.append(decoding(medium, pool, args.count))
                print(figures[-1], flush=True)
    finally:
        pool.close()
    figures += loop_gaps(found, args.requests, args.clients)
    if args.json:
        cpu_result.write(
            args.json,
            "media_decode",
            figures,
            step_ms=1e3 * STEP_S,
            libraries={name: version(name) for name in _LIBRARIES},
            # Of the whole machine: elapsed times and gaps grow with other work, processor time and own shares hardly.
            load_average={"before": load_before, "after": os.getloadavg()},
        )


if __name__ == "__main__":
    main()
