"""Sizes of drawn pictures, references and files compared with the golden set of image generation."""

from __future__ import annotations

import io
import json
from functools import cache
from typing import Any

import numpy as np
import pytest
from image_checkpoint import IMAGE_DATA
from numpy.typing import NDArray
from PIL import ExifTags, Image
from preprocess_data import png
from safetensors.numpy import load_file

from mingc.errors import RequestError
from mingc.media.decoder_pool import DecoderPool
from mingc.media.decoding import InProcessDecoder, digest_of
from mingc.prompts.features import ReferencePicture
from mingc.prompts.media_decoder import MediaTask
from mingc.prompts.picture_sizes import (
    bucket,
    crop_size,
    drawn_size,
    nearest_size,
    resolution_of,
    size_of_aspect,
)
from mingc.server.picture_format import PictureFormat, PictureSpec, encode_picture

TABLES = json.loads((IMAGE_DATA / "imagegen.json").read_text(encoding="utf-8"))
# What the release makes of `highres` that is no resolution.
HIGHRES = {None: 512, True: 1024, False: 512}


@cache
def tensors(name: str) -> dict[str, NDArray[Any]]:
    return load_file(IMAGE_DATA / f"imagegen_{name}.safetensors")


def test_buckets_and_drawn_sizes_are_the_golden_ones() -> None:
    rows = [
        row
        for row in TABLES["process_ratio"]
        if HIGHRES.get(row["highres"], row["highres"]) in (512, 672, 1024)
    ]
    assert len(rows) > 50
    for row in rows:
        asked = row["h"], row["w"]
        found = bucket(asked, HIGHRES.get(row["highres"], row["highres"]))
        assert (list(found), list(drawn_size(asked, found))) == (row["size"], row["resize"]), row
    for row in TABLES["default_hw"]:
        resolution = HIGHRES.get(row["highres"], row["highres"])
        assert list(bucket(size_of_aspect(row["aspect"]), resolution)) == row["hw"], row
    for row in TABLES["crop"]:
        assert list(crop_size((row["h"], row["w"]), row["aspect"])) == row["out"], row


@pytest.mark.parametrize("resolution", ["512", "672", "1024"])
def test_every_bucket_can_be_asked_for_and_what_is_nearest_can_be(resolution: str) -> None:
    for size in map(tuple, TABLES["ratio_tables"][resolution].values()):
        own = resolution_of(size)
        assert own is not None and bucket(size, own) == size
        for other in ((size[0] + 5, size[1]), (size[0] // 3, size[1] // 3), (10 * size[0], 9 * size[1])):
            assert resolution_of(nearest_size(other))


@pytest.mark.parametrize(
    ("asked", "nearest"),
    [
        ((1024, 1536), (832, 1248)),
        ((1080, 1920), (768, 1365)),
        ((256, 256), (512, 512)),
        ((1, 9999), (512, 2048)),
        ((9999, 1), (2048, 512)),
    ],
)
def test_other_sizes_have_a_nearest_one(asked: tuple[int, int], nearest: tuple[int, int]) -> None:
    """By hand: the bucket of the ratio, one of whose sides is lengthened to the exact ratio."""
    assert resolution_of(asked) is None and nearest_size(asked) == nearest


def decoded(data: bytes, spec: PictureSpec) -> NDArray[np.int64]:
    with Image.open(io.BytesIO(data)) as image:
        assert (image.format or "").lower() == spec.format
        assert image.get_format_mimetype() == spec.content_type and image.mode == "RGB"
        return np.asarray(image).astype(int)


@pytest.mark.parametrize("size", [(31, 64), (48, 57), (70, 90)])
def test_a_file_has_the_golden_pixels_of_its_size(size: tuple[int, int]) -> None:
    recorded, spec = tensors("vae"), PictureSpec()
    found = decoded(encode_picture(recorded["lanczos.src"], size, spec), spec)
    np.testing.assert_array_equal(found, recorded[f"lanczos.{size[0]}x{size[1]}"])


@pytest.mark.parametrize("file_format", ["jpeg", "webp"])
def test_lossy_files_are_near_their_picture_and_smaller_with_less_quality(file_format: PictureFormat) -> None:
    rows, columns = np.mgrid[0:64, 0:96]
    pixels = np.stack([rows * 4, columns * 2, rows + columns], axis=-1).astype(np.uint8)
    sizes = []
    for quality in (5, 50, 100):
        spec = PictureSpec(format=file_format, quality=quality)
        data = encode_picture(pixels, (64, 96), spec)
        sizes.append(len(data))
    assert np.abs(decoded(data, spec) - pixels).mean() < 2
    assert sizes == sorted(sizes) and sizes[0] < sizes[2] / 2


def task(**changes: Any) -> MediaTask:
    return MediaTask(kind="reference", where="image", max_bytes=1 << 28, **changes)


def read(data: bytes, **changes: Any) -> ReferencePicture:
    found = InProcessDecoder().run(task(**changes), data)
    assert isinstance(found, ReferencePicture)
    return found


@pytest.mark.parametrize("index", range(len(TABLES["reference"])))
def test_references_have_the_golden_pixels_and_sizes(index: int) -> None:
    row = TABLES["reference"][index]
    data = png(tensors("condition")[row["image"]])
    found = read(data, aspect=row["aspect"], resolution=row["highres"])
    assert list(found.asked) == row["hw"] and list(found.pixels.shape) == [*row["diffusion_size"], 3]
    np.testing.assert_array_equal(
        found.pixels.transpose(2, 0, 1)[:, 100:148, 60:124], tensors("vae")[f"ref{index}.crop_u8"]
    )


def test_an_asked_size_decides_alone() -> None:
    found = read(png(tensors("condition")["raw0"]), asked=(512, 512), aspect=2.0, resolution=512)
    assert found.asked == (512, 512) and found.pixels.shape == (512, 512, 3)


def test_a_picture_on_its_side_is_turned_first() -> None:
    pixels = tensors("condition")["raw0"]
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # to be turned by 90° clockwise
    file = io.BytesIO()
    Image.fromarray(np.rot90(pixels)).save(file, "PNG", exif=exif)
    turned, upright = read(file.getvalue(), resolution=512), read(png(pixels), resolution=512)
    assert turned.asked == upright.asked
    # The two passes of the resize round in another order.
    np.testing.assert_allclose(turned.pixels.astype(int), upright.pixels.astype(int), atol=1)


def test_decoder_processes_give_the_same_and_tell_tasks_apart() -> None:
    data = png(tensors("condition")["raw1"])
    pool = DecoderPool()
    try:
        found = pool.run(task(aspect=0.6, resolution=512), data)
    finally:
        pool.close()
    assert isinstance(found, ReferencePicture)
    expected = read(data, aspect=0.6, resolution=512)
    np.testing.assert_array_equal(found.pixels, expected.pixels)
    assert found.asked == expected.asked and found.digest == digest_of(task(aspect=0.6, resolution=512), data)
    changes: list[dict[str, Any]] = [{}, {"aspect": 0.6}, {"resolution": 512}, {"asked": (512, 512)}]
    assert len({digest_of(task(**each), data) for each in changes}) == 4


def test_long_and_large_pictures_are_refused() -> None:
    for data, status in ((png(np.zeros((10, 81, 3), np.uint8)), 400), (b"GIF89a", 400)):
        with pytest.raises(RequestError) as refused:
            read(data)
        assert refused.value.status == status and refused.value.param == "image"
    assert read(png(np.zeros((10, 80, 3), np.uint8)), resolution=512).pixels.shape == (256, 1024, 3)
    with pytest.raises(RequestError) as large:
        InProcessDecoder().run(
            MediaTask(kind="reference", where="image", max_bytes=1 << 20),
            png(np.zeros((64, 64, 3), np.uint8)),
        )
    assert large.value.status == 413
