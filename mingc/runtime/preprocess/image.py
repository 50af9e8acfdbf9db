"""Encoded images → patch rows of the vision encoder (spec: vision.md §1).

Decoding, the two resize rules of the reference, normalisation and patch order. `vision_grid` builds the position
inputs.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from mingc.artifacts.parameters import VisionParameters
from mingc.errors import RequestError

MAX_ASPECT_RATIO = 200
# Formats with library decoders only: EPS and PDF would start an interpreter on untrusted bytes.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
_MAX_DECODED_PIXELS = 1 << 26  # 8192 × 8192, four times the maximum of the encoder

Grid = tuple[int, int, int]  # temporal patches, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFeatures:
    """Input of the vision encoder for one image or video.

    `pixels`: (t·h·w, C·temporal·p·p) float32, normalised; the patches of one merged token are contiguous.
    """

    pixels: NDArray[np.float32]
    grid: Grid

    def num_tokens(self, merge_size: int) -> int:
        """Number of embeddings that the encoder returns."""
        return math.prod(self.grid) // merge_size**2


def load_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: float) -> tuple[int, int]:
    """(height, width) of an image or video frame after loading: multiples of `factor`, area within bounds.

    A side can become 0 when a long thin picture is shrunk; the caller must refuse it.
    """
    new_height = max(factor, round(height / factor) * factor)
    new_width = max(factor, round(width / factor) * factor)
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        return math.floor(height / scale / factor) * factor, math.floor(width / scale / factor) * factor
    if new_height * new_width < min_pixels:
        return _grow(height, width, factor, min_pixels)
    return new_height, new_width


def encoder_size(
    height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """(height, width) by the encoder's rule: as `load_size`, but with the minimum side in the shrinking branch."""
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / scale / factor) * factor)
        new_width = max(factor, math.floor(width / scale / factor) * factor)
    elif new_height * new_width < min_pixels:
        return _grow(height, width, factor, min_pixels)
    return new_height, new_width


def _grow(height: int, width: int, factor: int, min_pixels: int) -> tuple[int, int]:
    scale = math.sqrt(min_pixels / (height * width))
    return math.ceil(height * scale / factor) * factor, math.ceil(width * scale / factor) * factor


def check_aspect(height: int, width: int, where: str) -> None:
    """Refuse aspect ratios above 200. Raises: RequestError."""
    ratio = max(height, width) / max(1, min(height, width))
    if ratio > MAX_ASPECT_RATIO:
        raise RequestError(
            f"the picture is {width}×{height}: one side is {ratio:.0f} times the other",
            where=where,
            fix=f"crop it to an aspect ratio of at most {MAX_ASPECT_RATIO}",
            param=where,
        )


@lru_cache(maxsize=1)
def _formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def decode_image(data: bytes, where: str) -> NDArray[np.uint8]:
    """Decode an image, or the first frame of an animation, to (H, W, 3) uint8 RGB.

    Raises: RequestError for an unknown format, damaged bytes, or too many pixels.
    """
    try:
        with Image.open(io.BytesIO(data), formats=_formats()) as image:
            width, height = image.size
            if width * height > _MAX_DECODED_PIXELS:
                raise Image.DecompressionBombError(f"{width}×{height} pixels")
            return np.asarray(image.convert("RGB"))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise RequestError(
            f"the image is too large to decode: {error}",
            where=where,
            fix=f"send at most {_MAX_DECODED_PIXELS} pixels",
            param=where,
        ) from error
    except Exception as error:  # Pillow's decoders raise many types on damaged bytes
        raise RequestError(
            f"{len(data)} bytes cannot be decoded as an image ({type(error).__name__})",
            where=where,
            fix=f"send a complete file in one of the formats {', '.join(_formats())}",
            param=where,
        ) from error


def _resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def resize_loaded(
    image: NDArray[np.uint8], parameters: VisionParameters, where: str, *, max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """First resize of (H, W, 3) uint8, on loading. `max_pixels` overrides the limit for this image.

    Raises: RequestError for an extreme aspect ratio, or when `max_pixels` leaves the short side without a pixel.
    """
    height, width = image.shape[:2]
    check_aspect(height, width, where)
    new_height, new_width = load_size(
        height,
        width,
        factor=parameters.load_factor,
        min_pixels=parameters.load_min_pixels,
        max_pixels=parameters.load_max_pixels if max_pixels is None else max_pixels,
    )
    if not new_height or not new_width:
        raise RequestError(
            f"an image of {width}×{height} does not fit {max_pixels} pixels",
            where=where,
            fix="raise max_pixels or crop the image to a smaller aspect ratio",
            param=where,
        )
    return _resize(image, new_height, new_width)


def resize_for_encoder(
    image: NDArray[np.uint8], parameters: VisionParameters, where: str
) -> NDArray[np.uint8]:
    """Second resize of (H, W, 3) uint8: sides become multiples of the side of a merged token."""
    height, width = image.shape[:2]
    check_aspect(height, width, where)
    new_height, new_width = encoder_size(
        height,
        width,
        factor=parameters.patch_size * parameters.merge_size,
        min_pixels=parameters.min_pixels,
        max_pixels=parameters.max_pixels,
    )
    return _resize(image, new_height, new_width)


@lru_cache(maxsize=4)
def _normalisation_table(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """(channels, 256) float32 lookup table of normalised bytes, with the rounding of the reference."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    return (scaled - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


def patchify(frames: NDArray[np.uint8], parameters: VisionParameters) -> VisionFeatures:
    """Frames (T, H, W, C) uint8 → patches. T is 1 (an image, repeated in time) or a multiple of the temporal patch.

    Row order: (t, block row, block column, row in block, column in block). Value order: (C, time, y, x).
    """
    patch, merge, temporal = parameters.patch_size, parameters.merge_size, parameters.temporal_patch_size
    num_frames, height, width, channels = frames.shape
    is_image = num_frames == 1
    grid = (1 if is_image else num_frames // temporal, height // patch, width // patch)
    blocks = (grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
    table = _normalisation_table(parameters.image_mean, parameters.image_std)
    pixels = np.empty(
        (grid[0], blocks[0], blocks[3], merge, merge, channels, temporal, patch, patch), dtype=np.float32
    )
    for channel in range(channels):
        plane = table[channel].take(frames[..., channel])
        if is_image:
            plane = np.broadcast_to(plane, (temporal, height, width))
        pixels[:, :, :, :, :, channel] = plane.reshape(grid[0], temporal, *blocks).transpose(
            0, 2, 5, 3, 6, 1, 4, 7
        )
    return VisionFeatures(pixels=pixels.reshape(math.prod(grid), -1), grid=grid)


def load_image(data: bytes, parameters: VisionParameters, where: str) -> VisionFeatures:
    """Encoded image → patches, with both resizes. `where` names the image in errors."""
    image = resize_loaded(decode_image(data, where), parameters, where)
    return patchify(resize_for_encoder(image, parameters, where)[None], parameters)
