"""Audio clips: decoding, length rules, features compared with the goldens; invalid clips."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys

import av
import numpy as np
import pytest
import soundfile
from preprocess_data import audio_parameters, tensors, wav

from mingc.errors import RequestError
from mingc.media.audio import Wave, decode_audio, load_audio, wave_features

WHERE = "messages[0].content[0]"


def clip(seconds: float, rate: int = 16000) -> np.ndarray:
    time = np.arange(int(seconds * rate)) / rate
    return (0.3 * np.sin(2 * np.pi * 300 * time)).astype(np.float32)


def aac(samples: np.ndarray, rate: int) -> bytes:
    """`samples` (channels, n) float32 as AAC in an MP4, which libsndfile cannot decode."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        layout = "mono" if len(samples) == 1 else "stereo"
        stream = container.add_stream("aac", rate=rate, layout=layout)
        for start in range(0, samples.shape[1], 1024):
            block = np.ascontiguousarray(samples[:, start : start + 1024])
            frame = av.AudioFrame.from_ndarray(block, format="fltp", layout=layout)
            frame.sample_rate, frame.pts = rate, start
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return file.getvalue()


@pytest.mark.parametrize("case", ["single", "second_alone"])
def test_float_clips_give_the_recorded_features(case: str) -> None:
    recorded = tensors("audio")
    features = load_audio(wav(recorded[f"{case}.wav0"][0], 16000), audio_parameters(), WHERE)
    np.testing.assert_allclose(features.mel, recorded[f"{case}.audio_feats"][0], atol=1e-5)
    assert len(features.mel) == recorded[f"{case}.audio_feats_lengths"][0, 0]
    assert features.num_tokens == recorded[f"{case}.encoder_feats_lengths"][0, 0]


def test_integer_samples_are_scaled_and_resampled() -> None:
    """The golden has the official rule, the first channel alone: here that channel is sent twice."""
    recorded = tensors("audio")
    first = recorded["resampled.wav_int16_stereo_24k"][0]
    data = wav(np.stack([first, first], 1), 24000, subtype="PCM_16")
    wave = decode_audio(data, WHERE, max_seconds=10)
    assert wave.sample_rate == 24000
    np.testing.assert_array_equal(wave.samples, first.astype(np.float32) / 32768)
    features = load_audio(data, audio_parameters(), WHERE)
    np.testing.assert_allclose(features.mel, recorded["resampled.audio_feats"][0], atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "frames", "tokens"),
    [
        (16000, 100, 25),
        (1600, 10, 3),
        (53333, 333, 84),
        (480000, 3000, 750),
        (201, 1, 1),
        (719, 4, 1),
        (800, 5, 2),
    ],
)
def test_length_decides_frames_and_tokens(samples: int, frames: int, tokens: int) -> None:
    wave = Wave(samples=np.ones(samples, np.float32), sample_rate=16000)
    features = wave_features(wave, audio_parameters(), WHERE)
    assert (len(features.mel), features.num_tokens) == (frames, tokens)


@pytest.mark.parametrize(
    ("container", "subtype"), [("FLAC", "PCM_16"), ("OGG", "VORBIS"), ("MP3", "MPEG_LAYER_III")]
)
def test_other_containers_decode(container: str, subtype: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, clip(0.5), 16000, format=container, subtype=subtype)
    wave = decode_audio(file.getvalue(), WHERE, max_seconds=2)
    assert wave.sample_rate == 16000
    assert abs(len(wave.samples) - 8000) < 2400
    assert 0.2 < np.abs(wave.samples).max() < 0.4


def test_pyav_decodes_formats_unknown_to_libsndfile() -> None:
    stereo = np.stack([clip(0.5, 24000), np.zeros(12000, np.float32)])
    wave = decode_audio(aac(stereo, 24000), WHERE, max_seconds=2)
    assert wave.sample_rate == 24000
    assert abs(len(wave.samples) - 12000) < 3000
    assert 0.1 < np.abs(wave.samples).max() < 0.2, "half of one channel"


@pytest.mark.parametrize("kind", ["wav", "aac"])
@pytest.mark.parametrize(
    ("gains", "level"),
    [((0, 1), 0.5), ((1, 0), 0.5), ((1, 1), 1), ((1, 0.5), 0.75), ((1, -1), 1), ((0.4, -0.5), 0.5)],
)
def test_channels_are_mixed_down_unless_they_cancel(
    gains: tuple[float, float], level: float, kind: str
) -> None:
    """As `ffmpeg -ac 1`, but of a channel and its inverse, one stays."""
    mono = clip(0.5, 24000)
    stereo = np.stack([gain * mono for gain in gains]).astype(np.float32)
    data = wav(stereo.T, 24000) if kind == "wav" else aac(stereo, 24000)
    found = np.abs(decode_audio(data, WHERE, max_seconds=2).samples[4000:8000]).max()
    assert found == pytest.approx(0.3 * level, rel=1e-5 if kind == "wav" else 0.05)


@pytest.mark.parametrize(
    ("riff", "size"),
    [(0, 0), (2**32 - 1, 2**32 - 1), (0, None), (None, 0), (2**31 - 1, 2**31 - 37), (None, 40_000)],
)
@pytest.mark.parametrize("subtype", ["PCM_16", "PCM_24", "FLOAT", "ULAW"])
def test_a_wav_without_its_lengths_is_read_to_its_end(
    riff: int | None, size: int | None, subtype: str
) -> None:
    """As programs write it to a pipe."""
    data = bytearray(wav(clip(0.5), 16000, subtype=subtype))
    expected = decode_audio(bytes(data), WHERE, max_seconds=2).samples
    place = data.index(b"data") + 4
    for at, value in ((4, riff), (place, size)):
        if value is not None:
            data[at : at + 4] = value.to_bytes(4, "little")
    np.testing.assert_array_equal(decode_audio(bytes(data), WHERE, max_seconds=2).samples, expected)
    assert len(expected) == 8000


@pytest.mark.parametrize("data", [b"", b"RIFF", b"no audio at all", wav(clip(0.2), 16000)[:30]])
def test_undecodable_bytes_are_a_request_error(data: bytes) -> None:
    with pytest.raises(RequestError, match="cannot be decoded as audio") as caught:
        load_audio(data, audio_parameters(), WHERE)
    assert (caught.value.param, caught.value.status) == (WHERE, 400)


@pytest.mark.parametrize("samples", [0, 1, 200])
def test_clips_without_a_frame_are_refused(samples: int) -> None:
    with pytest.raises(RequestError, match=f"{samples} samples at 16000 Hz, too few") as caught:
        load_audio(wav(np.zeros(samples, np.float32), 16000), audio_parameters(), WHERE)
    assert caught.value.param == WHERE


@pytest.mark.parametrize("encode", [lambda wave: wav(wave, 16000), lambda wave: aac(wave[None], 16000)])
def test_clips_longer_than_the_position_table_are_refused(encode: object) -> None:
    parameters = dataclasses.replace(audio_parameters(), max_frames=100)
    assert len(load_audio(wav(clip(1.0099), 16000), parameters, WHERE).mel) == 100
    with pytest.raises(RequestError, match="longer than 1 seconds") as caught:
        load_audio(encode(clip(1.3)), parameters, WHERE)
    assert caught.value.param == WHERE
    with pytest.raises(RequestError, match="longer than 1 seconds"):
        load_audio(wav(clip(1.01), 16000), parameters, WHERE)


@pytest.mark.parametrize("encode", [lambda wave: wav(wave, 16000), lambda wave: aac(wave[None], 16000)])
def test_decoding_ends_at_the_limit_and_not_with_the_clip(encode: object) -> None:
    """A small file may hold hours: neither decoder keeps them until the length is checked."""
    assert decode_audio(encode(clip(1.0)), WHERE, max_seconds=1.1).sample_rate == 16000
    with pytest.raises(RequestError, match=r"longer than 1\.1 seconds") as caught:
        decode_audio(encode(clip(1.5)), WHERE, max_seconds=1.1)
    assert caught.value.param == WHERE


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
def test_samples_that_are_not_finite_or_too_large_are_refused(value: float) -> None:
    broken = clip(0.1)
    broken[7] = value
    with pytest.raises(RequestError, match="full scale is 1"):
        load_audio(wav(broken, 16000), audio_parameters(), WHERE)


def test_sample_rates_above_the_limit_are_refused() -> None:
    with pytest.raises(RequestError, match="sample rate of 500000 Hz"):
        load_audio(wav(clip(0.1), 500000), audio_parameters(), WHERE)


def test_importing_loads_no_decoder() -> None:
    code = "import sys, mingc.media.audio; print({'av', 'soundfile'} & set(sys.modules) or 'none')"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "none"
