"""Images: sizes, pixel values and grids compared with the goldens; invalid images."""

from __future__ import annotations

import dataclasses
import io
import re

import numpy as np
import pytest
import torch
from PIL import Image
from preprocess_data import CHECKPOINT, config, document, noise_image, png, tensors, vision_parameters
from safetensors import safe_open

from mingc.errors import RequestError
from mingc.media.decoding import digest_of
from mingc.media.image import (
    check_grid,
    decode_image,
    encoder_size,
    load_image,
    load_size,
    open_image,
    patchify,
    resize_for_encoder,
    resize_loaded,
)
from mingc.media.limits import MediaLimits
from mingc.prompts.conversation import VideoParams
from mingc.prompts.media_decoder import MediaTask
from mingc.runtime.encoders.vision_grid import build_grid_arrays, group_pixels, pad_grid_arrays, pad_tokens

# The limit of this image was not recorded; any value from 5586 to 6758 gives its size.
MAX_PIXELS = {"img.max_pixels": 6000}
CASES = sorted({".".join(name.split(".")[:2]) for name in tensors("preprocess") if name.startswith("img.")})


def raw_images(case: str) -> list[np.ndarray]:
    recorded = tensors("preprocess")
    return [recorded[name] for name in sorted(recorded) if name.startswith(f"{case}.raw")]


@pytest.mark.parametrize("row", document("preprocess")["smart_resize"]["rows"], ids=str)
def test_both_size_rules_give_the_golden_sizes(row: dict[str, int]) -> None:
    sizes = document("preprocess")["smart_resize"]
    limits = {"min_pixels": row["min_pixels"], "max_pixels": row["max_pixels"]}
    loaded = load_size(row["h"], row["w"], factor=sizes["fetch_image_factor"], **limits)
    resized = encoder_size(row["h"], row["w"], factor=sizes["image_processor_factor"], **limits)
    assert (list(loaded), list(resized)) == (row["fetch_image"], row["image_processor"])


@pytest.mark.parametrize("case", CASES)
def test_pixels_and_grids_equal_the_goldens(case: str) -> None:
    recorded, parameters = tensors("preprocess"), vision_parameters()
    features = []
    for index, raw in enumerate(raw_images(case)):
        if case == "img.processor_only":
            features.append(patchify(resize_for_encoder(raw, parameters, case)[None], parameters))
            continue
        limit = MAX_PIXELS.get(case, parameters.load_max_pixels)
        if f"{case}.fetched{index}" in recorded:
            loaded = resize_loaded(raw, parameters, case, max_pixels=limit)
            np.testing.assert_array_equal(loaded, recorded[f"{case}.fetched{index}"])
        features.append(load_image(png(raw), dataclasses.replace(parameters, load_max_pixels=limit), case))
    pixels = np.concatenate([each.pixels for each in features])
    assert pixels.dtype == np.float32
    np.testing.assert_array_equal(pixels, recorded[f"{case}.pixel_values"])
    assert [list(each.grid) for each in features] == recorded[f"{case}.grid_thw"].tolist()


def test_other_patch_sizes_keep_the_order_of_values() -> None:
    """Row (block, inner patch), value (channel, time, y, x), for sizes other than the checkpoint's."""
    parameters = dataclasses.replace(vision_parameters(), patch_size=3, merge_size=3, temporal_patch_size=4)
    frames = np.stack([noise_image(18, 27, seed) for seed in range(8)])
    features = patchify(frames, parameters)
    assert features.grid == (2, 6, 9)
    assert features.num_tokens(3) == 12
    assert features.pixels.shape == (2 * 6 * 9, 3 * 4 * 3 * 3)
    # Second temporal patch, block (1, 2), inner patch (2, 0); channel 1, time 3, y 2, x 1.
    row = 54 + (1 * 3 + 2) * 9 + 2 * 3 + 0
    value = features.pixels[row, ((1 * 4 + 3) * 3 + 2) * 3 + 1]
    byte = frames[4 + 3, (1 * 3 + 2) * 3 + 2, (2 * 3 + 0) * 3 + 1, 1]
    expected = (byte / 255 - parameters.image_mean[1]) / parameters.image_std[1]
    assert value == pytest.approx(expected, abs=1e-6)


def test_a_patch_of_fourteen_is_resized_twice() -> None:
    parameters = dataclasses.replace(vision_parameters(), patch_size=14)
    features = load_image(png(noise_image(100, 100)), parameters, "image")
    assert features.grid == (1, 6, 6)  # 100 → 96 by the loader → 84 by the encoder


def test_transparency_and_palettes_become_rgb() -> None:
    file = io.BytesIO()
    Image.fromarray(noise_image(40, 40)).convert("P").save(file, "GIF")
    assert decode_image(file.getvalue(), "x").shape == (40, 40, 3)
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 4), 7, np.uint8)).save(file, "PNG")
    np.testing.assert_array_equal(decode_image(file.getvalue(), "x"), np.full((8, 8, 3), 7))


@pytest.mark.parametrize(
    "data", [b"", b"no image", png(noise_image(64, 64))[:500], b"%!PS-Adobe-3.0 EPSF-3.0\n"]
)
def test_undecodable_bytes_are_a_request_error(data: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be decoded as an image") as caught:
        load_image(data, vision_parameters(), "messages[0].content[1]")
    assert caught.value.param == "messages[0].content[1]"
    assert caught.value.status == 400
    assert caught.value.fix


@pytest.mark.parametrize("format", ["PCX", "SGI", "TGA", "EPS", "PDF", "DDS", "XBM", "ICNS"])
def test_formats_that_no_client_needs_reach_no_parser(format: str) -> None:
    file = io.BytesIO()
    Image.new("1" if format == "XBM" else "RGB", (64, 64)).save(file, format)
    with pytest.raises(RequestError, match="cannot be decoded as an image"):
        open_image(file.getvalue(), "image")


@pytest.mark.parametrize("num_frames", [1, 2, 8])
def test_the_largest_engine_limits_one_frame_and_not_the_video(num_frames: int) -> None:
    parameters = dataclasses.replace(vision_parameters(), max_patches=64)
    side = 8 * parameters.patch_size
    check_grid(side, side, num_frames, parameters, MediaLimits(), "clip", "video")
    with pytest.raises(RequestError, match="one video frame has 80 patches after resizing; the limit is 64"):
        check_grid(side + side // 4, side, num_frames, parameters, MediaLimits(), "clip", "video")


def test_a_medium_takes_a_quarter_of_its_patches_of_the_context() -> None:
    """Four patches (merge_size 2) are one token of the prompt."""
    parameters = vision_parameters()
    side = 8 * parameters.patch_size
    assert parameters.merge_size == 2
    check_grid(side, side, 1, parameters, MediaLimits(max_tokens=16), "image", "image")
    with pytest.raises(RequestError, match="has 16 tokens; the context has room for 15 beside"):
        check_grid(side, side, 1, parameters, MediaLimits(max_tokens=15), "image", "image")


@pytest.mark.parametrize("size", [(8200, 8200), (20000, 20000)])
def test_decompression_bombs_are_refused(size: tuple[int, int]) -> None:
    file = io.BytesIO()
    Image.new("1", size).save(file, "PNG")
    assert len(file.getvalue()) < 100_000
    with pytest.raises(RequestError, match="too large"):
        decode_image(file.getvalue(), "image")


def test_an_extreme_aspect_ratio_is_refused() -> None:
    with pytest.raises(RequestError, match="201 times") as caught:
        load_image(png(noise_image(2, 402)), vision_parameters(), "picture")
    assert caught.value.param == "picture"
    load_image(png(noise_image(2, 400)), vision_parameters(), "picture")


def test_a_pixel_limit_that_is_too_small_is_refused() -> None:
    with pytest.raises(RequestError, match="does not fit 2048 pixels"):
        resize_loaded(noise_image(17, 3400), vision_parameters(), "picture", max_pixels=2048)


@pytest.mark.parametrize("case", ["one", "multi", "video_interleaved_grid", "video_TxHxW_grid"])
def test_grid_arrays_give_the_golden_position_embeddings(case: str) -> None:
    recorded, parameters = tensors("vision"), vision_parameters()
    grids = [tuple(grid) for grid in recorded[f"{case}.grid_thw"].tolist()]
    arrays = build_grid_arrays(
        grids, merge_size=parameters.merge_size, position_grid_size=parameters.position_grid_size
    )
    assert arrays.num_tokens == len(recorded[f"{case}.embeds"])
    ends = np.cumsum([h * w for t, h, w in grids for _ in range(t)])
    starts = np.concatenate([[0], ends[:-1]])
    expected = [[a, b] for a, b in zip(starts, ends, strict=True) for _ in range(b - a)]
    assert arrays.segment.reshape(-1, 2).tolist() == expected
    if f"{case}.pos_embed_interp" not in recorded:
        return
    name = "vision.pos_embed.weight"
    file = config("model.safetensors.index.json")["weight_map"][name]
    with safe_open(CHECKPOINT / file, "pt") as shard:
        table = shard.get_tensor(name).float().numpy()
    embedded = (table[arrays.position_index] * arrays.position_weight[..., None]).sum(axis=-2)
    np.testing.assert_allclose(
        embedded.reshape(-1, table.shape[1]), recorded[f"{case}.pos_embed_interp"], atol=1e-5
    )
    angles = recorded[f"{case}.rot_pos_emb"]
    half = angles.shape[1] // 2
    frequency = 10000.0 ** (-np.arange(half) / half)
    flat = arrays.coordinates.reshape(-1, 2, 1) * frequency
    np.testing.assert_allclose(flat.reshape(len(flat), -1), angles, atol=1e-6)


def test_arrays_of_a_grid_may_be_written() -> None:
    """Those of later pictures of the same size do not change with them; frames of a video repeat those of one."""
    fields = ("position_index", "position_weight", "coordinates")
    first, *_ = found = [build_grid_arrays([(1, 6, 4)], merge_size=2, position_grid_size=5)]
    before = [getattr(first, name).copy() for name in fields]
    for name in fields:
        getattr(first, name)[:] = 0
    found.append(build_grid_arrays([(1, 6, 4)], merge_size=2, position_grid_size=5))
    found.append(build_grid_arrays([(3, 6, 4)], merge_size=2, position_grid_size=5))
    for name, wanted in zip(fields, before, strict=True):
        np.testing.assert_array_equal(getattr(found[1], name), wanted)
        np.testing.assert_array_equal(getattr(found[2], name), np.tile(wanted, (3, 1, 1)))


def test_a_grid_of_the_table_size_is_not_interpolated() -> None:
    arrays = build_grid_arrays([(1, 12, 12)], merge_size=2, position_grid_size=12)
    row, column = arrays.coordinates[..., 0], arrays.coordinates[..., 1]
    np.testing.assert_array_equal(arrays.position_index[..., 0], row * 12 + column)
    np.testing.assert_array_equal(arrays.position_weight, np.broadcast_to([1, 0, 0, 0], (36, 4, 4)))


@pytest.mark.parametrize(("height", "width"), [(30, 14), (12, 26), (2, 24), (48, 48)])
def test_positions_of_large_images_reach_the_last_line_of_the_table(height: int, width: int) -> None:
    """Bilinear between aligned corners (vision.md §4), as torch interpolates, up to the last two lines of the table."""
    table = np.random.default_rng(0).normal(size=(12, 12, 5)).astype(np.float32)
    arrays = build_grid_arrays([(1, height, width)], merge_size=2, position_grid_size=12)
    flat = table.reshape(-1, 5)
    embedded = (flat[arrays.position_index] * arrays.position_weight[..., None]).sum(axis=-2)
    row, column = arrays.coordinates[..., 0], arrays.coordinates[..., 1]
    expected = torch.nn.functional.interpolate(
        torch.from_numpy(table).permute(2, 0, 1)[None], (height, width), mode="bilinear", align_corners=True
    )[0].permute(1, 2, 0)
    np.testing.assert_allclose(embedded, expected.numpy()[row, column], atol=1e-5)


def test_padding_patches_attend_to_their_own_token() -> None:
    arrays = build_grid_arrays([(1, 4, 6)], merge_size=2, position_grid_size=12)
    padded = pad_grid_arrays(arrays, 8)
    assert padded.num_tokens == 8
    np.testing.assert_array_equal(padded.segment[:6], arrays.segment)
    assert padded.segment[6:, 0].tolist() == [[24, 28], [28, 32]]
    assert {padded.segment.dtype, padded.coordinates.dtype} == {np.dtype(np.int32), np.dtype(np.int64)}
    assert not padded.position_weight[6:].any()
    assert pad_grid_arrays(arrays, 6).segment.tolist() == arrays.segment.tolist()
    with pytest.raises(ValueError, match="do not fit"):
        pad_grid_arrays(arrays, 5)


def test_pixels_are_grouped_by_token() -> None:
    pixels = np.arange(48, dtype=np.float32).reshape(8, 6)
    grouped = group_pixels(pixels, 2)
    assert grouped.shape == (2, 4, 6)
    assert pad_tokens(grouped, 3).shape == (3, 4, 6)


@pytest.mark.parametrize("num_tokens", [-1000, -1, 0, 3])
def test_a_context_without_room_asks_for_less_text(num_tokens: int) -> None:
    """Four tokens are the smallest image: no number of pixels helps."""
    limits = MediaLimits(max_tokens=num_tokens, num_media=2)
    with pytest.raises(RequestError) as caught:
        load_image(png(noise_image(100, 100)), vision_parameters(), "image", limits)
    assert caught.value.code == "media_too_large" and "less text" in (caught.value.fix or "")


def test_an_image_is_not_made_smaller_than_the_models_minimum() -> None:
    parameters, data = vision_parameters(), png(noise_image(200, 100))
    least = max(parameters.min_pixels, parameters.load_min_pixels)
    smallest = load_image(data, parameters, "image", max_pixels=least)
    assert load_image(data, parameters, "image", max_pixels=1).grid == smallest.grid


@pytest.mark.parametrize(
    ("size", "num_tokens"), [((371, 2), 10), ((408, 3), 10), ((12, 8), 3), ((24, 14), 4), ((186, 4), 5)]
)
def test_thin_and_small_images_get_no_advice_that_fails(size: tuple[int, int], num_tokens: int) -> None:
    parameters, limits = vision_parameters(), MediaLimits(max_tokens=num_tokens)
    with pytest.raises(RequestError) as caught:
        load_image(png(noise_image(*size)), parameters, "image", limits)
    found = re.search(r"at most (\d+)×(\d+) pixels, or add \"max_pixels\": (\d+)", caught.value.fix or "")
    if found is not None:
        width, height, most = map(int, found.groups())
        load_image(png(noise_image(height, width)), parameters, "image", limits)
        load_image(png(noise_image(*size)), parameters, "image", limits, max_pixels=most)


def test_a_picture_of_another_limit_has_another_digest() -> None:
    """Embeddings are cached by it."""
    tasks = [
        MediaTask(
            kind="image", where="m", vision=vision_parameters(), audio=None, video=VideoParams(), max_pixels=most,
            max_bytes=1 << 20, max_tokens=100, num_media=1,
        )
        for most in (None, 4096, 8192)
    ]  # fmt: skip
    assert len({digest_of(task, b"picture") for task in tasks}) == 3
