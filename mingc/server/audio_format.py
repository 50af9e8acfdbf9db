"""Audio encoding of speech: WAV, raw PCM16 or FLAC.

All three contain the same 16-bit samples at the artifact's own rate. WAV headers are written here, because a stream
needs one with an unknown length; libsndfile encodes FLAC.
"""

from __future__ import annotations

import base64
import struct
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import soundfile

AudioFormat = Literal["wav", "pcm16", "flac"]
_UNKNOWN_LENGTH = 0xFFFFFFFF
_WAV_HEADER_BYTES = 44


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioSpec:
    """Audio format and sample rate (Hz) of a response."""

    format: AudioFormat
    sample_rate: int

    @property
    def is_playable_in_parts(self) -> bool:
        """Whether a stream has audible parts before its end; FLAC does not.

        STREAMINFO, the first block of a file, holds the number of samples. It may be "unknown" (RFC 9639 §8.2), but
        libsndfile cannot read such a file to its end.
        """
        return self.format != "flac"

    @property
    def content_type(self) -> str:
        """The HTTP content type; raw PCM has no header, so it carries the rate."""
        if self.format == "pcm16":
            return f"audio/pcm;rate={self.sample_rate};channels=1"
        return f"audio/{self.format}"


def to_pcm16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """(n,) float32 in [-1, 1] → (n,) little-endian int16; values outside are clipped."""
    pcm: NDArray[np.int16] = np.rint(np.clip(samples, -1.0, 1.0) * np.float32(32767.0)).astype("<i2")
    return pcm


def wav_header(sample_rate: int, num_samples: int | None) -> bytes:
    """Write the 44-byte header of mono PCM16. None: unknown length, as the largest sizes, like ffmpeg to a pipe."""
    data_bytes = _UNKNOWN_LENGTH if num_samples is None else 2 * num_samples
    riff_bytes = min(_UNKNOWN_LENGTH, data_bytes + _WAV_HEADER_BYTES - 8)
    riff = b"RIFF" + struct.pack("<I", riff_bytes) + b"WAVE"
    fmt = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return riff + fmt + b"data" + struct.pack("<I", data_bytes)


def flac_header(sample_rate: int) -> bytes:
    """Write a FLAC file without samples, for which libsndfile writes no header (RFC 9639 §8.1, §8.2)."""
    # 20 bits rate, 3 bits channels - 1, 5 bits depth - 1, 36 bits length
    bits = sample_rate << 44 | (16 - 1) << 36
    block_and_frame_sizes = struct.pack(">HH", 4096, 4096) + bytes(6)
    return b"fLaC" + b"\x80\x00\x00\x22" + block_and_frame_sizes + struct.pack(">Q", bits) + bytes(16)


class ClipFile:
    """Encodes one clip into `file`, which can seek, with its length in the header."""

    def __init__(self, spec: AudioSpec, file: IO[bytes]) -> None:
        self._spec = spec
        self._file = file
        self._num_samples = 0
        self._flac = _open_flac(file, spec.sample_rate) if spec.format == "flac" else None
        if spec.format == "wav":
            file.write(wav_header(spec.sample_rate, 0))

    def add(self, pcm: NDArray[np.int16]) -> None:
        """Add (n,) samples of `to_pcm16`."""
        self._num_samples += len(pcm)
        if self._flac is not None:
            self._flac.write(pcm)
        else:
            self._file.write(pcm.tobytes())

    def finish(self) -> int:
        """Complete the file and go to its start. Returns its length in bytes."""
        if self._flac is not None:
            self._flac.close()
            if not self._num_samples:
                self._file.write(flac_header(self._spec.sample_rate))
        elif self._spec.format == "wav":
            self._file.seek(0)
            self._file.write(wav_header(self._spec.sample_rate, self._num_samples))
        num_bytes = self._file.seek(0, 2)
        self._file.seek(0)
        return num_bytes

    def close(self) -> None:
        """Drop the clip: the encoder before its file, into which it writes at its end."""
        if self._flac is not None and not self._file.closed:
            self._flac.close()
        self._file.close()


class Base64Stream:
    """Base64 of data that arrives in pieces. The pieces returned, joined, are the base64 of the whole data.

    Only the last piece may be padded, so all others encode a multiple of three bytes.
    """

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> str:
        """Base64 of the complete groups; up to two bytes remain for the next call."""
        data = self._rest + data
        end = len(data) - len(data) % 3
        self._rest = data[end:]
        return base64.b64encode(data[:end]).decode()

    def finish(self) -> str:
        """The remaining bytes."""
        return base64.b64encode(self._rest).decode()


def _open_flac(file: IO[bytes], sample_rate: int) -> soundfile.SoundFile:
    # not needed for WAV, and not installed on some GPU hosts
    import soundfile

    return soundfile.SoundFile(file, "w", samplerate=sample_rate, channels=1, format="FLAC", subtype="PCM_16")
