"""The clip of a voice, and its speaker vector by the checkpoint's ONNX speaker network (spec: talker.md §4.1)."""

from __future__ import annotations

from pathlib import Path

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


class SpeakerNetwork:
    """The network, loaded once; runs on one thread of the CPU, so that its values depend on the clip alone.

    Raises: ImportError without onnxruntime, and its errors (which share no narrower class than Exception) for a file
    that is no model.
    """

    def __init__(self, path: Path) -> None:
        import onnxruntime  # only for voices

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        options.log_severity_level = 3
        self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def embed(self, clip: NDArray[np.int16], sample_rate: int) -> NDArray[np.float32]:
        """(n,) → (D,) speaker vector."""
        wave = resample(to_float32(clip), sample_rate, _RATE_HZ)
        features = kaldi_fbank(wave, sample_rate=_RATE_HZ)
        features = features - features.mean(axis=0, keepdims=True)
        given = {self._session.get_inputs()[0].name: features[None].astype(np.float32)}
        return np.asarray(self._session.run(None, given)[0], np.float32).reshape(-1)
