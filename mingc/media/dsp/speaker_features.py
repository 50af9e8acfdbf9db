"""The clip of a voice as 16-bit samples, and the features of its speaker (spec: talker.md §4.1)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mingc.media.dsp.fbank import kaldi_fbank
from mingc.media.dsp.resample import resample

_RATE_HZ = 16_000  # CAM++ was trained on 16 kHz filter banks


def to_int16(wave: NDArray[np.float32]) -> NDArray[np.int16]:
    """Round samples in [-1, 1] to 16 bits; samples that were decoded from 16 bits are exact."""
    rounded: NDArray[np.int16] = np.clip(np.rint(wave * np.float32(32768)), -32768, 32767).astype(np.int16)
    return rounded


def to_float32(clip: NDArray[np.int16]) -> NDArray[np.float32]:
    """The inverse of `to_int16`."""
    return clip.astype(np.float32) / np.float32(32768)


def speaker_features(clip: NDArray[np.int16], sample_rate: int) -> NDArray[np.float32]:
    """(n,) at any rate → (T, 80), the input of the speaker network: filter banks without their mean."""
    features = kaldi_fbank(resample(to_float32(clip), sample_rate, _RATE_HZ), sample_rate=_RATE_HZ)
    centred: NDArray[np.float32] = features - features.mean(axis=0, keepdims=True)
    return centred
