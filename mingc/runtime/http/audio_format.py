"""Samples of the talker as bytes a client can play: WAV, raw PCM16, FLAC, whole or chunk by chunk.

All three hold the same 16-bit samples. WAV headers are written here, because a stream needs one of unknown length;
FLAC comes from libsndfile. No resampling: the header carries the artifact's own rate.
"""

from __future__ import annotations

import io
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import soundfile

AudioFormat = Literal["wav", "pcm16", "flac"]
_UNKNOWN_LENGTH = 0xFFFFFFFF
_WAV_HEADER_BYTES = 44


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioSpec:
    """What a client gets: a format, at the artifact's sample rate in Hz."""

    format: AudioFormat
    sample_rate: int

    @property
    def content_type(self) -> str:
        """The HTTP content type; raw PCM has no header, so its rate stands here."""
        if self.format == "pcm16":
            return f"audio/pcm;rate={self.sample_rate};channels=1"
        return f"audio/{self.format}"


def to_pcm16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """(n,) float32 in [-1, 1] → (n,) little-endian int16; what lies outside is clipped."""
    pcm: NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * np.float32(32767.0)).astype("<i2")
    return pcm


def wav_header(sample_rate: int, num_samples: int | None) -> bytes:
    """The 44-byte header of mono PCM16. None: unknown length, the largest sizes, as ffmpeg writes to a pipe."""
    data_bytes = _UNKNOWN_LENGTH if num_samples is None else 2 * num_samples
    riff_bytes = min(_UNKNOWN_LENGTH, data_bytes + _WAV_HEADER_BYTES - 8)
    riff = b"RIFF" + struct.pack("<I", riff_bytes) + b"WAVE"
    fmt = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return riff + fmt + b"data" + struct.pack("<I", data_bytes)


def flac_header(sample_rate: int) -> bytes:
    """A FLAC file of no samples, which libsndfile would leave without even a header (RFC 9639 §8.1, §8.2)."""
    # 20 bits rate, 3 bits channels - 1, 5 bits depth - 1, 36 bits length
    bits = sample_rate << 44 | (16 - 1) << 36
    block_and_frame_sizes = struct.pack(">HH", 4096, 4096) + bytes(6)
    return b"fLaC" + b"\x80\x00\x00\x22" + block_and_frame_sizes + struct.pack(">Q", bits) + bytes(16)


def encode(chunks: Sequence[NDArray[np.float32]], spec: AudioSpec) -> bytes:
    """A whole clip from its chunks of (n_i,) float32 mono samples, with true lengths in its header."""
    pcm = to_pcm16(np.concatenate(chunks)) if chunks else np.zeros(0, dtype="<i2")
    if spec.format == "pcm16":
        return pcm.tobytes()
    if spec.format == "wav":
        return wav_header(spec.sample_rate, len(pcm)) + pcm.tobytes()
    if not len(pcm):
        return flac_header(spec.sample_rate)
    with io.BytesIO() as file:
        with _open_flac(file, spec.sample_rate) as flac:
            flac.write(pcm)
        return file.getvalue()


class StreamEncoder(Protocol):
    """Encodes a clip whose end is not known yet. All returned bytes, in order, are one valid file."""

    def add(self, samples: NDArray[np.float32]) -> bytes:
        """The bytes that the (n,) float32 mono samples make ready (may be empty)."""
        ...

    def finish(self) -> bytes:
        """What is still held back; the encoder is of no use afterwards."""
        ...


def open_stream(spec: AudioSpec) -> StreamEncoder:
    """A fresh encoder for one clip."""
    if spec.format == "flac":
        return _FlacStream(spec.sample_rate)
    return _PcmStream(wav_header(spec.sample_rate, None) if spec.format == "wav" else b"")


class _PcmStream:
    """Raw samples, after a header that goes out with the first of them."""

    def __init__(self, header: bytes) -> None:
        self._header = header

    def add(self, samples: NDArray[np.float32]) -> bytes:
        header, self._header = self._header, b""
        return header + to_pcm16(samples).tobytes()

    def finish(self) -> bytes:
        return self._header


class _FlacStream:
    """FLAC by libsndfile into an append-only sink.

    STREAMINFO keeps "unknown" for the length and the checksum: libsndfile goes back to fill them in when it closes
    the file, and those bytes are gone by then. Decoders accept that (RFC 9639 §8.2), but cannot seek or tell how
    long the clip is.
    """

    def __init__(self, sample_rate: int) -> None:
        self._if_empty = flac_header(sample_rate)
        self._sink = _AppendOnly()
        self._flac = _open_flac(self._sink, sample_rate)

    def add(self, samples: NDArray[np.float32]) -> bytes:
        self._flac.write(to_pcm16(samples))
        return self._sink.take()

    def finish(self) -> bytes:
        self._flac.close()
        rest = self._sink.take()
        return rest if self._sink.tell() else self._if_empty


class _AppendOnly(io.RawIOBase):
    """A file whose end can be taken away; writes before the end are dropped."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._position = 0
        self._end = 0

    def write(self, data: object) -> int:
        chunk = bytes(memoryview(data))  # type: ignore[arg-type]  # libsndfile hands over a cffi buffer
        if self._position == self._end:
            self._pending += chunk
            self._end += len(chunk)
        self._position += len(chunk)
        return len(chunk)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._end}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def read(self, size: int = -1) -> bytes:
        return b""

    def take(self) -> bytes:
        ready = bytes(self._pending)
        self._pending.clear()
        return ready


def _open_flac(file: io.BytesIO | _AppendOnly, sample_rate: int) -> soundfile.SoundFile:
    # not needed by a server that only speaks WAV, and absent on some GPU machines
    import soundfile

    return soundfile.SoundFile(file, "w", samplerate=sample_rate, channels=1, format="FLAC", subtype="PCM_16")
