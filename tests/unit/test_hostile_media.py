"""Media that claim more than they hold, or more than a request may take; pictures that viewers turn or convert."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import av
import cv2
import numpy as np
import pytest
import soundfile
from hostile_media import encode_video, small_video
from PIL import Image, ImageFile, ImageOps
from preprocess_data import (
    audio_parameters,
    noise_image,
    png,
    thinker_parameters,
    tokenizer,
    vision_parameters,
    wav,
)

from mingc.errors import RequestError
from mingc.media import audio as audio_module
from mingc.media import video as video_module
from mingc.media.audio import decode_audio, load_audio
from mingc.media.decoding import InProcessDecoder
from mingc.media.image import decode_image, load_image
from mingc.media.limits import MIB, MediaLimits
from mingc.media.video import load_video
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import MediaPart, Message, VideoParams

WHERE = "messages[0].content[0]"
# As the released artifact, whose largest frame has 16,384 tokens.
LARGE = dataclasses.replace(vision_parameters(), max_patches=65536)


def refused(code: str, status: int, load: Any, *arguments: Any, **options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        load(*arguments, **options)
    assert (caught.value.code, caught.value.status, caught.value.param) == (code, status, WHERE)
    return caught.value


@pytest.fixture
def no_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding a frame or an image is an error of the test."""

    def fail(*args: Any, **how: Any) -> None:
        raise AssertionError("decoded before its memory was planned")

    monkeypatch.setattr(video_module._EncodedVideo, "frames", fail)
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)


@pytest.mark.usefixtures("no_frames")
@pytest.mark.parametrize(
    "params",
    [
        VideoParams(min_pixels=1 << 26, max_pixels=1 << 26),
        VideoParams(min_pixels=1 << 24, total_pixels=1 << 40),
        VideoParams(fps=30.0, max_frames=60_000, max_pixels=1 << 21, min_pixels=1 << 21),
    ],
)
def test_fields_of_a_client_that_ask_for_too_much_are_refused_before_decoding(params: VideoParams) -> None:
    data = encode_video(96, 64, 80, fps=30)
    generous = dataclasses.replace(vision_parameters(), max_patches=1 << 30)
    error = refused("media_too_large", 413, load_video, data, generous, params, WHERE)
    assert "MiB of memory" in error.message
    with pytest.raises(RequestError, match=r"patches after resizing|MiB of memory"):
        load_video(data, vision_parameters(), params, WHERE)


@pytest.mark.usefixtures("no_frames")
def test_a_video_with_more_tokens_than_the_context_is_refused_before_decoding() -> None:
    limits = MediaLimits(max_tokens=500)
    params = VideoParams(fps=30.0, max_frames=60_000)
    data = encode_video(96, 64, 80, fps=30)
    error = refused("media_too_large", 413, load_video, data, LARGE, params, WHERE, limits)
    assert "the context has room for 500" in error.message


@pytest.mark.usefixtures("no_frames")
def test_large_source_frames_are_refused_before_decoding() -> None:
    data = encode_video(8192, 8192, 1)
    error = refused("media_too_large", 413, load_video, data, LARGE, VideoParams(), WHERE)
    assert "8192×8192" in error.message


def test_a_usual_video_fits_the_default_limit() -> None:
    """4K at 8 bits, as phones record it, with the whole default budget of pixels."""
    video = load_video(encode_video(3840, 2160, 10, fps=2), LARGE, VideoParams(), WHERE)
    assert video.vision.grid[0] == 5
    assert video.vision.patches.nbytes < 96 * MIB
    assert video.vision.patches.dtype == np.uint8, "a quarter of what float32 takes"


def pictures_as_video(sizes: list[tuple[int, int]]) -> bytes:
    """A Matroska file of JPEG frames of several (width, height); its header gives the first."""
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream = container.add_stream("mjpeg", rate=5)
        stream.width, stream.height, stream.pix_fmt = *sizes[0], "yuvj420p"
        for index, size in enumerate(sizes):
            picture = io.BytesIO()
            Image.new("RGB", size, (9, 99, 199)).save(picture, "JPEG")
            packet = av.Packet(picture.getvalue())
            packet.stream, packet.pts, packet.dts, packet.is_keyframe = stream, index * 200, index * 200, True
            container.mux(packet)
    return file.getvalue()


def test_a_later_frame_larger_than_the_header_says_ends_the_video() -> None:
    """FFmpeg allocates no frame above the limit, whichever header gives its size."""
    limits = MediaLimits(max_bytes=8 * MIB)
    params = VideoParams(min_pixels=4096, fps=5.0)
    parameters = dataclasses.replace(LARGE, video_total_pixels=1 << 18)
    small, large = (320, 240), (2048, 1024)
    video = load_video(pictures_as_video([small] * 8), parameters, params, WHERE, limits)
    assert video.vision.grid[0] == 4
    load_video(pictures_as_video([small] * 4 + [(640, 480)] * 4), parameters, params, WHERE, limits)
    lying = pictures_as_video([small] * 4 + [large] * 4)
    refused("undecodable_media", 400, load_video, lying, parameters, params, WHERE, limits)


@pytest.mark.parametrize("kind", ["ffconcat", "sdp"])
def test_a_video_cannot_name_other_files_or_addresses(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "secret.mp4").write_bytes(small_video())
    text = {
        "ffconcat": "ffconcat version 1.0\nfile 'secret.mp4'\n",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 9 RTP/AVP 96\n"
        "a=rtpmap:96 H264/90000\n",
    }[kind]
    data = text.encode()
    refused("undecodable_media", 400, load_video, data, LARGE, VideoParams(min_pixels=4096), WHERE)
    refused("undecodable_media", 400, load_audio, data, audio_parameters(), WHERE)


def test_a_large_picture_is_refused_by_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    Image.new("RGBA", (7000, 7000)).save(file, "PNG", compress_level=1)
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda image: pytest.fail("decoded"))
    error = refused("media_too_large", 413, load_image, file.getvalue(), LARGE, WHERE)
    assert "7000×7000 pixels (PNG, RGBA)" in error.message


def test_a_picture_of_a_camera_fits_the_default_limit() -> None:
    file = io.BytesIO()
    Image.new("RGB", (8064, 6048), (9, 99, 199)).save(file, "JPEG", exif=oriented(6))
    features = load_image(file.getvalue(), LARGE, WHERE)
    assert features.grid[1] > features.grid[2]


def test_the_media_of_a_request_share_their_memory() -> None:
    processor = ChatProcessor(
        tokenizer(),
        thinker_parameters(),
        vision=vision_parameters(),
        audio=None,
        decoder=InProcessDecoder(max_bytes=10_000_000),
    )

    def prepare(count: int) -> None:
        parts = tuple(
            MediaPart(kind="image", data=png(noise_image(768, 768)), where=f"images[{index}]")
            for index in range(count)
        )
        processor.prepare([Message(role="user", parts=parts)])

    prepare(1)
    with pytest.raises(RequestError, match="MiB of memory") as caught:
        prepare(3)
    assert (caught.value.code, caught.value.param) in {
        ("media_too_large", "images[1]"),
        ("media_too_large", "images[2]"),
    }


def oriented(orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif.tobytes()


@pytest.mark.parametrize("orientation", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("size", [(64, 96), (150, 70)])
def test_a_picture_is_turned_upright_by_its_exif_data(orientation: int, size: tuple[int, int]) -> None:
    height, width = size
    picture = Image.fromarray(cv2.GaussianBlur(noise_image(height, width), (9, 9), 3))
    file = io.BytesIO()
    picture.save(file, "PNG", exif=oriented(orientation))
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))))
    np.testing.assert_array_equal(decode_image(file.getvalue(), WHERE), upright)
    turned = load_image(file.getvalue(), vision_parameters(), WHERE)
    expected = load_image(png(upright), vision_parameters(), WHERE)
    assert turned.grid == expected.grid
    # the axes are resized in the other order, which rounds differently
    np.testing.assert_allclose(turned.patches.astype(int), expected.patches.astype(int), rtol=0, atol=2)


def test_damaged_exif_data_leave_the_picture_as_it_is() -> None:
    file = io.BytesIO()
    Image.fromarray(noise_image(32, 64)).save(file, "PNG", exif=b"Exif\0\0MM\0*\xff\xff\xff\xff garbage")
    np.testing.assert_array_equal(decode_image(file.getvalue(), WHERE), noise_image(32, 64))


@pytest.mark.parametrize("kind", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_range(kind: str) -> None:
    """As OpenCV reads it: the upper byte of each value."""
    grey = np.linspace(0, 65535, 64 * 64).astype(np.uint16).reshape(64, 64)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, kind)
    expected = cv2.imdecode(np.frombuffer(file.getvalue(), np.uint8), cv2.IMREAD_COLOR)
    decoded = decode_image(file.getvalue(), WHERE)
    np.testing.assert_allclose(decoded.astype(int), expected.astype(int), rtol=0, atol=1)
    assert (decoded.min(), decoded.max()) == (0, 255)


@pytest.mark.parametrize("mode", ["F", "I"])
def test_pixels_of_32_bits_are_refused(mode: str) -> None:
    file = io.BytesIO()
    Image.new(mode, (32, 32), 7).save(file, "TIFF")
    error = refused("undecodable_media", 400, decode_image, file.getvalue(), WHERE)
    assert "8 or 16 bits" in str(error.fix)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_dropped_as_the_reference_does(mode: str) -> None:
    picture = Image.fromarray(noise_image(40, 40)).convert(mode if mode != "LA" else "L").convert(mode)
    if mode == "P":
        picture.info["transparency"] = bytes(range(256))
    else:
        picture.putalpha(100)
    file = io.BytesIO()
    picture.save(file, "PNG")
    with Image.open(io.BytesIO(file.getvalue())) as image:
        image.info.pop("transparency", None)
        expected = np.asarray(image.convert("RGB"))
    np.testing.assert_array_equal(decode_image(file.getvalue(), WHERE), expected)


def encode_sound(samples: np.ndarray, kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, 16000, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(("kind", "subtype"), [("FLAC", "PCM_16"), ("MP3", "MPEG_LAYER_III")])
def test_a_long_sound_is_not_decoded_to_its_end(
    kind: str, subtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytearray(encode_sound(np.zeros(16000 * 120, np.float32), kind, subtype))
    decoded = []
    real = soundfile.SoundFile.read

    def read(file: Any, *args: Any, **how: Any) -> Any:
        block = real(file, *args, **how)
        decoded.append(len(block))
        return block

    monkeypatch.setattr(soundfile.SoundFile, "read", read)
    with pytest.raises(RequestError, match="longer than 2 seconds"):
        decode_audio(bytes(data), WHERE, max_seconds=2)
    assert sum(decoded) < 16000 * 30


def test_a_long_sound_in_a_video_is_not_decoded_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("aac", rate=16000, layout="mono")
        for start in range(0, 16000 * 60, 1024):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.sample_rate, frame.pts = 16000, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    decoded = []

    class Resampler:
        def __init__(self, *how: Any) -> None:
            self._real = real(*how)

        def resample(self, frame: Any) -> Any:
            decoded.append(frame.samples)
            return self._real.resample(frame)

    real = av.AudioResampler
    monkeypatch.setattr(av, "AudioResampler", Resampler)
    with pytest.raises(RequestError, match="longer than 2 seconds"):
        decode_audio(file.getvalue(), WHERE, max_seconds=2)
    assert 16000 < sum(decoded) < 16000 * 4


def test_the_memory_of_a_sound_is_bounded() -> None:
    data = wav(np.zeros(16000 * 20, np.float32), 16000)
    decode_audio(data, WHERE, max_seconds=30)
    error = refused(
        "media_too_large", 413, decode_audio, data, WHERE, max_seconds=30, limits=MediaLimits(max_bytes=MIB)
    )
    assert "MiB of memory" in error.message
    limits = MediaLimits(max_bytes=MIB)
    assert refused("media_too_large", 413, load_audio, data, audio_parameters(), WHERE, limits).param == WHERE


def test_sounds_of_many_channels_are_refused() -> None:
    data = wav(np.zeros((2000, 65), np.float32), 16000, subtype="PCM_16")
    with pytest.raises(RequestError, match="65 channels") as caught:
        decode_audio(data, WHERE, max_seconds=2)
    assert caught.value.param == WHERE
    assert len(decode_audio(wav(np.zeros((2000, 64)), 16000), WHERE, max_seconds=2).samples) == 2000


@pytest.mark.parametrize("channels", [1, 2, 9, 63])
def test_sounds_of_many_channels_decode_with_pyav(channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A damaged WAV goes from libsndfile to PyAV, which crashed on more than eight channels."""
    monkeypatch.setattr(audio_module, "_soundfile_blocks", lambda *args: iter(()))
    samples = np.zeros((2000, channels), np.float32)
    samples[:, 0] = np.sin(np.arange(2000) / 9)
    wave = decode_audio(wav(samples, 16000), WHERE, max_seconds=2)
    assert wave.sample_rate == 16000
    np.testing.assert_allclose(wave.samples, samples[:, 0] / channels, atol=1e-6)
