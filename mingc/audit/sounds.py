"""Sounds to be judged: files, what their containers claim, and the texts that they speak."""

from __future__ import annotations

import io
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from numpy.typing import NDArray

from mingc.bench.sound import read_header
from mingc.errors import ConfigError

Wave = NDArray[np.float32]

SUFFIXES = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".aac", ".webm")
_LEAST_HZ, _MOST_HZ = 4_000, 768_000
_MOST_S, _MOST_SAMPLES = 1800, 100_000_000  # of one file; measuring takes several times their memory


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Sound:
    """One utterance as it was received.

    Attributes:
        name: unique in its group.
        utterance: sounds of both groups with the same utterance are compared; repetitions share one.
        samples: (n,) float32, channels mixed down, at `hz`.
        hz: sample rate as the container says.
        stated_s: length as the container's header says; None: it does not say.
        counted_s: length as the server counted it; None: it does not say.
        text: what is spoken; empty: unknown.
        data: the file.
    """

    name: str
    utterance: str
    samples: Wave
    hz: int
    stated_s: float | None = None
    counted_s: float | None = None
    text: str = ""
    data: bytes = b""

    @property
    def duration_s(self) -> float:
        return len(self.samples) / self.hz


def read_sound(
    data: bytes, name: str, *, utterance: str = "", text: str = "", counted_s: float | None = None
) -> Sound:
    """Decode a sound file of any format that FFmpeg knows.

    Raises: ConfigError when there is no sound in it.
    """
    pieces: list[Wave] = []
    stated: float | None = None
    try:
        with av.open(io.BytesIO(data), "r") as container:
            if not container.streams.audio:
                raise ConfigError(
                    f"{name} has no sound", where="mingc audit", fix=f"give one of {', '.join(SUFFIXES)}"
                )
            stream = container.streams.audio[0]
            hz = int(stream.rate)
            if not _LEAST_HZ <= hz <= _MOST_HZ:
                raise ConfigError(f"{name} has a rate of {hz} Hz", where="mingc audit", fix="resample it")
            left = most = min(_MOST_SAMPLES, _MOST_S * hz)
            packed = av.AudioResampler(format="flt")
            for frame in itertools.chain(container.decode(stream), (None,)):
                # The mean of all channels: FFmpeg makes a mono sound of two equal channels 3 dB louder.
                pieces += [
                    each.to_ndarray().reshape(-1, each.layout.nb_channels).mean(axis=1)
                    for each in packed.resample(frame)
                ]
                left -= 0 if frame is None else frame.samples
                if left < 0:
                    raise ConfigError(
                        f"{name} is longer than {most / hz / 60:.0f} minutes", where="mingc audit",
                        fix="cut it",
                    )  # fmt: skip
            # Files without a header of the whole have a length that FFmpeg guesses from the first frames.
            is_guessed = container.format.name in ("aac", "mp3")
            if stream.duration and stream.time_base and not is_guessed:
                stated = float(stream.duration * stream.time_base)
        # FFmpeg shortens the length of a WAV file to what the file has: one that was cut would look whole.
        if data[:4] == b"RIFF" and (header := read_header(data)) is not None:
            rate, frame_bytes, size, _ = header
            stated = None if size is None else size / (rate * frame_bytes)
    except (av.error.FFmpegError, ValueError, ZeroDivisionError) as error:
        raise ConfigError(
            f"{name} cannot be decoded: {error}", where="mingc audit", fix="give a complete sound file"
        ) from error
    return Sound(
        name=name,
        utterance=utterance or name,
        samples=np.concatenate(pieces) if pieces else np.zeros(0, np.float32),
        hz=hz,
        stated_s=stated,
        counted_s=counted_s,
        text=text,
        data=data,
    )


def read_group(path: Path) -> tuple[Sound, ...]:
    """Read a file, or all sound files of a folder and its folders.

    Files of a folder are compared by name. A name in several of its folders is repeated. `NAME.txt` beside a file says
    what is spoken.
    """
    if path.is_dir():
        files = sorted(each for each in path.rglob("*") if each.suffix.lower() in SUFFIXES and each.is_file())
        names = [each.relative_to(path).as_posix() for each in files]
        utterances = [each.stem for each in files]
    else:
        files, names, utterances = [path], [path.name], [""]
    if not files:
        raise ConfigError(
            f"{path} has no sound file", where="mingc audit", fix=f"give one of {', '.join(SUFFIXES)}"
        )
    return tuple(
        read_sound(read_file(file), name, utterance=utterance, text=_text(file.with_suffix(".txt")))
        for file, name, utterance in zip(files, names, utterances, strict=True)
    )


def _text(path: Path) -> str:
    return read_file(path).decode("utf-8", errors="replace").strip() if path.is_file() else ""


def read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}",
            where="mingc audit",
            fix="name a file or folder of sounds, the address of a server, or an artifact",
        ) from error


def encode_mp3(sound: Sound) -> bytes:
    """Encode for a page, at 24,000 Hz and 48 kbit/s."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp3") as container:
        stream = container.add_stream("mp3", rate=24_000, layout="mono", bit_rate=48_000)
        resampler = av.AudioResampler(format="s16p", layout="mono", rate=24_000)
        for whole in (*frames(sound.samples, sound.hz), None):
            for frame in resampler.resample(whole):
                container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return file.getvalue()


def frames(samples: Wave, hz: int) -> Iterator[av.AudioFrame]:
    """The samples as frames of FFmpeg, of a second each."""
    for start in range(0, len(samples), hz):
        frame = av.AudioFrame.from_ndarray(
            np.nan_to_num(samples[None, start : start + hz]).astype(np.float32), format="flt", layout="mono"
        )
        frame.sample_rate, frame.pts, frame.time_base = hz, start, Fraction(1, hz)
        yield frame
