"""Videos: resize, sampling, timestamps and pixels compared with the goldens; encoded files; invalid files."""

from __future__ import annotations

import dataclasses
import io
import struct
import subprocess
import sys
from fractions import Fraction
from typing import Any

import av
import cv2
import numpy as np
import pytest
from preprocess_data import document, greys, noise_image, tensors, vision_parameters, wav

from conformance.preprocess import DecodedFrames
from mingc.errors import ConfigError, RequestError
from mingc.media import video as video_module
from mingc.media.audio import decode_audio
from mingc.media.limits import MediaLimits
from mingc.media.video import (
    frame_size,
    load_video,
    resize_frame,
    sample_frames,
    sample_video,
)
from mingc.prompts.conversation import VideoParams

WHERE = "messages[0].content[0]"


def flat_frames(count: int, height: int = 64, width: int = 96) -> list[np.ndarray]:
    """Frames of one grey each, so that the index can be read back."""
    return [np.full((height, width, 3), 5 * index, np.uint8) for index in range(count)]


def encode(frames: list[np.ndarray], fps: int, *, container: str = "matroska", codec: str = "ffv1") -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format=container) as output:
        stream = output.add_stream(codec, rate=fps)
        stream.height, stream.width = frames[0].shape[:2]
        stream.pix_fmt = {"ffv1": "bgr0", "rawvideo": "rgb24"}.get(codec, "yuv420p")
        for index, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = index, Fraction(1, fps)
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    return file.getvalue()


def test_resized_frames_equal_the_golden_bytes() -> None:
    recorded = tensors("preprocess")
    fetched = recorded["video.fetched"].transpose(0, 2, 3, 1)
    for index in range(document("preprocess")["video"]["frames_in"]):
        frame = recorded[f"video.raw_frame{index}"]
        np.testing.assert_array_equal(resize_frame(frame, *fetched.shape[1:3]), fetched[index])


def spec_size(
    height: int, width: int, num_frames: int, min_pixels: int, total_pixels: int
) -> tuple[int, int]:
    """Size of a resized frame by docs/model/vision.md §2.2 and §1.2."""
    max_pixels = max(2 * total_pixels / num_frames, int(min_pixels * 1.05))
    new_height, new_width = (max(32, round(side / 32) * 32) for side in (height, width))
    if new_height * new_width > max_pixels:
        beta = (height * width / max_pixels) ** 0.5
        return int(height / beta / 32) * 32, int(width / beta / 32) * 32
    if new_height * new_width < min_pixels:
        beta = (min_pixels / (height * width)) ** 0.5
        return -int(-height * beta // 32) * 32, -int(-width * beta // 32) * 32
    return new_height, new_width


def spec_rows(frames: list[np.ndarray]) -> np.ndarray:
    """Patch rows of an even number of resized frames by docs/model/vision.md §1.4 to §1.6, one patch at a time."""
    mean = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
    std = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
    height, width = frames[0].shape[:2]
    rows = []
    for pair in range(0, len(frames), 2):
        for y in range(0, height, 32):
            for x in range(0, width, 32):
                for top, left in ((y, x), (y, x + 16), (y + 16, x), (y + 16, x + 16)):
                    block = np.stack(
                        [frame[top : top + 16, left : left + 16] for frame in frames[pair : pair + 2]]
                    )
                    normalised = (block.astype(np.float32) / 255 - mean) / std
                    rows.append(normalised.transpose(3, 0, 1, 2).reshape(-1))
    return np.stack(rows)


def test_decoded_videos_of_random_sizes_give_the_rows_of_the_specification() -> None:
    generator = np.random.default_rng(12)
    num_resized = 0
    for seed in range(150):
        height, width = (int(side) for side in generator.integers(8, 120, 2))
        min_pixels, total_pixels = int(generator.integers(1024, 8192)), int(generator.integers(2048, 12288))
        frames = [noise_image(height, width, seed + index) for index in range(1 + seed % 3)]
        size = spec_size(height, width, len(frames), min_pixels, total_pixels)
        if not all(size):
            continue  # refused: tested below
        params = VideoParams(min_pixels=min_pixels, total_pixels=total_pixels)
        data = encode(frames, 2, container="nut", codec="rawvideo")
        video = load_video(data, vision_parameters(), params, WHERE)
        resized = [cv2.resize(frame, size[::-1], interpolation=cv2.INTER_CUBIC) for frame in frames]
        resized += resized[-1:] * (len(resized) % 2)
        assert video.vision.grid == (len(resized) // 2, size[0] // 16, size[1] // 16), (height, width)
        np.testing.assert_allclose(video.vision.pixels, spec_rows(resized), rtol=0, atol=1e-6)
        num_resized += (height, width) != size
    assert num_resized > 130


def test_a_frame_of_the_right_size_is_not_copied() -> None:
    image = noise_image(32, 64)
    assert resize_frame(image, 32, 64) is image


def test_resizing_does_not_start_threads() -> None:
    cv2.setNumThreads(4)
    resize_frame(noise_image(32, 64), 64, 64)
    assert cv2.getNumThreads() == 1


def test_a_list_of_frames_gives_the_recorded_pixels_and_times() -> None:
    recorded, case = tensors("preprocess"), document("preprocess")["video"]
    frames = [recorded[f"video.raw_frame{index}"] for index in range(case["frames_in"])]
    source = DecodedFrames(pictures=frames, fps=2.0)
    video = sample_video(source, vision_parameters(), VideoParams(**case["options"]), WHERE, MediaLimits())
    assert video is not None
    np.testing.assert_array_equal(video.vision.pixels, recorded["video.pixel_values_videos"])
    assert [list(video.vision.grid)] == recorded["video.grid_thw"].tolist()
    assert [list(video.timestamps)] == case["timestamps_per_temporal_patch"]


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


def test_the_number_of_frames_is_bounded() -> None:
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
def test_frames_share_the_pixel_budget(
    size: tuple[int, int], num_frames: int, params: VideoParams, expected: tuple[int, int]
) -> None:
    assert frame_size(*size, num_frames, vision_parameters(), params, WHERE) == expected


def test_frame_sizes_follow_a_patch_size_that_does_not_divide_32() -> None:
    parameters = dataclasses.replace(vision_parameters(), patch_size=14)
    height, width = frame_size(480, 640, 4, parameters, VideoParams(), WHERE)
    assert height % 28 == width % 28 == 0


@pytest.mark.parametrize("params", [VideoParams(fps=0), VideoParams(max_frames=0), VideoParams(fps=-1)])
def test_invalid_sampling_is_refused(params: VideoParams) -> None:
    with pytest.raises(RequestError, match="must be positive") as caught:
        load_video(b"", vision_parameters(), params, WHERE)
    assert caught.value.param == WHERE


def test_a_pixel_budget_that_is_too_small_is_refused() -> None:
    with pytest.raises(RequestError, match="does not fit 1024 pixels"):
        frame_size(20, 3000, 2, vision_parameters(), VideoParams(min_pixels=1, max_pixels=1024), WHERE)


def test_a_file_is_sampled_with_timestamps() -> None:
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


def test_fps_can_be_raised() -> None:
    params = VideoParams(min_pixels=4096, fps=5.0)
    video = load_video(encode(flat_frames(10), 5), vision_parameters(), params, WHERE)
    assert greys(video.vision.pixels, video.vision.grid) == [5 * index for index in range(10)]


def test_a_phone_video_is_turned_upright() -> None:
    """The display matrix asks for a quarter turn clockwise: the left edge becomes the top."""
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


def test_a_truncated_video_is_sampled_among_its_decodable_frames() -> None:
    frames = [noise_image(64, 96, seed) for seed in range(12)]
    data = encode(frames, 2)
    video = load_video(data[: len(data) * 2 // 3], vision_parameters(), VideoParams(min_pixels=4096), WHERE)
    assert 0 < video.vision.grid[0] < 6


def test_packets_without_a_picture_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged packets and hidden frames: sampled as if the video had only the frames that can be decoded."""
    data = encode(flat_frames(12), 2)
    expected = load_video(data, vision_parameters(), VideoParams(), WHERE)

    class WithMorePackets(video_module._EncodedVideo):
        def __init__(self, *words: Any) -> None:
            super().__init__(*words)
            self.num_frames += 3

    monkeypatch.setattr(video_module, "_EncodedVideo", WithMorePackets)
    video = load_video(data, vision_parameters(), VideoParams(), WHERE)
    assert video.timestamps == expected.timestamps
    assert np.array_equal(video.vision.pixels, expected.vision.pixels)


@pytest.mark.parametrize("data", [b"", b"no video", encode(flat_frames(4), 2)[:200]])
def test_undecodable_bytes_are_a_request_error(data: bytes) -> None:
    with pytest.raises(RequestError, match="video cannot be decoded") as caught:
        load_video(data, vision_parameters(), VideoParams(), WHERE)
    assert (caught.value.param, caught.value.status) == (WHERE, 400)


def test_a_file_with_sound_only_is_refused() -> None:
    with pytest.raises(RequestError, match="sound files cannot be decoded as a video"):
        load_video(wav(np.zeros(1600, np.float32), 16000), vision_parameters(), VideoParams(), WHERE)


def test_a_video_with_too_many_frames_or_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = encode(flat_frames(4), 2)
    params = VideoParams(min_pixels=4096)
    monkeypatch.setattr(video_module, "MAX_VIDEO_FRAMES", 4)
    monkeypatch.setattr(video_module, "MAX_PIXELS", 64 * 96)
    load_video(data, vision_parameters(), params, WHERE)
    monkeypatch.setattr(video_module, "MAX_VIDEO_FRAMES", 3)
    with pytest.raises(RequestError, match="more than 3 frames"):
        load_video(data, vision_parameters(), params, WHERE)
    monkeypatch.setattr(video_module, "MAX_PIXELS", 64 * 96 - 1)
    with pytest.raises(RequestError, match="frames have 96×64 pixels; 6143 can be decoded"):
        load_video(data, vision_parameters(), params, WHERE)


@pytest.mark.parametrize(
    ("module", "package"),
    [
        ("av", "av"),
        ("cv2", "opencv-python-headless"),
        ("soundfile", "soundfile"),
        ("_cffi_backend", "soundfile"),
    ],
)
def test_a_missing_library_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    """Also one that a library needs; never a slower way instead."""
    for name in ("soundfile", "_soundfile"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.raises(ConfigError, match=f"{package} cannot be imported: .*{module}") as caught:
        if package == "soundfile":
            decode_audio(wav(np.zeros(1600, np.float32), 16000), WHERE, max_seconds=1)
        load_video(encode(flat_frames(4), 2), vision_parameters(), VideoParams(min_pixels=4096), WHERE)
    assert (
        caught.value.fix
        == f"pip install 'mingc[serve]'; if that changes nothing: pip install --force-reinstall {package}"
    )


def test_importing_loads_no_decoder() -> None:
    code = "import sys, mingc.media.video; print({'av', 'cv2'} & set(sys.modules) or 'none')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "none"
