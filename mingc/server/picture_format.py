"""Drawn pictures as files: the last resize, then PNG, JPEG or WebP."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

PictureFormat = Literal["png", "jpeg", "webp"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSpec:
    """Format of a picture's file. `quality`: 0 to 100 of JPEG and WebP; PNG is lossless."""

    format: PictureFormat = "png"
    quality: int = 100

    @property
    def content_type(self) -> str:
        return f"image/{self.format}"


def encode_picture(pixels: NDArray[np.uint8], size: tuple[int, int], spec: PictureSpec) -> bytes:
    """The file of a picture (H, W, 3) that is stretched to `size` (height, width) first (spec: imagegen.md §8)."""
    picture = Image.fromarray(pixels)
    height, width = size
    if picture.size != (width, height):
        picture = picture.resize((width, height), Image.Resampling.LANCZOS)
    options: dict[str, Any] = {} if spec.format == "png" else {"quality": spec.quality}
    file = io.BytesIO()
    picture.save(file, spec.format, **options)
    return file.getvalue()
