"""Silence holder: delay pauses in streamed speech until speech follows, and shorten the trailing silence.

Source: the official `silence_holder`, without its fault: the silence after the last loud frame is taken from the chunk
itself, so no sample is lost or sent twice. Only the end of the utterance is shortened.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FRAME_S = 0.1
LOUD_MEAN = 1e-3
TAIL_S = 0.3

Waveform = NDArray[np.float32]


class SilenceHolder:
    """Silence filter of one utterance: samples leave in order, silence as late as possible."""

    def __init__(self, sample_rate: int) -> None:
        """`sample_rate` in Hz; a frame is 0.1 s."""
        self._frame = int(sample_rate * FRAME_S)
        self._tail = int(sample_rate * TAIL_S)
        if self._frame < 1:
            raise ValueError(f"a sample rate of {sample_rate} Hz has no sample in a frame of {FRAME_S} s")
        # Silent frames that wait for speech, then the samples of an incomplete frame.
        self._held: list[Waveform] = []
        self._partial: Waveform = np.zeros(0, dtype=np.float32)

    def push(self, chunk: Waveform, is_last: bool) -> Waveform:
        """Return the samples that can be played now.

        `chunk`: (num_samples,) float32, may be empty. With `is_last`, everything up to the last loud frame and 0.3 s
        after it leaves; if all held samples are silent, their first 0.3 s leave. The holder is then empty and ready for
        another utterance.
        """
        if chunk.ndim != 1:
            raise ValueError(f"a chunk is one channel, (num_samples,); got shape {chunk.shape}")
        samples = np.concatenate([self._partial, chunk], dtype=np.float32)
        end = self._last_loud_end(samples, is_last)
        if is_last:
            rest = np.concatenate([*self._held, samples])
            if end:
                end += rest.size - samples.size
            self._held, self._partial = [], samples[:0]
            return rest[: end + self._tail]
        num_whole = samples.size - samples.size % self._frame
        self._partial = samples[num_whole:]
        if not end:
            self._held.append(samples[:num_whole])
            return samples[:0]
        ready = np.concatenate([*self._held, samples[:end]])
        self._held = [samples[end:num_whole]]
        return ready

    def _last_loud_end(self, samples: Waveform, is_last: bool) -> int:
        """End of the last loud frame, or 0. An incomplete frame is considered only in the last chunk."""
        starts = range(0, samples.size if is_last else samples.size - self._frame + 1, self._frame)
        for start in reversed(starts):
            frame = samples[start : start + self._frame]
            if np.abs(frame).mean() > LOUD_MEAN:
                return start + frame.size
        return 0
