"""Resampling, log-mel and Kaldi features compared with recorded ones; edge cases."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from typing import Any

import numpy as np
import pytest
import soundfile
from preprocess_data import CHECKPOINT, config, tensors

from mingc.media.dsp.fbank import kaldi_fbank
from mingc.media.dsp.log_mel import _second_thread, log_mel, min_samples, slaney_filters
from mingc.media.dsp.resample import FrameResampler, resample, resampled_length

MEL = {"sample_rate": 16000, "num_mels": 128, "fft_size": 400, "hop_samples": 160}


def test_resampling_a_clip_is_bitwise_equal_to_the_recording() -> None:
    recorded = tensors("audio")
    stereo = recorded["resampled.wav_int16_stereo_24k"]
    wave = resample(stereo[0].astype(np.float32) / 32768, 24000, 16000)
    assert wave.dtype == np.float32
    np.testing.assert_array_equal(wave, recorded["resampled.wav_16k"])


@pytest.mark.parametrize("voice", ["DB30", "lingguang"])
def test_voice_recordings_are_resampled_to_both_rates(voice: str) -> None:
    recorded = tensors("talker")
    path = CHECKPOINT / "talker" / config("talker/data/voice_name.json")[voice]["prompt_wav_path"]
    wave, rate = soundfile.read(path, dtype="float32")
    vae_rate = config("talker/vae/config.json")["sample_rate"]
    expected = recorded[f"voice.{voice}.spk_wav16k"][0]
    np.testing.assert_allclose(resample(wave, rate, 16000), expected, atol=1e-6)
    at_vae_rate = resample(wave, rate, vae_rate)
    padded = recorded[f"voice.{voice}.vae_input"][0]
    assert not padded[: -len(at_vae_rate)].any()
    np.testing.assert_allclose(at_vae_rate, padded[-len(at_vae_rate) :], atol=1e-6)


@pytest.mark.parametrize(
    ("source", "target"), [(8000, 16000), (44100, 16000), (16000, 44100), (48000, 16000)]
)
def test_a_tone_keeps_its_pitch_and_level(source: int, target: int) -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(source) / source).astype(np.float32)
    wave = resample(tone, source, target)
    assert len(wave) == target == resampled_length(source, source, target)
    expected = np.sin(2 * np.pi * 440 * np.arange(target) / target)
    edge = target // 20
    np.testing.assert_allclose(wave[edge:-edge], expected[edge:-edge], atol=2e-3)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 159, 160, 161])
def test_short_waves_have_the_ratio_rounded_up(num_samples: int) -> None:
    wave = resample(np.ones(num_samples, dtype=np.float32), 16000, 44100)
    assert len(wave) == -(-num_samples * 441 // 160) == resampled_length(num_samples, 16000, 44100)


def test_equal_rates_return_the_wave_and_zero_rates_are_refused() -> None:
    wave = np.arange(5, dtype=np.float32)
    assert resample(wave, 16000, 16000) is wave
    with pytest.raises(ValueError, match="0 Hz"):
        resample(wave, 0, 16000)


@pytest.mark.parametrize(("source", "delay"), [(8000, 7), (11_000, 7), (24_000, 9), (48_000, 16)])
def test_a_stream_is_resampled_like_the_whole_frame_by_frame(source: int, delay: int) -> None:
    """Late by half a filter, `delay` samples; each frame as soon as its sound is there, with the same bits."""
    frame = source * 512 // 16_000
    generator = np.random.default_rng(0)
    wave = generator.standard_normal(5 * frame + 7).astype(np.float32)
    expected = resample(np.concatenate([np.zeros(delay, np.float32), wave]), source, 16_000)[: 5 * 512]
    stream = FrameResampler(source, 16_000, 512)
    whole = stream.push(wave)
    np.testing.assert_allclose(whole, expected, atol=1e-5)
    assert len(stream.push(wave[:0], last=True)) == 512
    parts = FrameResampler(source, 16_000, 512)
    cuts = [0, 1, frame, frame + 1, 3 * frame - 1, 3 * frame, 5 * frame]
    found = [parts.push(each) for each in np.split(wave, cuts)]
    assert [len(each) // 512 for each in found] == [0, 0, 1, 0, 1, 1, 2, 0]
    np.testing.assert_array_equal(np.concatenate(found), whole)


@pytest.mark.parametrize(
    ("wave", "features"),
    [
        ("resampled.wav_16k", "resampled.audio_feats"),
        ("single.wav0", "single.audio_feats"),
        ("second_alone.wav0", "second_alone.audio_feats"),
    ],
)
def test_log_mel_matches_the_recording(wave: str, features: str) -> None:
    recorded = tensors("audio")
    result = log_mel(recorded[wave].reshape(-1), **MEL)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, recorded[features][0], atol=1e-5)


def test_log_mel_of_a_long_utterance() -> None:
    recorded = tensors("audio")
    tiles = int(recorded["long.tiles"][0])
    second = recorded["long.base_1s"]
    wave = np.concatenate([second * np.float32((k + 1) / tiles) for k in range(tiles)])
    result = log_mel(wave, **MEL)
    assert len(result) == int(recorded["long.audio_feats_lengths"][0, 0])
    np.testing.assert_allclose(result[:40], recorded["long.audio_feats_first40"], atol=1e-5)
    np.testing.assert_allclose(result[-40:], recorded["long.audio_feats_last40"], atol=1e-5)
    np.testing.assert_allclose(result.mean(axis=1), recorded["long.audio_feats_row_mean"], atol=1e-5)


def log_mel_in_float64(wave: np.ndarray, size: int, hop: int, filters: np.ndarray) -> np.ndarray:
    """The definition (spec: audio.md §2) with numpy's FFT, or, for `size` up to 100, with the sum itself."""
    padded = np.pad(wave.astype(np.float64), size // 2, mode="reflect")
    angle = np.arange(size, dtype=np.float32) * np.float32(2 * np.pi / size)
    window = np.float32(0.5) - np.float32(0.5) * np.cos(angle.astype(np.float64)).astype(np.float32)
    frames = [padded[start : start + size] * window for start in range(0, hop * (len(wave) // hop), hop)]
    bins = np.exp(-2j * np.pi * np.outer(np.arange(size), np.arange(size // 2 + 1)) / size)
    spectra = np.array(frames) @ bins if size <= 100 else np.fft.rfft(frames, axis=1)
    logs = np.log10(np.maximum(np.abs(spectra) ** 2 @ filters.T.astype(np.float64), 1e-10))
    return (np.maximum(logs, logs.max() - 8) + 4) / 4


@pytest.mark.parametrize("size", [400, 64, 63, 2, 1])
@pytest.mark.parametrize("kind", ["speech", "noise", "tone and offset", "very quiet"])
def test_log_mel_equals_its_definition_in_float64(kind: str, size: int) -> None:
    """The reference itself, torch in float32, is up to 1e-4 away for these sounds; 400 frames are several blocks."""
    generator, times = np.random.default_rng(0), np.arange(64_000) / 16_000
    wave = {
        "speech": np.resize(tensors("audio")["long.base_1s"], 64_000),
        "noise": generator.normal(0, 0.1, 64_000),
        "tone and offset": 0.5 + 0.4 * np.sin(2 * np.pi * 1000.3 * times),
        "very quiet": generator.normal(0, 1e-5, 64_000),
    }[kind].astype(np.float32)
    sizes = {
        "sample_rate": 16000,
        "num_mels": 128 if size == 400 else 5,
        "fft_size": size,
        "hop_samples": 160,
    }
    expected = log_mel_in_float64(wave, size, 160, slaney_filters(sizes["num_mels"], size, 16000))
    np.testing.assert_allclose(log_mel(wave, **sizes), expected, atol=2e-5)


def test_log_mel_of_silence_is_its_floor() -> None:
    np.testing.assert_allclose(
        log_mel(np.zeros(16000, np.float32), **MEL), np.full((100, 128), -1.5), atol=1e-6
    )


@pytest.mark.parametrize("frames", [100, 4097, 9000])
def test_the_floor_of_log_mel_is_that_of_the_loudest_moment_however_long_the_clip_is(frames: int) -> None:
    """Eight powers of ten below it (spec: audio.md §2): a bang at the start hides a murmur at the very end."""
    small = {"sample_rate": 16000, "num_mels": 8, "fft_size": 64, "hop_samples": 16}
    murmur = np.random.default_rng(0).normal(0, 1e-7, 16 * frames).astype(np.float32)
    alone = log_mel(murmur, **small)
    bang = murmur.copy()
    bang[64:128] = np.sin(np.arange(64), dtype=np.float32)
    features = log_mel(bang, **small)
    floor = features.max() - np.float32(8.0 / 4.0)
    np.testing.assert_allclose(features[-20:], np.full((20, 8), floor), atol=1e-6)
    assert features.min() == pytest.approx(floor, abs=1e-6) and alone.max() < floor


def test_log_mel_needs_half_a_window() -> None:
    shortest = min_samples(400)
    ones = np.ones(shortest, np.float32)
    features = log_mel(ones, **MEL)
    assert features.shape == (1, 128) and features.min() == pytest.approx(features.max() - 2.0)
    expected = log_mel_in_float64(ones, 400, 160, slaney_filters(128, 400, 16000))
    np.testing.assert_allclose(features, expected, atol=2e-5)
    with pytest.raises(ValueError, match="too few"):
        log_mel(np.ones(shortest - 1, np.float32), **MEL)


def test_log_mel_does_not_wait_for_a_second_thread_that_is_busy() -> None:
    wave = np.random.default_rng(5).standard_normal(160_000).astype(np.float32)
    both = log_mel(wave, **MEL)
    free = threading.Event()
    busy = _second_thread.submit(free.wait, 60.0)
    alone = log_mel(wave, **MEL)
    assert not busy.done()
    free.set()
    np.testing.assert_array_equal(alone, both)


def test_an_error_of_the_second_thread_of_log_mel_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the features of its blocks would be what the memory held before."""
    has_failed = threading.Event()
    rfft = np.fft.rfft

    def fails_in_the_second(*given: Any, **named: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            has_failed.set()
            raise MemoryError("of the second thread")
        assert has_failed.wait(60.0)
        return rfft(*given, **named)

    monkeypatch.setattr(np.fft, "rfft", fails_in_the_second)
    with pytest.raises(MemoryError, match="of the second thread"):
        log_mel(np.zeros(160_000, np.float32), **MEL)


def test_mel_filters_cover_other_sizes() -> None:
    filters = slaney_filters(80, 512, 8000)
    assert filters.shape == (80, 257)
    assert (filters >= 0).all()


@pytest.mark.parametrize("voice", ["DB30", "lingguang"])
def test_speaker_features_match_the_recording(voice: str) -> None:
    recorded = tensors("talker")
    result = kaldi_fbank(recorded[f"voice.{voice}.spk_wav16k"][0], sample_rate=16000)
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, recorded[f"voice.{voice}.fbank"], atol=1e-4)


def test_speaker_features_of_a_short_wave_are_empty() -> None:
    assert kaldi_fbank(np.zeros(399, np.float32), sample_rate=16000).shape == (0, 80)
    assert kaldi_fbank(np.zeros(400, np.float32), sample_rate=16000).shape == (1, 80)


def test_filter_banks_have_the_same_bits_with_any_number_of_threads() -> None:
    """A voice that a server registers equals that of an export, which has other threads."""
    code = (
        "import numpy as np, sys; from mingc.media.dsp.fbank import kaldi_fbank;"
        "wave = np.random.default_rng(0).normal(size=106_446).astype(np.float32);"
        "sys.stdout.buffer.write(kaldi_fbank(wave, sample_rate=16000).tobytes())"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            check=True,
        ).stdout
        for threads in ("1", "2", "3")
    }
    assert len(found) == 1
