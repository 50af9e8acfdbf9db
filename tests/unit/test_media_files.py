"""Generated files of many kinds: times of frames, lengths, pixels; damage; names of formats that are not decoded.

`benchmarks/media_ffmpeg.py` compares its files with an `ffmpeg` program; here they are compared with what was encoded.
"""

from __future__ import annotations

import numpy as np
import pytest
from media_ffmpeg import CONSTANT, PATTERNS, RATE_HZ, clips, pictures, source_times, video
from PIL import Image
from preprocess_data import audio_parameters, greys, noise_image, png, vision_parameters, wav

from mingc.errors import RequestError
from mingc.media.audio import decode_audio, load_audio
from mingc.media.image import decode_image, load_image
from mingc.media.limits import MediaLimits
from mingc.media.video import load_video, open_video, sample_frames
from mingc.prompts.conversation import VideoParams

WHERE = "messages[0].content[0]"


@pytest.mark.parametrize("container", ["mp4", "webm", "mpegts", "gif"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_frames_are_shown_when_their_packets_say(pattern: str, container: str) -> None:
    source = open_video(video(PATTERNS[pattern], container), WHERE, MediaLimits())
    times = np.subtract(PATTERNS[pattern], PATTERNS[pattern][0])
    np.testing.assert_allclose(source_times(source)[:-1], times, rtol=0, atol=0.011)
    assert 0 < source_times(source)[-1] - times[-1] <= 1.01
    if pattern in CONSTANT and container != "gif":  # GIF counts in hundredths of a second
        assert source.times is None, "sampled by number, as the official code does"


# (pattern, time of each pair of frames, seconds, number of the source frame of each sampled one)
SAMPLED = {
    "still, then motion": (
        [0.25 + pair for pair in range(10)],
        [0] * 14 + [9, 25, 40, 56, 72, 87],  # 30 a second from 7 s on, sampled every 0.52 s
    ),
    "slides": ([2.5, 11.5, 16.0], [0, 1, 2, 3, 4, 4]),
}


@pytest.mark.parametrize("container", ["mp4", "webm"])
@pytest.mark.parametrize("pattern", SAMPLED)
def test_frames_are_sampled_evenly_in_time(pattern: str, container: str) -> None:
    pairs, frames = SAMPLED[pattern]
    times = PATTERNS[pattern]
    found = load_video(
        video(times, container), vision_parameters(), VideoParams(min_pixels=4096, max_pixels=6144), WHERE
    )
    assert found.timestamps == pytest.approx(pairs, abs=0.02)
    levels = [20 + 200 * frame // len(times) for frame in frames]
    difference = np.subtract(greys(found.vision.pixels, found.vision.grid), levels)
    assert np.abs(difference).max() <= 5, "the codec rounds, and a frame is two levels"


def test_a_constant_rate_gives_the_same_by_time_and_by_number() -> None:
    """The rule of vision.md §2 for all lengths: even in time is even in number if the rate is constant."""
    for frames in range(1, 400, 7):
        for rate in (0.5, 1.0, 12.0, 25.0, 30.0):
            times = np.arange(frames + 1) / rate
            by_number = sample_frames(frames, rate, fps=2.0, max_frames=50)
            by_time = sample_frames(frames, rate, fps=2.0, max_frames=50, source_times=times + 1e-9)
            assert by_time[1] == pytest.approx(by_number[1], abs=1e-6)
            assert np.abs(np.subtract(by_time[0], by_number[0])).max() <= 1, "numbers are rounded down"


def test_frames_of_a_cut_video_have_their_times() -> None:
    times = PATTERNS["webcam: 30, then 15 fps"]
    data = video(times, "webm")
    source = open_video(data[: len(data) * 4 // 5], WHERE, MediaLimits())
    source.count_decodable()
    assert 90 < source.num_frames < len(times)
    np.testing.assert_allclose(source_times(source)[:-1], times[: source.num_frames], atol=0.011)


def test_a_clock_that_is_set_back_leaves_the_rate() -> None:
    """Joined transport streams: times would put frames of the second part between those of the first."""
    part = video(PATTERNS["30 fps"], "mpegts")
    source = open_video(part + part, WHERE, MediaLimits())
    assert (source.times, source.num_frames) == (None, 200)


def test_clips_of_all_containers_have_their_length_and_level() -> None:
    """3 s of a tone: each channel swells to 0.4 × its share, and they are in phase."""
    num_files = 0
    for file in clips():
        try:
            wave = decode_audio(file.data, WHERE, max_seconds=60)
        except RequestError as error:
            assert file.is_cut, (file.name, error.message)
            continue
        num_files += 1
        seconds = len(wave.samples) / wave.sample_rate
        if file.is_cut:
            assert seconds < 2.5, file.name
            continue
        assert seconds == pytest.approx(3, abs=0.1), file.name
        power = np.square(wave.samples[: 3 * wave.sample_rate], dtype=np.float64).mean() ** 0.5
        shares = (1, 0.75, None, None, None, 7 / 12)  # mean of 1/c, 2/c, …, c/c
        assert any(power == pytest.approx(0.2 * share, rel=0.05) for share in shares if share), file.name
    assert num_files > 60


def test_pictures_of_all_formats_are_the_picture_and_cut_ones_are_refused() -> None:
    noise = np.random.default_rng(3).integers(0, 255, (12, 16, 4), dtype=np.uint8)
    picture = Image.fromarray(noise[..., :3]).resize((160, 120), Image.Resampling.BICUBIC)
    colour, grey = (
        np.asarray(picture).astype(int),
        np.asarray(picture.convert("L").convert("RGB")).astype(int),
    )
    num_files = 0
    for file in pictures():
        if file.is_cut:
            with pytest.raises(RequestError, match="cannot be decoded as an image"):
                decode_image(file.data, WHERE)
            continue
        num_files += 1
        pixels = decode_image(file.data, WHERE).astype(int)
        expected = grey if file.name.endswith(", L") or "grey" in file.name else colour
        if ", 1" not in file.name or "16" in file.name:
            assert np.abs(pixels - expected).mean() < 20, file.name
    assert num_files > 35


def test_a_cut_jpeg_is_refused_wherever_it_is_cut() -> None:
    data = next(file.data for file in pictures() if file.name == "JPEG, quality 95, no end marker")
    for missing in range(2, len(data) - 700, 211):
        with pytest.raises(RequestError, match="cannot be decoded as an image"):
            load_image(data[:-missing], vision_parameters(), WHERE)


@pytest.mark.parametrize(
    ("data", "name"),
    [
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC"),
        (b"%PDF-1.7\n", "PDF"),
        (b'<?xml version="1.0"?>\n<!-- drawn -->\n<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"\xef\xbb\xbf<svg/>", "SVG"),
        (b"<!DOCTYPE html><html>not found</html>", "HTML"),
        (b"8BPS\0\1", "Photoshop"),
        (b"\xff\x0a\xfa\x7f", "JPEG XL"),
        (b"\0\0\1\0\1\0\x10\x10", "icon"),
        (b"PK\3\4\x14\0\6\0", "ZIP or Office"),
        (wav(np.zeros(900, np.float32), 16000), "sound"),
        (video([0.0, 0.5]), "video"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_format_that_is_not_decoded_is_named(data: bytes, name: str) -> None:
    with pytest.raises(RequestError, match=f"^{name} files cannot be decoded as an image") as caught:
        load_image(data, vision_parameters(), WHERE)
    assert (caught.value.code, caught.value.fix) == ("undecodable_media", "send JPEG, PNG, WebP or GIF")


def test_a_picture_sent_as_sound_or_video_is_named() -> None:
    picture = png(noise_image(32, 32))
    with pytest.raises(RequestError, match="PNG files cannot be decoded as audio"):
        load_audio(picture, audio_parameters(), WHERE)
    with pytest.raises(RequestError, match="PNG files cannot be decoded as a video"):
        load_video(picture, vision_parameters(), VideoParams(), WHERE)


def test_the_sound_of_a_video_is_decoded_and_a_silent_one_says_so() -> None:
    tone = (0.3 * np.sin(np.arange(2 * RATE_HZ) / 9)).astype(np.float32)
    data = video(PATTERNS["12 fps"], sound=tone)
    assert load_audio(data, audio_parameters(), WHERE).num_tokens == pytest.approx(50, abs=3)
    with pytest.raises(RequestError, match="has no sound") as caught:
        load_audio(video(PATTERNS["12 fps"]), audio_parameters(), WHERE)
    assert caught.value.code == "no_audio_track"
