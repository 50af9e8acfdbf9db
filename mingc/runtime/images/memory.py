"""Memory that drawing takes, by the size of a batch: planned before a batch begins.

The plan is an upper bound from the sizes of the networks. It counts what is alive at the widest point of a block.
"""

from __future__ import annotations

from dataclasses import dataclass

from mingc.artifacts.parameters import ImageDitParameters, ImageVaeParameters
from mingc.prompts.picture_sizes import RESOLUTIONS, Size, sizes
from mingc.runtime.images.tokens import padded

# Values a row: of the width, of the feed-forward network, and float32 of the width.
_HIDDEN, _WIDE, _FLOATS = 6, 3, 4
_PLANES = 4  # tensors of the two finest levels that are alive in the VAE
_SCORES = 3  # matrices of scores of the VAE's attention, float32
_FLOAT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageMemory:
    """Bytes of batches.

    Attributes:
        itemsize: bytes of a value of the networks.
        max_samples: of a call; with guidance each picture has two.
        num_samplers: 2: each computes one of the two, on a device of its own, so that all figures are of a device.
    """

    sampler: ImageDitParameters
    vae: ImageVaeParameters
    itemsize: int
    max_samples: int
    num_samplers: int = 1

    def max_pictures(self, num_samples: int) -> int:
        """Pictures in a batch at most."""
        return self.max_samples // self._samples_of_call(num_samples)

    def _samples_of_call(self, num_samples: int) -> int:
        """Samples of a picture that one sampler computes."""
        return 1 if self.num_samplers == 2 else num_samples

    def num_tokens(self, size: Size) -> int:
        """Tokens of a picture of `size`."""
        side = self.vae.scale * self.sampler.patch_size
        return (size[0] // side) * (size[1] // side)

    def batch_bytes(
        self, size: Size, num_pictures: int, *, num_caption: int, num_samples: int, num_frames: int
    ) -> int:
        """Bytes at the most, in steps or at the end, for pictures of `size` (H, W) in pixels.

        `num_samples`: 2 with guidance. `num_frames`: 2 with a reference. `num_caption`: rows.
        """
        step_bytes = self.step_bytes(
            size, num_pictures, num_caption=num_caption, num_samples=num_samples, num_frames=num_frames
        )
        return max(step_bytes, self.decode_bytes(size))

    def step_bytes(
        self, size: Size, num_pictures: int, *, num_caption: int, num_samples: int, num_frames: int
    ) -> int:
        """For a step. Arguments: as of `batch_bytes`."""
        tokens = padded(num_frames * self.num_tokens(size), self.sampler.token_multiple)
        rows = num_pictures * self._samples_of_call(num_samples) * (tokens + num_caption)
        hidden, wide = self.sampler.hidden_size, self.sampler.feed_forward_size
        row_bytes = (_HIDDEN * hidden + _WIDE * wide) * self.itemsize + _FLOATS * hidden * _FLOAT
        return rows * row_bytes

    def decode_bytes(self, size: Size) -> int:
        """For one picture: they are decoded one after the other."""
        pixels = size[0] * size[1]
        places = pixels // self.vae.scale**2
        planes = _PLANES * sum(self.vae.block_channels[:2]) * pixels * self.itemsize
        return max(planes, _SCORES * _FLOAT * places**2)

    def most_bytes(self, num_pictures: int, num_caption: int) -> int:
        """Bytes of the largest batch of so many pictures, with guidance and a reference."""
        return max(
            self.batch_bytes(size, num_pictures, num_caption=num_caption, num_samples=2, num_frames=2)
            for resolution in RESOLUTIONS
            for size in sizes(resolution)
        )
