"""Encoded audio → log-mel features of the audio encoder (spec: audio.md §1, §2, §5).

soundfile decodes the formats of libsndfile (WAV, FLAC, Ogg, MP3). PyAV decodes all others (AAC, WebM, the sound of a
video), and files in which libsndfile finds no samples (a WAV that was written to a pipe has no length). Channels are
mixed down; the official code takes the first and drops the others.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import AudioParameters
from mingc.errors import RequestError
from mingc.media.containers import open_container
from mingc.media.dsp.log_mel import log_mel, min_samples
from mingc.media.dsp.resample import resample
from mingc.media.formats import undecodable_file
from mingc.media.libraries import load_library
from mingc.media.limits import MediaLimits
from mingc.prompts.features import AudioFeatures
from mingc.prompts.media_decoder import NO_SOUND

_BLOCK_SAMPLES = 1 << 18  # all channels of a block have so many together
_MIN_STREAMED_HZ = 4000  # a few samples at less would be many seconds at once for what finds speech
_STREAMED_SAMPLES = 1 << 17  # of one channel: 8 s at 16 kHz
_MAX_CHANNELS = 64
_MAX_PACKET_SAMPLES = 1 << 21  # more than the longest frame of any format
# Bytes per sample for blocks, the joined clip, its magnitude, the padded copy and the resampled clip.
_SAMPLE_COST = 20
_SLACK_SECONDS = 0.1  # decoding may exceed the limit by this; resampling checks it exactly, in whole frames
_MAX_RATE_HZ = 384_000  # the highest rate that recording hardware has; bounds the memory of a decoded clip
_NO_PICTURES = 1 << 20  # probing may decode a frame of this many pixels, in a video whose sound is wanted
_CANCELLED = (
    0.1  # of the power of the mixdown of independent channels; less means that they cancel each other
)
_POWER_STRIDE = 61  # power is measured on every 61st sample
_MAX_PEAK = 1e6  # far beyond any recording; larger samples would overflow the spectrum


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """One decoded channel: `samples` (n,) float32 in [-1, 1]."""

    samples: NDArray[np.float32]
    sample_rate: int


def _check_rate(rate: int, where: str, least: int = 1) -> None:
    if not least <= rate <= _MAX_RATE_HZ:
        raise RequestError(
            f"the audio has a sample rate of {rate} Hz",
            where=where,
            fix=f"send at most {_MAX_RATE_HZ} Hz" if rate >= least else f"send at least {least} Hz",
            param=where,
        )


def _check_channels(channels: int, where: str) -> None:
    if not 0 < channels <= _MAX_CHANNELS:
        raise RequestError(
            f"the audio has {channels} channels",
            where=where,
            fix=f"send at most {_MAX_CHANNELS} channels; they are mixed down",
            param=where,
        )


def _check_length(count: int, rate: int, where: str, max_seconds: float, limits: MediaLimits) -> None:
    """Refuse a clip if the `count` of samples decoded so far is too large; its header is not trusted."""
    if count > (max_seconds + _SLACK_SECONDS) * rate:
        raise _too_long(where, max_seconds)
    limits.check_bytes(_SAMPLE_COST * count, where, f"a clip of {count} samples at {rate} Hz")


def _too_long(where: str, max_seconds: float) -> RequestError:
    return RequestError(
        f"the audio is longer than {max_seconds:g} seconds",
        where=where,
        fix="send a shorter clip, or several clips",
        param=where,
    )


class _Mixdown:
    """Mixes blocks of (n, channels) float32 to one channel: their mean, or the channel `only`.

    The mean of equal channels is that channel, bit for bit, if their number is a power of two.
    """

    def __init__(self, channels: int, only: int | None = None) -> None:
        self._weights = np.full(channels, 1 / channels, np.float32)
        self._only = 0 if channels == 1 else only
        self._power = np.zeros(channels)
        self._mixed_power = 0.0

    def mix(self, block: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._only is not None:
            return np.ascontiguousarray(block[:, self._only])
        with np.errstate(all="ignore"):  # infinite samples are refused later
            mixed: NDArray[np.float32] = block @ self._weights
            some, mixed_some = block[::_POWER_STRIDE], mixed[::_POWER_STRIDE]
            self._power += np.einsum("nc,nc->c", some, some)
            self._mixed_power += float(mixed_some @ mixed_some)
        return mixed

    @property
    def lost_channel(self) -> int | None:
        """The loudest channel if the channels cancel each other (one microphone, one wire inverted), else None."""
        independent = self._power.sum() / len(self._power) ** 2
        return int(self._power.argmax()) if self._mixed_power < _CANCELLED * independent else None


_Block = tuple[NDArray[np.float32], int]  # (n, channels), sample rate


class _UnreadableError(Exception):
    """libsndfile does not know the format, or finds the file damaged."""


def _soundfile_blocks(data: bytes, where: str) -> Iterator[_Block]:
    """Blocks of all channels; an empty one first. Raises: _UnreadableError, also after some blocks."""
    soundfile = load_library("soundfile")
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = int(file.samplerate)
            _check_rate(rate, where)
            _check_channels(file.channels, where)
            yield np.empty((0, file.channels), np.float32), rate
            # Read in blocks, because the declared length may be wrong; only one channel stays in memory.
            size = _BLOCK_SAMPLES // file.channels
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                yield block, rate
    except (soundfile.LibsndfileError, RuntimeError) as error:
        raise _UnreadableError(str(error)) from error


def _av_blocks(data: bytes, where: str) -> Iterator[_Block]:
    """Blocks of all channels of the audio track that FFmpeg prefers; nothing if it finds no samples.

    Damaged packets are left out, as FFmpeg does. Raises: RequestError with the code `NO_SOUND` without such a track.
    """
    av = load_library("av")
    try:
        with open_container(av, data, max_pixels=_NO_PICTURES) as container:
            if not container.streams.audio:
                raise RequestError("the file has no sound", where=where, param=where, code=NO_SOUND)
            stream = container.streams.best("audio") or container.streams.audio[0]
            context = stream.codec_context
            if context is None:  # a codec that this build of FFmpeg lacks
                return
            channels = max(1, context.channels)
            _check_rate(max(1, context.sample_rate), where)
            _check_channels(channels, where)
            context.options = {"max_samples": str(_MAX_PACKET_SAMPLES // min(channels, 8))}
            rate, layout = 0, None
            convert: Any = None
            shape: tuple[str, str, int] | None = None
            for packet in container.demux(stream):
                try:
                    frames = packet.decode()
                except (av.InvalidDataError, av.EOFError):
                    continue
                for frame in frames:
                    if (
                        layout is None
                    ):  # a header may say mono and 22 kHz of what is stereo and 44 kHz (HE-AAC)
                        rate, layout = frame.sample_rate, frame.layout
                        _check_rate(rate, where)
                        _check_channels(layout.nb_channels, where)
                    if shape != (shape := (frame.format.name, frame.layout.name, frame.sample_rate)):
                        # Interleaved, because reading the planes of a frame of more than eight channels crashes PyAV.
                        convert = av.AudioResampler("flt", layout, rate)
                    for part in convert.resample(frame):
                        yield part.to_ndarray().reshape(-1, layout.nb_channels), rate
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, IndexError):
        pass  # what was decoded before the damage is the clip


_Blocks = Callable[[bytes, str], Iterator[_Block]]


def _decode(
    blocks: _Blocks, data: bytes, where: str, max_seconds: float, limits: MediaLimits, only: int | None = None
) -> Wave | None:
    """One channel; None if the decoder cannot read the file."""
    mixdown: _Mixdown | None = None
    parts: list[NDArray[np.float32]] = []
    count = rate = 0
    try:
        for block, rate in blocks(data, where):
            mixdown = mixdown or _Mixdown(block.shape[1], only)
            parts.append(mixdown.mix(block))
            count += len(block)
            _check_length(count, rate, where, max_seconds, limits)
    except _UnreadableError:
        return None
    if mixdown is None:
        return None
    if (lost := mixdown.lost_channel) is not None and only is None:
        return _decode(blocks, data, where, max_seconds, limits, lost)
    parts = [part for part in parts if len(part)]  # a single one is not copied
    samples = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.float32), *parts])
    return Wave(samples=samples, sample_rate=rate)


def decode_audio(
    data: bytes,
    where: str,
    *,
    max_seconds: float,
    limits: MediaLimits | None = None,
    only: int | None = None,
) -> Wave:
    """Decode an encoded clip to one channel: the mean of all channels, or the channel `only`.

    Raises: RequestError when the bytes cannot be decoded, have no audio track (`NO_SOUND`), clearly exceed
        `max_seconds`, or exceed `limits`; ConfigError without soundfile or PyAV.
    """
    limits = limits or MediaLimits()
    wave = _decode(_soundfile_blocks, data, where, max_seconds, limits, only)
    if wave is None or not len(wave.samples):  # a WAV without lengths: FFmpeg reads it to its end
        wave = _decode(_av_blocks, data, where, max_seconds, limits, only) or wave
    if wave is None:
        raise _undecodable(data, where)
    return wave


def audio_blocks(data: bytes, where: str, *, max_seconds: float) -> Iterator[Wave]:
    """The blocks of `decode_audio`, for a file of any size in little memory: it is decoded twice.

    Before the first block the whole file is known to be readable and short enough.

    Raises: see `decode_audio`.
    """
    for blocks in (_soundfile_blocks, _av_blocks):
        mixdown: _Mixdown | None = None
        count = 0
        try:
            for block, rate in blocks(data, where):
                mixdown = mixdown or _Mixdown(block.shape[1])
                mixdown.mix(block)
                count += len(block)
                _check_rate(rate, where, least=_MIN_STREAMED_HZ)
                if count > max_seconds * rate:
                    raise _too_long(where, max_seconds)
        except _UnreadableError:
            continue
        if mixdown is not None and count:
            only = mixdown.lost_channel
            mixdown = _Mixdown(block.shape[1], only)
            parts: list[NDArray[np.float32]] = []
            for block, rate in blocks(data, where):
                parts.append(mixdown.mix(block))  # FFmpeg's are small
                if sum(map(len, parts)) >= _STREAMED_SAMPLES:
                    yield Wave(samples=np.concatenate(parts), sample_rate=rate)
                    parts = []
            yield Wave(samples=np.concatenate([np.empty(0, np.float32), *parts]), sample_rate=rate)
            return
    raise _undecodable(data, where)


def _undecodable(data: bytes, where: str) -> RequestError:
    return undecodable_file(data, "audio", where, fix="send a complete WAV, FLAC, MP3 or Ogg file")


def check_peak(samples: NDArray[np.float32], where: str) -> None:
    """Raises: RequestError when a sample is no number, or far too large."""
    peak = float(max(samples.max(initial=0.0), -samples.min(initial=0.0)))
    if not peak <= _MAX_PEAK:  # also true for NaN
        raise RequestError(
            f"the audio has samples of {peak:g}; full scale is 1",
            where=where,
            fix="send PCM samples, or float samples in [-1, 1]",
            param=where,
        )


def wave_features(wave: Wave, parameters: AudioParameters, where: str) -> AudioFeatures:
    """Features of a decoded clip, resampled to the encoder's rate; no padding, no loudness normalisation.

    Raises: RequestError when the clip is too short for one window or longer than the encoder's position table.
    """
    check_peak(wave.samples, where)
    samples = resample(wave.samples, wave.sample_rate, parameters.sample_rate)
    if len(samples) < min_samples(parameters.fft_size):
        raise RequestError(
            f"the audio has {len(samples)} samples at {parameters.sample_rate} Hz, too few for one frame",
            where=where,
            fix=f"send at least {min_samples(parameters.fft_size) / parameters.sample_rate:.4f} seconds",
            param=where,
        )
    if len(samples) // parameters.hop_samples > parameters.max_frames:
        raise _too_long(where, parameters.max_frames * parameters.hop_samples / parameters.sample_rate)
    mel = log_mel(
        samples,
        sample_rate=parameters.sample_rate,
        num_mels=parameters.num_mels,
        fft_size=parameters.fft_size,
        hop_samples=parameters.hop_samples,
    )
    # Each strided convolution of the encoder rounds up.
    return AudioFeatures(mel=mel, num_tokens=-(-len(mel) // parameters.frames_per_token))


def load_audio(
    data: bytes, parameters: AudioParameters, where: str, limits: MediaLimits | None = None
) -> AudioFeatures:
    """Encoded audio → features. `where` names the clip in errors.

    Raises: RequestError when the bytes contain no sound that the encoder supports, or the sound would exceed `limits`.
    """
    max_seconds = parameters.max_frames * parameters.hop_samples / parameters.sample_rate
    wave = decode_audio(data, where, max_seconds=max_seconds, limits=limits)
    return wave_features(wave, parameters, where)
