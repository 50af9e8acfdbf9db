"""Encoded images → patch rows of the vision encoder (spec: vision.md §1).

This module has the decoding, the two resize rules of the reference, the normalisation and the order of patches;
`vision_grid` builds the position inputs. Before a pixel is decoded, the header gives an estimate of the memory.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import struct
import warnings
import zlib
from dataclasses import replace
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from mingc.artifacts.parameters import VisionParameters
from mingc.errors import RequestError
from mingc.media.formats import undecodable_file
from mingc.media.limits import MAX_PIXELS, MediaLimits, too_large
from mingc.prompts.features import ReferencePicture, VisionFeatures
from mingc.prompts.media_decoder import MediaTask
from mingc.prompts.picture_sizes import bucket, crop_size

log = logging.getLogger("mingc.preprocess")
MAX_ASPECT_RATIO = 200
MAX_REFERENCE_ASPECT = 8  # the drawn picture has it too
# Only formats that a library decodes: EPS and PDF would start an interpreter on untrusted bytes.
_FORMATS = ("PNG", "JPEG", "MPO", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_JPEG_FILLER = b"\x5a\xa5\x36" * 64
_STRIP_ROWS = 64

# Measured bytes per pixel while a file is decoded and converted to RGB: of these formats, of other formats in RGB and
# in other modes, and of the coefficients of a progressive JPEG.
_DECODING_COST = {"WEBP": 20, "AVIF": 13, "TIFF": 9}
_PLAIN_COST, _CONVERTED_COST, _PROGRESSIVE_COST = 5, 9, 8
# How a picture is turned upright, by the orientation in its EXIF data.
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def load_size(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: float) -> tuple[int, int]:
    """(height, width) of an image or video frame after loading: multiples of `factor`, area within bounds.

    A side can become 0 when a long thin picture is shrunk; the caller must refuse that.
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
    """(height, width) by the encoder's rule. Unlike `load_size`, it keeps a minimum side when it shrinks a picture."""
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


def check_aspect(height: int, width: int, where: str, limit: int = MAX_ASPECT_RATIO) -> None:
    """Refuse aspect ratios above `limit`. Raises: RequestError."""
    ratio = max(height, width) / max(1, min(height, width))
    if ratio > limit:
        raise RequestError(
            f"the picture is {width}×{height}: one side is {ratio:.0f} times the other",
            where=where,
            fix=f"crop it to an aspect ratio of at most {limit}",
            param=where,
        )


@lru_cache(maxsize=1)
def _formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def open_image(data: bytes, where: str) -> Image.Image:
    """Read the header of an image. Raises: RequestError for an unknown format, damaged bytes, or too many pixels."""
    try:
        image = _open(data)
    except MemoryError:
        raise
    except Image.DecompressionBombError as error:
        raise _too_many_pixels(str(error), where) from error
    except Exception as error:  # Pillow's parsers raise many types on damaged bytes
        raise _not_an_image(data, where, error) from error
    if image.width * image.height > MAX_PIXELS:
        raise _too_many_pixels(f"{image.width}×{image.height} pixels", where)
    return image


def _open(data: bytes) -> Image.Image:
    """Read the header of an image; a PNG whose notes are damaged is read without them."""
    with warnings.catch_warnings(action="ignore", category=Image.DecompressionBombWarning):
        try:
            return Image.open(io.BytesIO(data), formats=_formats())
        except Exception:
            if not data.startswith(_PNG_SIGNATURE):
                raise
            return Image.open(io.BytesIO(_bare_png(data)), formats=["PNG"])


def _bare_png(data: bytes) -> bytes:
    """A PNG without what its pixels do not need, except sound EXIF data, which turn it."""
    chunks = [_PNG_SIGNATURE]
    start = len(_PNG_SIGNATURE)
    while start + 12 <= len(data):
        size, name = struct.unpack_from(">I4s", data, start)
        chunk = data[start : start + 12 + size]
        is_sound = zlib.crc32(chunk[4:-4]) == int.from_bytes(chunk[-4:], "big")
        if name[0:1].isupper() or (name == b"eXIf" and is_sound):
            chunks.append(chunk)
        start += len(chunk)
    return b"".join(chunks)


def _jpeg_without_end(data: bytes) -> Image.Image:
    """Decode a JPEG that lacks its end marker. Raises: ValueError when it lacks more, and what Pillow raises.

    What follows complete data changes no pixel. After a cut it becomes pixels. A progressive picture that is cut
    exactly between two scans is complete, in a lower quality.
    """
    digests = set()
    data = data.removesuffix(b"\xff")  # half of the end marker
    for follows in (b"", _JPEG_FILLER):
        image = Image.open(io.BytesIO(data + follows + b"\xff\xd9"), formats=["JPEG"])
        digest = hashlib.sha256()
        for top in range(0, image.height, _STRIP_ROWS):  # a copy of all pixels is not planned for
            digest.update(image.crop((0, top, image.width, min(top + _STRIP_ROWS, image.height))).tobytes())
        digests.add(digest.digest())
    if len(digests) > 1:
        raise ValueError("the JPEG is cut")
    return image


def _too_many_pixels(found: str, where: str) -> RequestError:
    return too_large(
        f"the image is too large to decode: {found}",
        where,
        f"shrink it to about 1024×1024 pixels; at most {MAX_PIXELS} are decoded",
    )


def _not_an_image(data: bytes, where: str, error: Exception) -> RequestError:
    return undecodable_file(
        data,
        "image",
        where,
        what=f"{len(data)} bytes cannot be decoded as an image ({type(error).__name__})",
        fix=f"send a complete file of 8 or 16 bits a colour in one of the formats {', '.join(_formats())}",
    )


def _cost_per_pixel(image: Image.Image) -> int:
    """Bytes per pixel while the file is decoded and converted to RGB."""
    plain = _PLAIN_COST if image.mode == "RGB" else _CONVERTED_COST
    progressive = _PROGRESSIVE_COST if image.info.get("progressive") else 0
    return max(plain, _DECODING_COST.get(image.format or "", 0)) + progressive


def _peak_bytes(image: Image.Image, target: tuple[int, int]) -> int:
    """Memory to decode and resize to `target` (width, height); Pillow uses four bytes per pixel, numpy three."""
    num_pixels, resized = image.width * image.height, math.prod(target)
    decoding = _cost_per_pixel(image) * num_pixels
    # The picture and its converted copy, the picture resized along one axis, and along both.
    resizing = (4 if image.mode == "RGB" else 8) * num_pixels + 4 * target[0] * image.height + 4 * resized
    return max(decoding, resizing)


def _orientation(image: Image.Image) -> int:
    """EXIF orientation; 1 (upright) if there is none or it cannot be read."""
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, 1)
    except MemoryError:
        raise
    except Exception as error:  # the picture may be sound although its EXIF data are damaged
        log.debug("EXIF data cannot be read: %s", type(error).__name__)
        return 1
    return found if found in _UPRIGHT else 1


def _to_rgb(image: Image.Image) -> Image.Image:
    """Convert the decoded picture to RGB: 16-bit grey keeps its upper byte, and transparency is dropped."""
    image.load()
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PPM"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("pixels of 32 bits have no known range")
    image.info.pop("transparency", None)  # Pillow warns about it, and the colours are the same without it
    return image.convert("RGB")


def decode_image(data: bytes, where: str) -> NDArray[np.uint8]:
    """Decode an image, or the first frame of an animation, to (H, W, 3) uint8 RGB, upright.

    Raises: RequestError for an unknown format, damaged bytes, or too many pixels.
    """
    with open_image(data, where) as image:
        decoded = _decode(image, data, where)
        return np.asarray(_upright(decoded, _orientation(image)))


def _decode(image: Image.Image, data: bytes, where: str) -> Image.Image:
    try:
        try:
            return _to_rgb(image)
        except (OSError, ValueError):
            image.close()  # frees its pixels
            if image.format in ("JPEG", "MPO"):
                return _to_rgb(_jpeg_without_end(data))
            if image.format == "PNG":
                return _to_rgb(Image.open(io.BytesIO(_bare_png(data)), formats=["PNG"]))
            raise
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise many types on damaged bytes
        raise _not_an_image(data, where, error) from error


def _upright(image: Image.Image, orientation: int) -> Image.Image:
    return image.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else image


def _resize(image: Image.Image, height: int, width: int) -> Image.Image:
    if image.size == (width, height):
        return image
    return image.resize((width, height), Image.Resampling.BICUBIC)


def resize_loaded(
    image: NDArray[np.uint8], parameters: VisionParameters, where: str, *, max_pixels: int | None = None
) -> NDArray[np.uint8]:
    """First resize of (H, W, 3) uint8, on loading. `max_pixels` overrides the limit for this image.

    Raises: RequestError for an extreme aspect ratio, or when `max_pixels` leaves the short side without a pixel.
    """
    height, width = image.shape[:2]
    size = loaded_size(height, width, parameters, where, max_pixels=max_pixels)
    return np.asarray(_resize(Image.fromarray(image), *size))


def loaded_size(
    height: int, width: int, parameters: VisionParameters, where: str, *, max_pixels: int | None = None
) -> tuple[int, int]:
    """(height, width) after the first resize. Raises: RequestError like `resize_loaded`."""
    check_aspect(height, width, where)
    limit = parameters.load_max_pixels if max_pixels is None else max_pixels
    new_height, new_width = load_size(
        height,
        width,
        factor=parameters.load_factor,
        min_pixels=parameters.load_min_pixels,
        max_pixels=limit,
    )
    if not new_height or not new_width:
        raise RequestError(
            f"an image of {width}×{height} does not fit {limit} pixels",
            where=where,
            fix="raise max_pixels or crop the image to a smaller aspect ratio",
            param=where,
        )
    return new_height, new_width


def resize_for_encoder(
    image: NDArray[np.uint8], parameters: VisionParameters, where: str
) -> NDArray[np.uint8]:
    """Second resize of (H, W, 3) uint8: sides become multiples of the side of a merged token."""
    height, width = image.shape[:2]
    size = _encoder_size(height, width, parameters, where)
    return np.asarray(_resize(Image.fromarray(image), *size))


def _encoder_size(height: int, width: int, parameters: VisionParameters, where: str) -> tuple[int, int]:
    check_aspect(height, width, where)
    return encoder_size(
        height,
        width,
        factor=parameters.patch_size * parameters.merge_size,
        min_pixels=parameters.min_pixels,
        max_pixels=parameters.max_pixels,
    )


def check_grid(
    height: int,
    width: int,
    num_frames: int,
    parameters: VisionParameters,
    limits: MediaLimits,
    where: str,
    kind: str,
    source: tuple[int, int] | None = None,
) -> None:
    """Refuse frames of (height, width) that are larger than the largest engine, or too many for the context.

    `source`: (height, width) of an image as it was sent; the error says how large it may be.
    """
    num_patches = (height // parameters.patch_size) * (width // parameters.patch_size)
    temporal = -(-num_frames // parameters.temporal_patch_size)
    per_token = parameters.merge_size**2
    num_tokens = temporal * num_patches // per_token
    most = parameters.max_patches
    if num_patches > most:
        what = f"one {kind} frame has {num_patches} patches after resizing; the limit is {most}"
    elif limits.max_tokens is not None and num_tokens > limits.max_tokens:
        left = max(limits.max_tokens, 0)
        what = f"the {kind} has {num_tokens} tokens; the context has room for {left} beside the rest"
    else:
        return
    if source is None:
        raise too_large(what, where, "send a shorter one, or fewer 'video_max_frames' or 'video_max_pixels'")
    if limits.max_tokens is not None:
        most = min(most, limits.max_tokens // limits.num_media * per_token)
    raise too_large(what, where, _fitting(*source, most * parameters.patch_size**2, parameters))


def _fitting(height: int, width: int, max_pixels: int, parameters: VisionParameters) -> str:
    """What to do about an image of (height, width) that may have `max_pixels` for the encoder."""
    limited = limit_pixels(parameters, max_pixels)
    try:
        size = _encoder_size(*loaded_size(height, width, limited, ""), limited, "")
        sent = _encoder_size(*loaded_size(*size, parameters, ""), parameters, "")  # small ones are enlarged
        fits = max(math.prod(size), math.prod(sent)) <= max_pixels
    except RequestError:  # too thin
        fits = False
    if not fits:
        return "send less text, or fewer or squarer pictures"
    return (
        f'send it with at most {size[1]}×{size[0]} pixels, or add "max_pixels": {max_pixels} to its part, or '
        '"image_max_pixels" to the request, to have it scaled down'
    )


def limit_pixels(parameters: VisionParameters, max_pixels: int | None) -> VisionParameters:
    """`parameters` with which both resizes scale an image down to `max_pixels`, or to their minimum."""
    if max_pixels is None:
        return parameters
    max_pixels = max(max_pixels, parameters.load_min_pixels, parameters.min_pixels)
    return replace(
        parameters,
        load_max_pixels=min(parameters.load_max_pixels, max_pixels),
        max_pixels=min(parameters.max_pixels, max_pixels),
    )


@lru_cache(maxsize=4)
def _normalisation_table(mean: tuple[float, ...], std: tuple[float, ...]) -> NDArray[np.float32]:
    """(channels, 256) float32 lookup table of normalised bytes, with the rounding of the reference."""
    scaled = (np.arange(256) * (1 / 255)).astype(np.float32)
    return (scaled - np.asarray(mean, np.float32)[:, None]) / np.asarray(std, np.float32)[:, None]


class PatchWriter:
    """Writes the patches of frames that arrive one at a time, so that only one frame is in memory.

    Row order: (t, block row, block column, row in block, column in block). Value order: (C, time, y, x). A single frame
    is an image, which is repeated in time; otherwise the number of frames is a multiple of the temporal patch.
    """

    def __init__(self, num_frames: int, height: int, width: int, parameters: VisionParameters) -> None:
        patch, merge = parameters.patch_size, parameters.merge_size
        self._repeats = parameters.temporal_patch_size if num_frames == 1 else 1
        self._temporal = parameters.temporal_patch_size // self._repeats
        self._levels = _normalisation_table(parameters.image_mean, parameters.image_std)
        self._blocks = (height // patch // merge, merge, patch, width // patch // merge, merge)
        self._grid = (num_frames // self._temporal, height // patch, width // patch)
        shape = (
            self._grid[0],
            self._blocks[0],
            self._blocks[3],
            merge,
            merge,
            3,
            self._temporal,
            patch,
        )
        # An item is a line of a patch, which numpy copies at once; single pixels would take eight times as long.
        self._lines = np.empty(shape, dtype=f"V{patch}")

    def put(self, index: int, frame: NDArray[np.uint8]) -> None:
        """Write frame `index`, (H, W, 3) uint8."""
        for channel in range(3):
            self.put_channel(index, channel, np.ascontiguousarray(frame[..., channel]))

    def put_channel(self, index: int, channel: int, values: NDArray[np.uint8]) -> None:
        """Write one channel of frame `index`, (H, W) uint8 without gaps."""
        blocks = values.view(self._lines.dtype).reshape(self._blocks).transpose(0, 3, 1, 4, 2)
        self._lines[index // self._temporal, ..., channel, index % self._temporal, :] = blocks

    def features(self) -> VisionFeatures:
        rows = self._lines.view(np.uint8).reshape(math.prod(self._grid), -1)
        return VisionFeatures(patches=rows, grid=self._grid, levels=self._levels, repeats=self._repeats)


def patchify(frames: NDArray[np.uint8], parameters: VisionParameters) -> VisionFeatures:
    """Frames (T, H, W, 3) uint8 → patches. T is 1 (an image) or a multiple of the temporal patch."""
    writer = PatchWriter(len(frames), frames.shape[1], frames.shape[2], parameters)
    for index, frame in enumerate(frames):
        writer.put(index, frame)
    return writer.features()


def load_image(
    data: bytes,
    parameters: VisionParameters,
    where: str,
    limits: MediaLimits | None = None,
    *,
    max_pixels: int | None = None,
) -> VisionFeatures:
    """Encoded image → patches, with both resizes. `where` names the image in errors.

    `max_pixels`: an image with more is scaled down to so many; None: only as the encoder requires it.

    Raises: RequestError when the bytes contain no image, or its memory would exceed `limits`, which is known before
        decoding.
    """
    limits = limits or MediaLimits()
    parameters = limit_pixels(parameters, max_pixels)
    with open_image(data, where) as image:
        # Turning a picture only exchanges the sides of both sizes. So its EXIF data are not needed yet; Pillow may have
        # to decode the picture for them.
        size = loaded_size(image.height, image.width, parameters, where)
        final = _encoder_size(*size, parameters, where)
        check_grid(*final, 1, parameters, limits, where, "image", (image.height, image.width))
        target = size[1], size[0]
        limits.check_bytes(
            max(_peak_bytes(image, target), 12 * math.prod(size) + 3 * math.prod(final)),
            where,
            f"an image of {image.width}×{image.height} pixels ({image.format}, {image.mode})",
        )
        decoded = _decode(image, data, where)
        orientation = _orientation(image)
        loaded = _upright(_resize(decoded, *size), orientation)
    height, width = _encoder_size(loaded.height, loaded.width, parameters, where)
    resized = _resize(loaded, height, width)
    writer = PatchWriter(1, height, width, parameters)
    for channel, values in enumerate(resized.split()):
        writer.put_channel(0, channel, np.asarray(values))
    return writer.features()


def load_reference(data: bytes, task: MediaTask, limits: MediaLimits) -> ReferencePicture:
    """Encoded picture → the pixels that a picture is drawn from (spec: imagegen.md §7).

    Raises: RequestError as `load_image` does.
    """
    where = task.where
    with open_image(data, where) as image:
        check_aspect(image.height, image.width, where, MAX_REFERENCE_ASPECT)
        longest = 2 * task.resolution
        limits.check_bytes(
            _peak_bytes(image, (longest, longest)),
            where,
            f"a picture of {image.width}×{image.height} pixels ({image.format}, {image.mode})",
        )
        decoded = _decode(image, data, where)
        orientation = _orientation(image)
    is_on_its_side = orientation >= 5
    own = (decoded.width, decoded.height) if is_on_its_side else (decoded.height, decoded.width)
    asked = task.asked or crop_size(own, task.aspect)
    height, width = bucket(asked, task.resolution)
    size = (height, width) if is_on_its_side else (width, height)
    pixels = _upright(decoded.resize(size, Image.Resampling.BILINEAR), orientation)
    return ReferencePicture(pixels=np.asarray(pixels), asked=asked)
