"""Audio encoding of speech, whole or while it is generated.

WAV, raw PCM16 and FLAC contain 16-bit samples, PCMU and PCMA the 8 bits of G.711. FFmpeg (PyAV) encodes FLAC, MP3, Opus
in Ogg and AAC in ADTS frames; WAV headers are written here, because a stream needs one with an unknown length. Tempo
(FFmpeg's atempo) and sample rate (soxr) change before. PyAV and soxr are imported by the first clip that needs them, on
a thread.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from mingc.server import g711

AudioFormat = Literal["wav", "pcm16", "flac", "mp3", "opus", "aac", "pcmu", "pcma"]
MIN_RATE, MAX_RATE = 8000, 48000
_MPEG_RATES = (8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000)
# Of formats that have only some, in ascending order.
RATES: Mapping[AudioFormat, tuple[int, ...]] = {
    "mp3": _MPEG_RATES,
    "aac": _MPEG_RATES,
    "opus": (8000, 12000, 16000, 24000, 48000),
    "pcmu": (g711.RATE_HZ,),
    "pcma": (g711.RATE_HZ,),
}
_PCM_RATE = 24000  # OpenAI's API defines raw PCM so
_TYPES: Mapping[AudioFormat, str] = {  # RFC 3003, RFC 7845 §9, RFC 4856 §2.1
    "mp3": "audio/mpeg",
    "opus": "audio/ogg",
    "pcmu": "audio/PCMU",
    "pcma": "audio/PCMA",
}
_UNKNOWN_LENGTH = 0xFFFFFFFF
_WAV_HEADER_BYTES = 44
_MOST_BYTES_PER_SECOND = 20_000  # of MP3, Opus, AAC and G.711


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioSpec:
    """Audio format and sample rate (Hz) of a response.

    Attributes:
        sample_rate: of the clip.
        source_rate: of the speech, if it differs.
        speed: how much faster the clip is than the speech.
    """

    format: AudioFormat
    sample_rate: int
    source_rate: int | None = None
    speed: float = 1.0

    @property
    def is_playable_in_parts(self) -> bool:
        """Whether a stream has audible parts before its end; FLAC does not.

        STREAMINFO, the first block of a file, holds the number of samples. It may be "unknown" (RFC 9639 §8.2), but
        libsndfile cannot read such a file to its end.
        """
        return self.format != "flac"

    @property
    def is_unchanged(self) -> bool:
        """Whether the clip has the samples of the speech, at its tempo and rate."""
        return self.speed == 1.0 and self.speech_rate == self.sample_rate

    @property
    def is_quick(self) -> bool:
        """Whether encoding takes less time than handing it to a thread."""
        return self.is_unchanged and self.format in ("wav", "pcm16")

    @property
    def speech_rate(self) -> int:
        """Sample rate (Hz) of the speech."""
        return self.source_rate or self.sample_rate

    @property
    def content_type(self) -> str:
        """The HTTP content type; raw PCM has no header, so it carries the rate."""
        if self.format == "pcm16":
            return f"audio/pcm;rate={self.sample_rate};channels=1"
        return _TYPES.get(self.format, f"audio/{self.format}")

    def most_bytes(self, num_samples: int) -> int:
        """At most so many bytes encode `num_samples` of the speech; headers are not counted."""
        per_second = _MOST_BYTES_PER_SECOND if self.format in RATES else 2 * self.sample_rate
        return math.ceil(num_samples / self.speech_rate / self.speed * per_second)


def default_rate(audio_format: AudioFormat, speech_rate: int) -> int:
    """The sample rate of a clip whose request has none: of the speech, or the nearest one that loses nothing."""
    if audio_format == "pcm16":
        return _PCM_RATE
    rates = RATES.get(audio_format, (speech_rate,))
    return next((rate for rate in rates if rate >= speech_rate), rates[-1])


def to_pcm16(samples: NDArray[np.float32]) -> NDArray[np.int16]:
    """(n,) float32 in [-1, 1] → (n,) little-endian int16; values outside are clipped."""
    scaled = samples * np.float32(32767.0)
    np.rint(scaled, out=scaled)
    return scaled.clip(-32767.0, 32767.0, out=scaled).astype("<i2")


def wav_header(sample_rate: int, num_samples: int | None) -> bytes:
    """Write the 44-byte header of mono PCM16. None: unknown length, as the largest sizes, like ffmpeg to a pipe."""
    data_bytes = _UNKNOWN_LENGTH if num_samples is None else 2 * num_samples
    riff_bytes = min(_UNKNOWN_LENGTH, data_bytes + _WAV_HEADER_BYTES - 8)
    riff = b"RIFF" + struct.pack("<I", riff_bytes) + b"WAVE"
    fmt = b"fmt " + struct.pack("<IHHIIHH", 16, 1, 1, sample_rate, 2 * sample_rate, 2, 16)
    return riff + fmt + b"data" + struct.pack("<I", data_bytes)


class SampleConverter:
    """Turns (n,) float32 of the speech into samples of the clip, in its tempo and at its rate, piece by piece.

    In total n samples become ⌊n / speed + ½⌋, and these m become ⌊m · rate / speech rate + ½⌋.
    """

    def __init__(self, spec: AudioSpec) -> None:
        import soxr

        self._stretcher = None if spec.speed == 1.0 else _Stretcher(spec.speech_rate, spec.speed)
        self._resampler = (
            None
            if spec.speech_rate == spec.sample_rate
            else soxr.ResampleStream(spec.speech_rate, spec.sample_rate, 1, dtype="float32")
        )

    def add(self, samples: NDArray[np.float32], *, is_last: bool = False) -> NDArray[np.float32]:
        """The samples of the clip that `samples` complete; all that remain if they are the last."""
        if self._stretcher is not None:
            samples = self._stretcher.add(samples, is_last=is_last)
        if self._resampler is not None:
            samples = self._resampler.resample_chunk(samples, last=is_last)
        return samples


class _Stretcher:
    """FFmpeg's atempo, which changes the tempo and not the pitch."""

    # Samples. The filter returns a frame when it is full, so large ones would be late, and rounds by their size.
    _FRAME = 1024

    def __init__(self, rate: int, speed: float) -> None:
        import av

        self._av, self._rate, self._speed = av, rate, speed
        self._num_in = self._num_out = 0
        self._rest = np.empty(0, np.float32)  # less than a frame
        # One filter blends its windows from 0.5 to 2, slower it cannot be, and faster it would skip samples.
        num_filters = 1 if 0.5 <= speed <= 2.0 else 2
        self._graph = av.filter.Graph()
        nodes = [
            self._graph.add_abuffer(sample_rate=rate, format="flt", layout="mono"),
            *(self._graph.add("atempo", repr(speed ** (1 / num_filters))) for _ in range(num_filters)),
            self._graph.add("abuffersink"),
        ]
        self._graph.link_nodes(*nodes).configure()
        # At its end every filter drops up to two windows (of 1/24 s, rounded up to a power of two).
        self._silence = np.zeros(num_filters * (1 << (rate // 12).bit_length()) + self._FRAME, np.float32)

    def add(self, samples: NDArray[np.float32], *, is_last: bool) -> NDArray[np.float32]:
        self._num_in += len(samples)
        samples = np.concatenate([self._rest, samples, *([self._silence] if is_last else [])])
        end = len(samples) - len(samples) % self._FRAME
        parts, self._rest = [np.empty(0, np.float32)], samples[end:]
        for start in range(0, end, self._FRAME):
            self._graph.push(_frame(samples[start : start + self._FRAME], self._rate))
            parts += self._ready()
        if is_last:
            self._graph.push(None)
            parts += self._ready()
        joined = np.concatenate(parts)
        if is_last:
            joined = joined[: math.floor(self._num_in / self._speed + 0.5) - self._num_out]
        self._num_out += len(joined)
        return joined

    def _ready(self) -> list[NDArray[np.float32]]:
        parts: list[NDArray[Any]] = []
        while True:
            try:
                parts.append(self._graph.pull().to_ndarray().reshape(-1))
            except (self._av.BlockingIOError, self._av.EOFError):
                return parts


class ClipEncoder:
    """Encodes one clip in parts, which joined are the clip. `close` it.

    FLAC is written into `file`, which can seek, because its header has the length; nothing is returned then.
    """

    def __init__(self, spec: AudioSpec, file: IO[bytes] | None = None) -> None:
        self._converter = None if spec.is_unchanged else SampleConverter(spec)
        self._law: g711.Law | None = spec.format if spec.format in ("pcmu", "pcma") else None
        self._codec = _Codec(spec, file or _Pipe()) if spec.format in _Codec.KINDS else None
        self._header = wav_header(spec.sample_rate, None) if spec.format == "wav" else b""

    def add(self, samples: NDArray[np.float32], *, is_last: bool = False) -> bytes:
        """Encode (n,) float32 mono samples of the speech. Returns the bytes that can be sent now."""
        if self._converter is not None:
            samples = self._converter.add(samples, is_last=is_last)
        if self._codec is not None:
            return self._codec.add(samples, is_last=is_last)
        if not len(samples) and not is_last:
            return b""
        if self._law is not None:
            return g711.encode(to_pcm16(samples), self._law)
        header, self._header = self._header, b""
        return header + to_pcm16(samples).tobytes()

    def finish(self) -> bytes:
        """The bytes that remain after the last samples."""
        return self.add(np.empty(0, np.float32), is_last=True)

    def close(self) -> None:
        """Free the encoder. May be called twice."""
        if self._codec is not None:
            self._codec.close()


class _Pipe:
    """A file that is only written."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def take(self) -> bytes:
        """What was written since the last call."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


class _Codec:
    """FLAC, MP3, Opus or AAC by FFmpeg, into `file`. Every packet is written as soon as it is complete."""

    # Container and codec of FFmpeg, bits per second, and options of the container.
    KINDS: Mapping[str, tuple[str, str, int | None, dict[str, str]]] = {
        "flac": ("flac", "flac", None, {"metadata_header_padding": "0"}),
        # Without tags, and without the table of contents that only a complete file has.
        "mp3": ("mp3", "libmp3lame", 128_000, {"id3v2_version": "0", "write_xing": "0"}),
        "aac": ("adts", "aac", 128_000, {}),
        "opus": ("ogg", "libopus", 64_000, {"page_duration": "20000"}),  # μs: a page for every packet
    }

    def __init__(self, spec: AudioSpec, file: IO[bytes] | _Pipe) -> None:
        import av

        container, codec, bits, options = self.KINDS[spec.format]
        self._rate = spec.sample_rate
        self._file = file
        options = {**options, "flush_packets": "1", "fflags": "+bitexact"}
        self._container = cast(Any, av.open(file, "w", format=container, options=options))
        self._stream = self._container.add_stream(codec, rate=spec.sample_rate, layout="mono")
        self._is_16_bit = spec.format == "flac"
        if self._is_16_bit:
            self._stream.format = "s16"
        if bits is not None:
            self._stream.bit_rate = min(bits, 4 * spec.sample_rate)

    def add(self, samples: NDArray[np.float32], *, is_last: bool) -> bytes:
        container = self._container
        if len(samples):
            frame = _frame(to_pcm16(samples) if self._is_16_bit else np.clip(samples, -1.0, 1.0), self._rate)
            container.mux(self._stream.encode(frame))
        if is_last:
            if self._is_16_bit:
                container.start_encoding()  # a file without samples has a header; of the others, none can be read
            container.mux(self._stream.encode(None))
            self.close()
        return self._file.take() if isinstance(self._file, _Pipe) else b""

    def close(self) -> None:
        """Complete the file. Frees the encoder, which otherwise is in a cycle with its container."""
        container, self._container, self._stream = self._container, None, None
        if container is not None:
            container.close()


def _frame(samples: NDArray[Any], rate: int) -> Any:
    """(n,) float32 or int16 samples as a frame of FFmpeg; n > 0."""
    import av

    kind = "s16" if samples.dtype == np.int16 else "flt"
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples)[None], format=kind, layout="mono")
    frame.sample_rate = rate
    return frame


class ClipFile:
    """Encodes one clip into `file`, which can seek; WAV and FLAC have their length in the header."""

    def __init__(self, spec: AudioSpec, file: IO[bytes]) -> None:
        self._spec = spec
        self._file = file
        self._encoder = ClipEncoder(spec, file if spec.format == "flac" else None)

    def add(self, samples: NDArray[np.float32]) -> None:
        """Add (n,) float32 mono samples of the speech."""
        self._file.write(self._encoder.add(samples))

    def finish(self) -> int:
        """Complete the file and go to its start. Returns its length in bytes."""
        self._file.write(self._encoder.finish())
        num_bytes = self._file.seek(0, 2)
        self._file.seek(0)
        if self._spec.format == "wav":
            self._file.write(wav_header(self._spec.sample_rate, (num_bytes - _WAV_HEADER_BYTES) // 2))
            self._file.seek(0)
        return num_bytes

    def close(self) -> None:
        """Drop the clip: the encoder before its file, into which it writes at its end."""
        self._encoder.close()
        self._file.close()


class Base64Groups:
    """Cuts data that arrives in pieces so that base64 of the pieces returned, joined, is base64 of the whole data.

    Only the last piece may be padded, so all others have a multiple of three bytes.
    """

    def __init__(self) -> None:
        self._rest = b""

    def add(self, data: bytes) -> bytes:
        """The complete groups; up to two bytes remain for the next call."""
        data = self._rest + data
        end = len(data) - len(data) % 3
        self._rest = data[end:]
        return data[:end]

    def finish(self) -> bytes:
        """The remaining bytes."""
        return self._rest
