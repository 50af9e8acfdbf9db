"""Process that decodes media for the server, with limits that the kernel enforces.

`python -m mingc.media.decoder_process CONFIG` starts it. Decoders are C libraries that parse untrusted bytes: nobody
knows in advance how much memory a file makes them allocate, how long they run and whether they crash. Here RLIMIT_DATA
limits memory, an alarm limits the time of a task, and a crash ends only this process. It ends when its socket closes.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mingc.artifacts.codec import decode
from mingc.errors import ConfigError, MingcError, ServeError
from mingc.host import large_arrays
from mingc.media.decoding import blocks_of, run_task
from mingc.media.dsp.log_mel import log_mel
from mingc.media.libraries import LIBRARIES, load_library
from mingc.media.limits import MIB
from mingc.prompts.features import (
    AudioFeatures,
    Features,
    ReferencePicture,
    VideoFeatures,
    VisionFeatures,
    VoiceClip,
)
from mingc.prompts.media_decoder import MediaTask

_MARGIN_BYTES = (
    64 * MIB
)  # for tables and threads of libraries, besides the memory that is planned for a medium
_RETIRE_BYTES = 64 * MIB  # a process that keeps more than this after a task is replaced


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """`socket`: file descriptor for tasks and results. `max_bytes`, `timeout_s`: limits of one task."""

    socket: int
    max_bytes: int
    timeout_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskHead:
    """A task; `size` bytes of data follow it."""

    task: MediaTask
    size: int


# This is much faster than `codec`, which explains what is wrong with a document that a person wrote.
_TASK_DECODER = msgspec.json.Decoder(TaskHead)


def send(sock: socket.socket, head: Any, *buffers: Any) -> None:
    """Send a head as JSON, and buffers, whose sizes the head has."""
    text = msgspec.json.encode(head)
    sock.sendall(len(text).to_bytes(8, "little") + text)
    for buffer in buffers:
        sock.sendall(buffer)


def receive(sock: socket.socket) -> Any:
    """The head of a reply. Raises: EOFError when the other side has closed the socket."""
    return msgspec.json.decode(_receive_head(sock))


def _receive_head(sock: socket.socket) -> bytearray:
    return receive_bytes(sock, int.from_bytes(receive_bytes(sock, 8), "little"))


def receive_bytes(sock: socket.socket, size: int) -> bytearray:
    """Exactly `size` bytes. Raises: EOFError when the other side has closed the socket."""
    data = bytearray(size)
    _receive_into(sock, memoryview(data))
    return data


def _receive_into(sock: socket.socket, view: memoryview) -> None:
    while view:
        count = sock.recv_into(view)
        if not count:
            raise EOFError
        view = view[count:]


def receive_array(sock: socket.socket, dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """Receive an array that was sent as bytes. Raises: EOFError when the other side has closed the socket.

    The memory is not cleared first; `bytearray` does that while it keeps Python's lock, for 30 ms with a video.
    """
    array = large_arrays.empty(shape, dtype)
    _receive_into(sock, array.reshape(-1).view(np.uint8).data)
    return array


def pack(features: Features) -> tuple[dict[str, Any], list[NDArray[Any]]]:
    """Convert features to a JSON head and arrays."""
    if isinstance(features, AudioFeatures):
        return _head([features.mel], num_tokens=features.num_tokens), [features.mel]
    if isinstance(features, VoiceClip):
        return _head([features.samples], sample_rate=features.sample_rate), [features.samples]
    if isinstance(features, ReferencePicture):
        return _head([features.pixels], asked=list(features.asked)), [features.pixels]
    vision = features.vision if isinstance(features, VideoFeatures) else features
    arrays: list[NDArray[Any]] = [vision.patches] + ([] if vision.levels is None else [vision.levels])
    head = _head(arrays, grid=list(vision.grid), repeats=vision.repeats)
    if isinstance(features, VideoFeatures):
        head["timestamps"] = list(features.timestamps)
    return head, arrays


def unpack(head: dict[str, Any], arrays: list[NDArray[Any]]) -> Features:
    """Convert a head and arrays back to features: the inverse of `pack`."""
    if "num_tokens" in head:
        return AudioFeatures(mel=arrays[0], num_tokens=head["num_tokens"])
    if "sample_rate" in head:
        return VoiceClip(samples=arrays[0], sample_rate=head["sample_rate"])
    if "asked" in head:
        return ReferencePicture(pixels=arrays[0], asked=tuple(head["asked"]))
    frames, height, width = head["grid"]
    vision = VisionFeatures(
        patches=arrays[0],
        grid=(frames, height, width),
        levels=arrays[1] if len(arrays) > 1 else None,
        repeats=head["repeats"],
    )
    if "timestamps" not in head:
        return vision
    return VideoFeatures(vision=vision, timestamps=tuple(head["timestamps"]))


def _head(arrays: list[NDArray[Any]], **values: Any) -> dict[str, Any]:
    return {"arrays": [[array.dtype.str, list(array.shape)] for array in arrays], **values}


def _error_head(error: MingcError) -> dict[str, Any]:
    described: dict[str, Any] = {"message": error.message, "where": error.where, "fix": error.fix}
    if isinstance(error, ServeError):
        described |= {"status": error.status, "param": error.param, "code": error.code}
    return {"error": described, "is_config": isinstance(error, ConfigError)}


def _data_bytes() -> int:
    """Writable private memory of this process, which RLIMIT_DATA counts."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"VmData:"):
                return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmData")


def main() -> None:
    config = decode(DecoderConfig, json.loads(sys.argv[1]))
    # A terminal sends these signals to the whole process group; the server decides when its decoders end.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=config.socket)
    try:
        for module in LIBRARIES:  # before memory is limited
            load_library(module)
    except ConfigError as error:
        send(sock, _error_head(error))
        return
    Image.init()
    # Starts its second thread; OpenBLAS takes a buffer of 32 MiB for each.
    log_mel(np.zeros(1 << 18, np.float32), sample_rate=16000, num_mels=128, fft_size=400, hop_samples=160)
    start = _data_bytes()
    limit = start + config.max_bytes + _MARGIN_BYTES
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    for kind in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE):
        resource.setrlimit(kind, (0, 0))
    with sock, contextlib.suppress(EOFError, ConnectionError):
        send(sock, {"is_ready": True})
        while True:
            _serve_task(sock, config.timeout_s, start + _RETIRE_BYTES)


def _serve_task(sock: socket.socket, timeout_s: float, retire_bytes: int) -> None:
    head = _TASK_DECODER.decode(_receive_head(sock))
    data = bytes(receive_bytes(sock, head.size))
    signal.setitimer(signal.ITIMER_REAL, timeout_s)  # SIGALRM ends the process, also inside a decoder
    arrays: list[NDArray[Any]] = []
    reply: dict[str, Any]
    try:
        if head.task.is_stream:
            for block in blocks_of(head.task, data):
                left_s, _ = signal.setitimer(signal.ITIMER_REAL, 0)  # the server reads when it needs more
                send(sock, _head([block.samples], rate=block.sample_rate), block.samples.data)
                signal.setitimer(signal.ITIMER_REAL, max(left_s, 1e-6))
            reply = {}
        else:
            reply, arrays = pack(run_task(head.task, data))
    except MingcError as error:
        reply = _error_head(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    del data
    reply["retire"] = _data_bytes() - sum(array.nbytes for array in arrays) > retire_bytes
    send(sock, reply, *(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data for array in arrays))


if __name__ == "__main__":
    main()
