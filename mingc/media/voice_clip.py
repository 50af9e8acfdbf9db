"""Encoded recording of a speaker → the clip of a voice, checked: a bad recording gives a bad voice."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from mingc.errors import RequestError
from mingc.media.audio import decode_audio
from mingc.media.dsp.speaker_features import to_float32, to_int16
from mingc.media.limits import MediaLimits
from mingc.media.voice_activity import FRAME_SAMPLES, RATE_HZ, VoiceActivity
from mingc.prompts.features import VoiceClip

_SHORTEST_S, _LONGEST_S = 1.0, 30.0
_QUIETEST_DB = -45.0  # RMS against full scale
_MOST_CLIPPED = 0.01
_SPEECH, _LEAST_SPEECH_S = 0.5, 1.0  # probability of a frame, and how much of it there must be
# Rates of recordings. Resampling from any other one could take minutes: its filter has a phase for each sample.
_RATES = (8000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000, 88_200, 96_000)


def load_voice_clip(data: bytes, where: str, limits: MediaLimits) -> VoiceClip:
    """The first channel of an encoded recording (not a mixture, which may have an echo or another speaker).

    Raises: RequestError when it cannot be decoded, is too short, long, quiet or loud.
    """
    refuse = partial(_unsuitable, where)
    wave = decode_audio(data, where, max_seconds=_LONGEST_S, limits=limits, only=0)
    rate, seconds = wave.sample_rate, len(wave.samples) / wave.sample_rate
    if rate not in _RATES:
        raise refuse(f"has a sample rate of {rate} Hz", f"send one of {', '.join(map(str, _RATES))}")
    if not _SHORTEST_S <= seconds <= _LONGEST_S:
        raise refuse(
            f"has {seconds:.2f} seconds",
            f"send {_SHORTEST_S:g} to {_LONGEST_S:g}, best 3 to 10 of clear speech",
        )
    if not np.isfinite(wave.samples).all():
        raise refuse("has samples that are no numbers", "send PCM samples")
    samples = to_int16(wave.samples)
    power = float(np.mean(np.square(to_float32(samples), dtype=np.float64)))
    level = 10 * math.log10(power) if power else -math.inf
    if level < _QUIETEST_DB:
        raise refuse(f"has a level of {level:.0f} dB", f"send a louder one: above {_QUIETEST_DB:g} dB RMS")
    clipped = float(np.mean((samples == 32767) | (samples == -32768)))
    if clipped >= _MOST_CLIPPED:
        raise refuse(f"is clipped in {clipped:.0%} of its samples", "record it with a lower gain")
    return VoiceClip(samples=samples, sample_rate=rate)


def check_speech(clip: VoiceClip, where: str) -> None:
    """Raises: RequestError when a clip has too little speech. Not for decoder processes, whose memory is limited."""
    activity = VoiceActivity(clip.sample_rate)
    probabilities = [*activity.push(to_float32(clip.samples)), *activity.finish()]
    seconds = sum(each >= _SPEECH for each in probabilities) * FRAME_SAMPLES / RATE_HZ
    if seconds < _LEAST_SPEECH_S:
        raise _unsuitable(where, f"has {seconds:.1f} s of speech", f"send at least {_LEAST_SPEECH_S:g} s")


def _unsuitable(where: str, why: str, fix: str) -> RequestError:
    return RequestError(
        f"the recording of the voice {why}", where=where, fix=fix, param=where, code="unsuitable_recording"
    )
