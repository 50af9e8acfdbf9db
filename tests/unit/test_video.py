"""Videos: resize, sampling, timestamps and pixel values against the recorded ones; real files; bad files."""

from __future__ import annotations

import dataclasses
import importlib
import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from preprocess_data import document, noise_image, tensors, vision_parameters

from mingc.errors import ConfigError, RequestError
from mingc.runtime.preprocess.cubic import resize_cubic
from mingc.runtime.preprocess.video import frame_size, frames_to_video, load_video, sample_frames
from mingc.runtime.request import VideoParams

WHERE = "messages[0].content[0]"


def flat_frames(count: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    """Frames of one grey each, by which an index can be read back."""
    return [np.full((height, width, 3), 5 * index, np.uint8) for index in range(count)]


def encode(frames: list[np.ndarray], fps: int, *, container: str = "matroska", codec: str = "ffv1") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = "bgr0" if codec == "ffv1" else "yuv420p"
        for index, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = index, Fraction(1, fps)
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return file.getvalue()


def greys(pixels: np.ndarray, grid: tuple[int, int, int]) -> list[int]:
    """The grey of every frame of a video of flat frames."""
    parameters = vision_parameters()
    rows = pixels.reshape(grid[0], -1, 3, parameters.temporal_patch_size, parameters.patch_size**2)
    level = rows[:, 0, 0, :, 0].reshape(-1) * parameters.image_std[0] + parameters.image_mean[0]
    return [round(float(value) * 255) for value in level]


def test_the_cubic_resize_gives_the_recorded_bytes() -> None:
    recorded = tensors("preprocess")
    fetched = recorded["video.fetched"].transpose(0, 2, 3, 1)
    for index in range(document("preprocess")["video"]["frames_in"]):
        frame = recorded[f"video.raw_frame{index}"]
        np.testing.assert_array_equal(resize_cubic(frame, *fetched.shape[1:3]), fetched[index])


def test_the_cubic_resize_at_its_edges() -> None:
    image = noise_image(5, 7)
    assert resize_cubic(image, 5, 7) is image
    assert (resize_cubic(np.full((3, 1, 3), 77, np.uint8), 64, 32) == 77).all()
    np.testing.assert_array_equal(resize_cubic(image, 15, 21)[1::3, 1::3], image)  # pixel centres stay
    assert resize_cubic(noise_image(900, 31), 32, 32).shape == (32, 32, 3)


def test_a_list_of_frames_gives_the_recorded_pixels_and_times() -> None:
    recorded, case = tensors("preprocess"), document("preprocess")["video"]
    frames = [recorded[f"video.raw_frame{index}"] for index in range(case["frames_in"])]
    video = frames_to_video(frames, vision_parameters(), VideoParams(**case["options"]), WHERE)
    np.testing.assert_array_equal(video.vision.pixels, recorded["video.pixel_values_videos"])
    assert [list(video.vision.grid)] == recorded["video.grid_thw"].tolist()
    assert [list(video.timestamps)] == case["timestamps_per_temporal_patch"]


def test_the_commonest_frame_size_wins() -> None:
    frames = [noise_image(64, 64), noise_image(96, 64), noise_image(96, 64)]
    params = VideoParams(min_pixels=4096, max_pixels=6144)
    assert frames_to_video(frames, vision_parameters(), params, WHERE).vision.grid == (2, 6, 4)
    with pytest.raises(RequestError, match="no frames"):
        frames_to_video([], vision_parameters(), params, WHERE)


@pytest.mark.parametrize(
    ("frames", "rate", "indices", "times"),
    [
        (1, 30.0, [0], [0.0]),
        (10, 5.0, [0, 3, 6, 9], [0.0, 0.5, 1.0, 1.5]),
        (3, 1.0, [0, 1, 2], [0.0, 1.0, 2.0]),
        (70, 30.0, [0, 17, 34, 51, 69], [0.0, 7 / 15, 14 / 15, 1.4, 28 / 15]),
    ],
)
def test_frames_are_spread_evenly(frames: int, rate: float, indices: list[int], times: list[float]) -> None:
    result = sample_frames(frames, rate, fps=2.0, max_frames=170)
    assert result[0] == indices
    assert result[1] == pytest.approx(times)


def test_long_videos_have_a_largest_number_of_frames() -> None:
    indices, times = sample_frames(30 * 600, 30.0, fps=2.0, max_frames=170)
    assert (len(indices), indices[0], indices[-1]) == (170, 0, 17999)
    assert times[1] == pytest.approx(600 / 170)


@pytest.mark.parametrize(
    ("size", "num_frames", "params", "expected"),
    [
        ((1080, 1920), 20, VideoParams(), (832, 1472)),
        ((1080, 1920), 170, VideoParams(), (288, 512)),
        ((100, 100), 2, VideoParams(), (384, 384)),
        ((1080, 1920), 20, VideoParams(max_pixels=65536, min_pixels=4096), (192, 320)),
    ],
)
def test_frames_share_a_budget_of_pixels(
    size: tuple[int, int], num_frames: int, params: VideoParams, expected: tuple[int, int]
) -> None:
    assert frame_size(*size, num_frames, vision_parameters(), params, WHERE) == expected


def test_patches_that_do_not_divide_the_usual_factor_still_fit() -> None:
    parameters = dataclasses.replace(vision_parameters(), patch_size=14)
    height, width = frame_size(480, 640, 4, parameters, VideoParams(), WHERE)
    assert height % 28 == width % 28 == 0


@pytest.mark.parametrize("params", [VideoParams(fps=0), VideoParams(max_frames=0), VideoParams(fps=-1)])
def test_senseless_sampling_is_refused(params: VideoParams) -> None:
    with pytest.raises(RequestError, match="must be positive") as caught:
        load_video(b"", vision_parameters(), params, WHERE)
    assert caught.value.param == WHERE


def test_a_budget_without_a_pixel_is_refused() -> None:
    with pytest.raises(RequestError, match="does not fit 1024 pixels"):
        frame_size(20, 3000, 2, vision_parameters(), VideoParams(min_pixels=1, max_pixels=1024), WHERE)


def test_a_file_is_sampled_and_timed() -> None:
    data = encode(flat_frames(15), 5)  # three seconds: six frames at two a second
    params = VideoParams(min_pixels=4096)
    video = load_video(data, vision_parameters(), params, WHERE)
    assert video.vision.grid == (3, 4, 6)
    assert greys(video.vision.pixels, video.vision.grid) == [0, 10, 25, 40, 55, 70]
    assert video.timestamps == pytest.approx((0.25, 1.25, 2.25))


def test_an_odd_number_of_frames_repeats_the_last() -> None:
    params = VideoParams(min_pixels=4096, max_frames=3)
    video = load_video(encode(flat_frames(15), 5), vision_parameters(), params, WHERE)
    assert greys(video.vision.pixels, video.vision.grid) == [0, 35, 70, 70]
    assert video.timestamps == pytest.approx((0.5, 2.0))


def test_a_higher_rate_can_be_asked_for() -> None:
    params = VideoParams(min_pixels=4096, fps=5.0)
    video = load_video(encode(flat_frames(10), 5), vision_parameters(), params, WHERE)
    assert greys(video.vision.pixels, video.vision.grid) == [5 * index for index in range(10)]


def test_a_phone_video_is_turned_upright() -> None:
    """The display matrix says a quarter turn clockwise: what was left is on top."""
    frames = [np.zeros((64, 96, 3), np.uint8) for _ in range(4)]
    for frame in frames:
        frame[:, :32] = 255
    data = bytearray(encode(frames, 2, container="mp4", codec="mpeg4"))
    matrix = data.index(b"tkhd") + 4 + 40
    data[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    params = VideoParams(min_pixels=4096, max_pixels=6144)
    video = load_video(bytes(data), vision_parameters(), params, WHERE)
    assert video.vision.grid[1:] == (6, 4)
    means = video.vision.pixels.reshape(2, 3, 2, 2, 2, -1)[0].mean(axis=(1, 2, 3, 4))
    assert means[0] > 1 > means[1]


def test_a_video_cut_short_is_sampled_among_what_is_there() -> None:
    frames = [noise_image(64, 96, seed) for seed in range(12)]
    data = encode(frames, 2)
    video = load_video(data[: len(data) * 2 // 3], vision_parameters(), VideoParams(min_pixels=4096), WHERE)
    assert 0 < video.vision.grid[0] < 6


@pytest.mark.parametrize("data", [b"", b"no video", encode(flat_frames(4), 2)[:200]])
def test_undecodable_bytes_are_the_clients_fault(data: bytes) -> None:
    with pytest.raises(RequestError, match="video cannot be decoded") as caught:
        load_video(data, vision_parameters(), VideoParams(), WHERE)
    assert (caught.value.param, caught.value.status) == (WHERE, 400)


def test_sound_alone_is_no_video() -> None:
    from preprocess_data import wav

    with pytest.raises(RequestError, match="no video track"):
        load_video(wav(np.zeros(1600, np.float32), 16000), vision_parameters(), VideoParams(), WHERE)


def test_without_pyav_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(ConfigError, match="PyAV") as caught:
        load_video(b"", vision_parameters(), VideoParams(), WHERE)
    assert caught.value.fix == "pip install av"
