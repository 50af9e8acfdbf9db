"""Encoded audio → log-mel features of the audio encoder (spec: audio.md §1, §2, §5).

soundfile decodes the formats of libsndfile (WAV, FLAC, Ogg, MP3). PyAV, if installed, decodes all others (AAC, WebM,
the sound of a video).
"""

from __future__ import annotations

import importlib
import io
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import AudioParameters
from mingc.errors import RequestError
from mingc.media.containers import open_container
from mingc.media.dsp.log_mel import log_mel, min_samples
from mingc.media.dsp.resample import resample
from mingc.media.limits import MediaLimits, undecodable
from mingc.prompts.features import AudioFeatures

_BLOCK_SAMPLES = 1 << 18  # all channels of a block have so many together
_MAX_CHANNELS = 64
_MAX_PACKET_SAMPLES = 1 << 21  # more than the longest frame of any format
# Bytes per sample for blocks, the joined clip, its magnitude, the padded copy and the resampled clip.
_SAMPLE_COST = 20
_SLACK_SECONDS = 0.1  # decoding may exceed the limit by this; resampling checks it exactly, in whole frames
_MAX_RATE_HZ = 384_000  # the highest rate that recording hardware has; bounds the memory of a decoded clip
_NO_PICTURES = 1 << 20  # probing may decode a frame of this many pixels, in a video whose sound is wanted
_MAX_PEAK = 1e6  # far beyond any recording; larger samples would overflow the spectrum


@dataclass(frozen=True, kw_only=True, slots=True)
class Wave:
    """One decoded channel: `samples` (n,) float32 in [-1, 1]."""

    samples: NDArray[np.float32]
    sample_rate: int


def _check_rate(rate: int, where: str) -> None:
    if not 0 < rate <= _MAX_RATE_HZ:
        raise RequestError(
            f"the audio has a sample rate of {rate} Hz",
            where=where,
            fix=f"send at most {_MAX_RATE_HZ} Hz",
            param=where,
        )


def _check_channels(channels: int, where: str) -> None:
    if not 0 < channels <= _MAX_CHANNELS:
        raise RequestError(
            f"the audio has {channels} channels",
            where=where,
            fix=f"send at most {_MAX_CHANNELS} channels; the first is used",
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


def _joined(blocks: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The samples of all blocks; a single block is not copied."""
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate(blocks) if blocks else np.empty(0, np.float32)


def _decode_soundfile(data: bytes, where: str, max_seconds: float, limits: MediaLimits) -> Wave | None:
    """The first channel, or None for a format unknown to libsndfile (or without libsndfile)."""
    try:
        soundfile: Any = importlib.import_module("soundfile")
    except ImportError:
        return None
    blocks: list[NDArray[np.float32]] = []
    count = 0
    try:
        with soundfile.SoundFile(io.BytesIO(data)) as file:
            rate = int(file.samplerate)
            _check_rate(rate, where)
            _check_channels(file.channels, where)
            # Read in blocks, because the declared length may be wrong; only the first channel stays in memory.
            size = _BLOCK_SAMPLES // file.channels
            while len(block := file.read(size, dtype="float32", always_2d=True)):
                blocks.append(np.ascontiguousarray(block[:, 0]))
                count += len(block)
                _check_length(count, rate, where, max_seconds, limits)
    except (soundfile.LibsndfileError, RuntimeError):
        return None
    return Wave(samples=_joined(blocks), sample_rate=rate)


def _decode_av(data: bytes, where: str, max_seconds: float, limits: MediaLimits) -> Wave | None:
    """The first channel of the first audio track, or None without such a track (or without PyAV)."""
    try:
        av: Any = importlib.import_module("av")
    except ImportError:
        return None
    blocks: list[NDArray[np.float32]] = []
    count = 0
    try:
        with open_container(av, data, max_pixels=_NO_PICTURES) as container:
            context = container.streams.audio[0].codec_context if container.streams.audio else None
            if context is None:  # no sound, or a codec that this build of FFmpeg lacks
                return None
            rate = int(context.sample_rate)
            _check_rate(rate, where)
            _check_channels(context.channels, where)
            context.options = {"max_samples": str(_MAX_PACKET_SAMPLES // min(context.channels, 8))}
            # Interleaved, because reading the planes of a frame of more than eight channels crashes PyAV.
            resampler = av.AudioResampler(format="flt")
            for frame in container.decode(audio=0):
                for part in resampler.resample(frame):
                    blocks.append(np.ascontiguousarray(part.to_ndarray()[0, :: context.channels]))
                    count += len(blocks[-1])
                _check_length(count, rate, where, max_seconds, limits)
    except MemoryError:
        raise
    except (av.FFmpegError, ValueError, IndexError):
        return None
    return Wave(samples=_joined(blocks), sample_rate=rate)


def decode_audio(data: bytes, where: str, *, max_seconds: float, limits: MediaLimits | None = None) -> Wave:
    """Decode the first channel of an encoded clip; other channels are dropped, not mixed.

    Raises: RequestError when the bytes cannot be decoded, clearly exceed `max_seconds`, or exceed `limits`.
    """
    limits = limits or MediaLimits()
    wave = _decode_soundfile(data, where, max_seconds, limits) or _decode_av(data, where, max_seconds, limits)
    if wave is None:
        raise undecodable(
            f"{len(data)} bytes cannot be decoded as audio",
            where,
            "send a complete WAV, FLAC, MP3 or Ogg file",
        )
    return wave


def wave_features(wave: Wave, parameters: AudioParameters, where: str) -> AudioFeatures:
    """Features of a decoded clip, resampled to the encoder's rate; no padding, no loudness normalisation.

    Raises: RequestError when the clip is too short for one window or longer than the encoder's position table.
    """
    peak = float(max(wave.samples.max(initial=0.0), -wave.samples.min(initial=0.0)))
    if not peak <= _MAX_PEAK:  # also true for NaN
        raise RequestError(
            f"the audio has samples of {peak:g}; full scale is 1",
            where=where,
            fix="send PCM samples, or float samples in [-1, 1]",
            param=where,
        )
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
