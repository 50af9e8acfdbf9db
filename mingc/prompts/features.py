"""Decoded media, the inputs of the encoders: `mingc.media` computes them, prompts hold them. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Grid = tuple[int, int, int]  # temporal patches, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFeatures:
    """Input of the vision encoder for one image or video.

    `patches` (t·h·w, C·time·p·p); the patches of one merged token are contiguous. Without `levels` they are normalised
    float32 values. With `levels` (C, 256) float32 they are uint8 colour levels, which this table normalises; an image
    is then stored once for `repeats` frames. `digest`: 32 bytes that differ for media whose features differ; None:
    unknown.
    """

    patches: NDArray[np.float32] | NDArray[np.uint8]
    grid: Grid
    levels: NDArray[np.float32] | None = None
    repeats: int = 1
    digest: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory of the patches."""
        return self.patches.nbytes

    def num_tokens(self, merge_size: int) -> int:
        """How many embeddings the encoder returns."""
        return math.prod(self.grid) // merge_size**2

    @property
    def pixels(self) -> NDArray[np.float32]:
        """All rows, normalised: (t·h·w, C·temporal·p·p) float32."""
        return self.rows(0, len(self.patches))

    def rows(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows [start, stop) of `pixels`."""
        part = self.patches[start:stop]
        if self.levels is None:
            return part.astype(np.float32, copy=False)
        channels = len(self.levels)
        rows = part.reshape(len(part), channels, 1, -1)
        pixels = np.empty((len(part), channels, self.repeats, rows.shape[-1]), dtype=np.float32)
        for channel in range(channels):
            pixels[:, channel] = self.levels[channel].take(rows[:, channel])
        return pixels.reshape(len(part), -1)

    def colours(self, start: int, stop: int) -> NDArray[np.uint8]:
        """Rows [start, stop) of `patches`, by channel: (n, C, time·p·p) uint8; only with `levels`."""
        assert self.levels is not None
        part = self.patches[start:stop].astype(np.uint8, copy=False)
        return part.reshape(len(part), len(self.levels), -1)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoFeatures:
    """Input of the vision encoder for one video: patches, grid (pairs, h, w), and the time of each pair in seconds."""

    vision: VisionFeatures
    timestamps: tuple[float, ...]

    @property
    def num_bytes(self) -> int:
        """Host memory of the patches."""
        return self.vision.num_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioFeatures:
    """Input of the audio encoder for one clip.

    `mel`: (frames, num_mels) float32. `num_tokens`: how many embeddings the encoder returns. `digest`: see
    `VisionFeatures`.
    """

    mel: NDArray[np.float32]
    num_tokens: int
    digest: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory of the mel frames."""
        return self.mel.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class VoiceClip:
    """The recording of a speaker, from which a voice is computed: `samples` (n,) int16, one channel."""

    samples: NDArray[np.int16]
    sample_rate: int
    digest: bytes | None = None

    @property
    def seconds(self) -> float:
        """Its length."""
        return len(self.samples) / self.sample_rate

    @property
    def num_bytes(self) -> int:
        """Host memory of the samples."""
        return self.samples.nbytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferencePicture:
    """A picture to draw from: `pixels` (H, W, 3) uint8, stretched to the size that the sampler works in.

    `asked`: (height, width) that decides on the size of the drawn picture.
    """

    pixels: NDArray[np.uint8]
    asked: tuple[int, int]
    digest: bytes | None = None

    @property
    def num_bytes(self) -> int:
        """Host memory of the pixels."""
        return self.pixels.nbytes


Features = VisionFeatures | VideoFeatures | AudioFeatures | VoiceClip | ReferencePicture
