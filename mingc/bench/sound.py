"""Sound of an answer, counted while it comes."""

from __future__ import annotations

import hashlib
import io
import wave
from dataclasses import dataclass, field

import numpy as np
import soundfile
from numpy.typing import NDArray

_OPEN_END = 0x7FFF0000  # a longer `data` chunk has no known end: the writer did not know it
_MAX_HEADER = 4096


@dataclass(slots=True)
class Sound:
    """Mono or interleaved PCM: raw, behind one WAV header, or in pieces with a WAV header each (sglang-omni).

    Attributes:
        rate: sample frames a second of raw PCM.
        header_rate: that of the last header; None: there was none.
        times: when each chunk came.
        frames: sample frames in each of them.
        kept: their bytes, if `keeps`.
    """

    rate: int
    header_rate: int | None = None
    times: list[float] = field(default_factory=list)
    frames: list[int] = field(default_factory=list)
    kept: list[bytes] = field(default_factory=list)
    keeps: bool = False
    _frame_bytes: int = 2
    _held: bytes = b""  # half a header, or half a frame
    _left: int | None = None  # bytes of the `data` chunk to come; None: any number
    _hash: hashlib._Hash = field(default_factory=hashlib.sha256)

    def feed(self, data: bytes, now: float) -> None:
        """Count a chunk that came at `now`. Raises: ValueError when it is a file of another kind than WAV."""
        data = self._held + data
        self._held = b""
        if len(data) < 4 and not self.times and b"RIFF".startswith(data):
            self._held = data
            return
        if data[:4] == b"RIFF":
            header = read_header(data)
            if header is None:
                self._held = data
                return
            self.header_rate, self._frame_bytes, self._left, begin = header
            data = data[begin:]
        elif (not self.times and data[:4] in (b"OggS", b"fLaC")) or data[:3] == b"ID3":
            raise ValueError(f"a sound file that begins with {data[:4]!r}, wanted WAV or PCM")
        if self._left is not None:
            data = data[: self._left]
        whole = len(data) // self._frame_bytes * self._frame_bytes
        data, self._held = data[:whole], data[whole:]
        if self._left is not None:
            self._left -= whole
        if data:
            self.times.append(now)
            self.frames.append(whole // self._frame_bytes)
            self._hash.update(data)
            if self.keeps:
                self.kept.append(data)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()[:32] if self.times else ""


def read_header(data: bytes) -> tuple[int, int, int | None, int] | None:
    """Rate, bytes of a frame, bytes of the samples (None: not known) and their offset; None: `data` ends before."""
    at, rate, frame_bytes = 12, 0, 2
    while at + 8 <= len(data):
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"data":
            return rate, max(frame_bytes, 1), size if 0 < size < _OPEN_END else None, at + 8
        if name == b"fmt " and at + 24 <= len(data):
            rate, frame_bytes = (
                int.from_bytes(data[at + 12 : at + 16], "little"),
                int.from_bytes(data[at + 20 : at + 22], "little"),
            )
        at += 8 + size + size % 2
    if at > _MAX_HEADER:
        raise ValueError("a WAV file without samples")
    return None


def wav(samples: NDArray[np.floating], rate: int) -> bytes:
    """A WAV file of mono samples from −1 to 1, 16 bits."""
    return wav_of(pcm16(samples), rate)


def wav_of(pcm: bytes, rate: int) -> bytes:
    """The same of samples of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((1, 2, rate, 0, "NONE", ""))
        writer.writeframes(pcm)
    return file.getvalue()


def pcm16(samples: NDArray[np.floating]) -> bytes:
    return bytes(np.rint(32767 * np.clip(samples, -1, 1)).astype("<i2").tobytes())


def read(file: bytes) -> tuple[NDArray[np.float32], int]:
    """Mono samples of a sound file, and their rate. Raises: soundfile.LibsndfileError."""
    samples, rate = soundfile.read(io.BytesIO(file), dtype="float32", always_2d=True)
    return samples.mean(axis=1, dtype=np.float32), int(rate)
