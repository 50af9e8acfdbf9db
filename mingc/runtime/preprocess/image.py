"""Encoded images → patch rows of the vision encoder.

Decoding, the two resize rules of the reference, normalisation and the order of patches (spec: vision.md §1). What
the encoder must know of positions is made in `vision_grid`.
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
# Formats whose decoders are plain libraries: no interpreter (EPS, PDF) is ever started for a client's bytes.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
_MAX_DECODED_PIXELS = 1 << 26  # 8192 × 8192; four times what the encoder takes at most

Grid = tuple[int, int, int]  # temporal patches, rows and columns of patches


@dataclass(frozen=True, kw_only=True, slots=True)
class VisionFeatures:
    """One image or video as the vision encoder takes it.

    `pixels`: (t·h·w, C·temporal·p·p) float32, normalised; the patches of one merged token are contiguous.
    """

    pixels: NDArray[np.float32]
    grid: Grid

    def num_tokens(self, merge_size: int) -> int:
        """Embeddings that come out of the encoder."""
        return math.prod(self.grid) // merge_size**2


def load_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: float) -> tuple[int, int]:
    """(height, width) that loading gives an image or a video frame: multiples of `factor`, area within bounds.

    A side may come out as 0 when a long thin picture is shrunk; the caller refuses that.
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
    """(height, width) that the encoder's own rule gives: `load_size` with the least side on the other branch."""
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
    """Raises RequestError when one side is more than 200 times the other."""
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
    """An encoded image as (H, W, 3) uint8 RGB; of an animation the first frame.

    Raises: RequestError when the bytes are no image of a known format, are damaged, or unfold to too many pixels.
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
    except Exception as error:  # Pillow's decoders raise about anything on damaged bytes
        raise RequestError(
            f"{len(data)} bytes cannot be decoded as an image ({type(error).__name__})",
            where=where,
            fix=f"send a whole file of one of {', '.join(_formats())}",
            param=where,
        ) from error


def _resize(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    if image.shape[:2] == (height, width):
        return image
    return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def resize_loaded(
    image: NDArray[np.uint8], parameters: VisionParameters, where: str, *, max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """First resize of (H, W, 3) uint8: what loading does. `max_pixels` replaces the limit for this image.

    Raises: RequestError for an extreme aspect ratio, or when `max_pixels` leaves no pixel on the short side.
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
    """Second resize of (H, W, 3) uint8: sides become multiples of a merged token's."""
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
def _normalised(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """(channels, 256) float32: what each byte becomes, rounded at the same places as the reference."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    return (scaled - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


def patchify(frames: NDArray[np.uint8], parameters: VisionParameters) -> VisionFeatures:
    """Frames (T, H, W, C) uint8 → patches. T is 1 (an image, repeated in time) or a multiple of the temporal patch.

    Rows are ordered (t, block row, block column, row in block, column in block), values (C, time, y, x).
    """
    patch, merge, temporal = parameters.patch_size, parameters.merge_size, parameters.temporal_patch_size
    num_frames, height, width, channels = frames.shape
    is_image = num_frames == 1
    grid = (1 if is_image else num_frames // temporal, height // patch, width // patch)
    blocks = (grid[1] // merge, merge, patch, grid[2] // merge, merge, patch)
    table = _normalised(parameters.image_mean, parameters.image_std)
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


def load_image(
    data: bytes, parameters: VisionParameters, where: str, *, max_pixels: int | None = None
) -> VisionFeatures:
    """Encoded image → patches, through both resizes. `where` names the image in errors."""
    image = resize_loaded(decode_image(data, where), parameters, where, max_pixels=max_pixels)
    return patchify(resize_for_encoder(image, parameters, where)[None], parameters)
