"""Probability of speech in a stream of sound, by Silero VAD 6.2.

The model in `silero/` is Silero's file `silero_vad_16k_op15.onnx`, under the MIT licence beside it.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mingc.media.dsp.resample import FrameResampler
from mingc.media.libraries import load_library

RATE_HZ = 16_000
FRAME_SAMPLES = 512
_CONTEXT_SAMPLES = 64  # the last ones of the frame before; without them no speech is found
_MODEL = Path(__file__).parent / "silero" / "silero_vad_16k_op15.onnx"


class VoiceActivity:
    """The probabilities of one stream at `sample_rate`; frame n has the sound from 32·n ms on."""

    def __init__(self, sample_rate: int) -> None:
        """Raises: ConfigError without onnxruntime or soxr."""
        self._run = _session().run
        self._resample: Any = None
        if sample_rate * FRAME_SAMPLES % RATE_HZ == 0 and sample_rate != RATE_HZ:
            self._resample = FrameResampler(sample_rate, RATE_HZ, FRAME_SAMPLES).push
        elif sample_rate != RATE_HZ:  # late by 20 ms and more
            soxr = load_library("soxr")
            self._resample = soxr.ResampleStream(sample_rate, RATE_HZ, 1, dtype="float32").resample_chunk
        self._state = np.zeros((2, 1, 128), np.float32)
        self._rate = np.array(RATE_HZ, np.int64)
        self._rest = np.zeros(
            _CONTEXT_SAMPLES, np.float32
        )  # the context of the next frame, and its first samples

    def push(self, samples: NDArray[np.float32]) -> list[float]:
        """Probabilities of the frames that `samples` (n,) in [-1, 1] complete; resampling delays some by a frame."""
        return self._frames(samples if self._resample is None else self._resample(samples))

    def finish(self) -> list[float]:
        """Probabilities of the last frames; silence completes the last one."""
        empty = np.zeros(0, np.float32)
        found = [] if self._resample is None else self._frames(self._resample(empty, last=True))
        if left := len(self._rest) - _CONTEXT_SAMPLES:
            found += self._frames(np.zeros(FRAME_SAMPLES - left, np.float32))
        return found

    def _frames(self, samples: NDArray[np.float32]) -> list[float]:
        buffer = np.concatenate([self._rest, samples])
        found = []
        size = _CONTEXT_SAMPLES + FRAME_SAMPLES
        start = 0
        while start + size <= len(buffer):
            inputs = {"input": buffer[None, start : start + size], "state": self._state, "sr": self._rate}
            output, self._state = self._run(None, inputs)
            found.append(float(output[0, 0]))
            start += FRAME_SAMPLES
        self._rest = buffer[start:].copy()
        return found


@functools.cache
def _session() -> Any:
    """The model, which all streams share: a call keeps no state."""
    onnxruntime = load_library("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4  # errors are raised
    return onnxruntime.InferenceSession(_MODEL, options, providers=["CPUExecutionProvider"])
