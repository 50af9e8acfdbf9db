"""Audio comparison: audible faults are found, and rounding error is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mingc.media.dsp.audio_comparison import LIMITS, compare_audio, mel_distance_db, power_spectra
from mingc.media.dsp.resample import resample
from mingc.verify.comparison_log import ComparisonLog

Wave = NDArray[np.float32]

HZ = 44100
PATCH = 14112  # samples of a patch of the released model
DATA = Path(__file__).parents[1] / "data"


def _speech() -> Wave:
    """Syllables of another pitch and loudness every 0.16 s, with harmonics and some noise."""
    generator = np.random.default_rng(7)
    parts = []
    for _ in range(14):
        time = np.arange(PATCH // 2) / HZ
        pitch, loudness = generator.uniform(110, 300), generator.uniform(0.05, 0.5)
        tone = sum(np.sin(2 * math.pi * pitch * k * time) / k for k in range(1, 20))
        parts.append(loudness * np.hanning(len(time)) * tone / 3)
    wave = np.concatenate(parts)
    return (wave + 0.003 * generator.standard_normal(len(wave))).astype(np.float32)


def _recorded() -> Wave:
    """What the reference's decoder made of random latents."""
    return np.asarray(load_file(DATA / "vae.safetensors")["dec.sliding.wav"][0, 0], np.float32)


WAVES = {"speech": _speech(), "decoder": _recorded()}


def off(found: Wave, recorded: Wave, *, hz: int = HZ) -> set[str]:
    differences = compare_audio(found, recorded, found_hz=hz, recorded_hz=HZ)
    assert [each.figure for each in differences] == [*LIMITS]
    return {each.figure for each in differences if each.is_off}


def half_speed(wave: Wave) -> Wave:
    return resample(wave, HZ // 2, HZ)


def other_rate_resampled(wave: Wave) -> Wave:
    return resample(wave, 48000, HZ)


def silence(wave: Wave) -> Wave:
    return np.zeros_like(wave)


def louder(wave: Wave) -> Wave:
    return 1.05 * wave


def clipped(wave: Wave) -> Wave:
    limit = 0.7 * np.abs(wave).max()
    return np.clip(wave, -limit, limit)


def shuffled(wave: Wave) -> Wave:
    patches = [wave[first : first + PATCH] for first in range(0, len(wave), PATCH)]
    return np.concatenate(patches[1::-1] + patches[2:])


def late(wave: Wave) -> Wave:
    return np.concatenate([np.zeros(441, np.float32), wave[:-441]])


def low_passed(wave: Wave) -> Wave:
    spectrum = np.fft.rfft(wave)
    spectrum[np.fft.rfftfreq(len(wave), 1 / HZ) > 4000] = 0
    return np.fft.irfft(spectrum, len(wave)).astype(np.float32)


def cut(wave: Wave) -> Wave:
    return wave[:-1]


def last_patch_lost(wave: Wave) -> Wave:
    return np.concatenate([wave[:-PATCH], np.zeros(PATCH, np.float32)])


def not_a_number(wave: Wave) -> Wave:
    return np.concatenate([wave[:-1], np.float32([np.nan])])


FAULTS: dict[Callable[[Wave], Wave], set[str]] = {
    half_speed: {"duration", "spectral centroid", "mel distance"},
    other_rate_resampled: {"duration", "spectral centroid", "mel distance"},
    silence: {"RMS", "peak", "spectral centroid", "mel distance"},
    louder: {"RMS", "peak"},
    clipped: {"peak"},
    shuffled: {"mel distance"},
    late: {"mel distance"},
    low_passed: {"spectral centroid", "mel distance"},
    cut: {"duration"},
    last_patch_lost: {"RMS", "mel distance"},
    not_a_number: {"RMS", "peak", "spectral centroid", "mel distance"},
}


@pytest.mark.parametrize("name", WAVES)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_an_audible_fault_is_found_by_its_figures(fault: Callable[[Wave], Wave], name: str) -> None:
    assert off(fault(WAVES[name]), WAVES[name]) >= FAULTS[fault]


@pytest.mark.parametrize("name", WAVES)
def test_the_same_samples_at_another_rate_are_found(name: str) -> None:
    found = off(WAVES[name], WAVES[name], hz=48000)
    assert found >= {"sample rate", "duration", "spectral centroid", "mel distance"}


@pytest.mark.parametrize("name", WAVES)
def test_a_resampled_wave_differs_in_its_rate(name: str) -> None:
    assert "sample rate" in off(resample(WAVES[name], HZ, 48000), WAVES[name], hz=48000)


@pytest.mark.parametrize("hz", [22050, 32000, 48000])
def test_the_same_sound_at_another_rate_differs_in_its_rate_alone(hz: int) -> None:
    """A sound written down as a formula, sampled twice: harmonics of 300 Hz up to 2.4 kHz, for a second."""

    def sampled(rate: int) -> Wave:
        phase = 2 * math.pi * 300 * np.arange(rate) / rate
        return (0.1 * sum(np.sin(k * phase) for k in range(1, 9))).astype(np.float32)

    assert off(sampled(hz), sampled(HZ), hz=hz) == {"sample rate"}


@pytest.mark.parametrize("name", WAVES)
@pytest.mark.parametrize(
    "relative", [0.0, 1e-6, 1e-4, 2e-3]
)  # of the largest sample; 16-bit PCM rounds by 1.5e-5, bfloat16 by 2e-3
def test_rounding_error_passes(name: str, relative: float) -> None:
    wave = WAVES[name]
    noise = np.random.default_rng(1).uniform(-1, 1, len(wave)) * relative * np.abs(wave).max()
    assert off((wave + noise).astype(np.float32), wave) == set()


def test_a_figure_names_both_values_and_the_limit() -> None:
    wave = WAVES["speech"]
    (rms,) = (
        each for each in compare_audio(2 * wave, wave, found_hz=HZ, recorded_hz=HZ) if each.figure == "RMS"
    )
    assert rms.found == pytest.approx(2 * rms.recorded)
    assert rms.difference == pytest.approx(1.0)
    assert rms.describe().startswith("RMS ") and "allowed 0.02" in rms.describe()


@pytest.mark.parametrize("length", [0, 1, 5000])
def test_silence_equals_silence_and_nothing_else(length: int) -> None:
    nothing = np.zeros(length, np.float32)
    assert off(nothing, nothing) == set()
    assert off(np.ones(5000, np.float32), nothing) >= {"RMS", "peak", "mel distance"}


@pytest.mark.parametrize("name", WAVES)
def test_sound_is_as_far_from_silence_as_silence_from_sound(name: str) -> None:
    sound = WAVES[name]
    pairs = (sound, silence(sound)), (silence(sound), sound)
    one, other = (mel_distance_db(*pair, found_hz=HZ, recorded_hz=HZ) for pair in pairs)
    assert one == other > 20.0


def test_wider_limits_may_be_given() -> None:
    wave = WAVES["speech"]
    differences = compare_audio(
        1.05 * wave, wave, found_hz=HZ, recorded_hz=HZ, limits={**LIMITS, "RMS": 0.1, "peak": 0.1}
    )
    assert not any(each.is_off for each in differences)


@pytest.mark.parametrize(
    ("fault", "figures"),
    [
        (lambda wave: wave, set()),
        (louder, {"RMS", "peak"}),
        (cut, {"duration"}),
        (low_passed, {"spectral centroid", "mel distance"}),
    ],
    ids=["none", "gain", "length", "filter"],
)
@pytest.mark.parametrize("hz", [HZ, 48000])
def test_every_figure_is_a_row_of_the_report(
    fault: Callable[[Wave], Wave], figures: set[str], hz: int
) -> None:
    log = ComparisonLog("served", {}, tolerance=0.1, is_exact=False)
    wave = WAVES["speech"]
    log.audio("speech", compare_audio(fault(wave), wave, found_hz=hz, recorded_hz=HZ), how="alone")
    assert [each.name for each in log.comparisons] == [f"served: speech {name} (alone)" for name in LIMITS]
    failed = {each.name[15:-8] for each in log.comparisons if each.outcome == "FAIL"}
    assert failed == figures if hz == HZ else failed >= {"sample rate", "duration"}
    assert all(each.note and each.kind == "audio" for each in log.comparisons if each.outcome == "FAIL")
    assert log.summary().worst_error == 0.0, "decibels are no relative error"


@pytest.mark.parametrize("is_equal", [False, True])
def test_a_recording_that_is_no_number_is_matched_by_no_wave(is_equal: bool) -> None:
    """A damaged golden file must not pass, not even for the same damage."""
    damaged = WAVES["speech"].copy()
    damaged[1000] = np.nan
    found = damaged if is_equal else WAVES["speech"]
    off = {each.figure for each in compare_audio(found, damaged, found_hz=HZ, recorded_hz=HZ) if each.is_off}
    assert off == {"RMS", "peak", "spectral centroid", "mel distance"}


def test_a_missing_end_counts_as_silence_in_the_mel_distance() -> None:
    """A shorter wave differs from a longer one as much as with silence behind it."""
    tone = (0.5 * np.sin(2 * math.pi * 440 * np.arange(HZ) / HZ)).astype(np.float32)
    padded = np.concatenate([tone[: HZ // 2], np.zeros(HZ // 2, np.float32)])
    for found, recorded in ((tone[: HZ // 2], tone), (tone, tone[: HZ // 2])):
        distance = mel_distance_db(found, recorded, found_hz=HZ, recorded_hz=HZ)
        other = mel_distance_db(
            *(padded if len(wave) < HZ else wave for wave in (found, recorded)), found_hz=HZ, recorded_hz=HZ
        )
        assert distance == other > 5.0
    assert mel_distance_db(tone, tone, found_hz=HZ, recorded_hz=HZ) == 0.0


def test_figures_of_a_tone_are_those_of_the_textbook() -> None:
    """0.5 s at 16 kHz of a sine of 1,000 Hz with amplitude 0.4, and one of 2,000 Hz with 0.2 at twice the rate."""
    one = 0.4 * np.sin(2 * np.pi * 1000 * np.arange(8000) / 16000)
    other = 0.2 * np.sin(2 * np.pi * 2000 * np.arange(32000) / 32000)
    figures = {each.figure: each for each in compare_audio(one, other, found_hz=16000, recorded_hz=32000)}
    expected = {
        "sample rate": (16000, 32000),
        "duration": (0.5, 1.0),
        "RMS": (0.4 / 2**0.5, 0.2 / 2**0.5),
        "peak": (0.4, 0.2),
        "spectral centroid": (1000, 2000),
    }
    for name, (found, recorded) in expected.items():
        figure = figures[name]
        assert figure.found == pytest.approx(found, rel=2e-3), name
        assert figure.recorded == pytest.approx(recorded, rel=2e-3), name
        assert figure.difference == pytest.approx(abs(found - recorded) / recorded, rel=1e-2), name
        assert figure.limit == LIMITS[name] and figure.is_off  # type: ignore[index]


@pytest.mark.parametrize("decibels", [0.1, 3.0, -6.0])
def test_the_mel_distance_of_a_louder_wave_is_its_gain(decibels: float) -> None:
    """In white noise all bands are within 60 dB of the loudest one."""
    noise = np.random.default_rng(1).standard_normal(16000)
    distance = mel_distance_db(noise * 10 ** (decibels / 20), noise, found_hz=16000, recorded_hz=16000)
    assert distance == pytest.approx(abs(decibels), rel=1e-6)


def test_bands_60_db_below_the_loudest_one_count_alike() -> None:
    tone = np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)
    hiss = np.random.default_rng(1).standard_normal(16000)
    quiet = mel_distance_db(tone + 1e-6 * hiss, tone, found_hz=16000, recorded_hz=16000)
    loud = mel_distance_db(tone + 1e-2 * hiss, tone, found_hz=16000, recorded_hz=16000)
    assert quiet < 0.01 and loud > 3


def test_values_that_are_no_numbers_are_infinitely_far() -> None:
    wave = np.ones(1000)
    for one, other in ((wave * np.nan, wave), (wave, wave * np.inf)):
        assert mel_distance_db(one, other, found_hz=16000, recorded_hz=16000) == math.inf


def test_the_recording_decides_what_is_quiet() -> None:
    """Sounds that are 60 dB louder differ by 60 dB in every band, also in those 60 dB below the loud one."""
    noise = np.random.default_rng(2).standard_normal(HZ).astype(np.float32)
    assert mel_distance_db(1000 * noise, noise, found_hz=HZ, recorded_hz=HZ) == pytest.approx(60, abs=0.1)


def test_a_tone_has_no_power_far_from_it() -> None:
    """Side lobes of the window would be bands of their own."""
    (power,) = power_spectra(np.sin(2 * math.pi * 1010 * np.arange(HZ) / HZ), HZ)
    assert power[5, 300:].max() < 1e-10 * power[5].max()
