"""Figures of sounds, compared with signals whose loudness, pitch and distances are known."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from mingc.audit.comparison import faults
from mingc.audit.measures import (
    Embed,
    Measured,
    aligned_distance_db,
    clipped_share,
    f0_hz,
    loudness_lufs,
    mel_levels_db,
    pauses_s,
)
from mingc.audit.sounds import Sound, encode_mp3, read_sound
from mingc.errors import ConfigError
from mingc.media.dsp.audio_comparison import centroid_hz, peak

Wave = NDArray[np.float32]
HZ = 24_000


def sine(frequency: float, seconds: float, *, dbfs: float = -20.0, hz: int = HZ) -> Wave:
    time = np.arange(round(seconds * hz)) / hz
    return (10 ** (dbfs / 20) * np.sin(2 * math.pi * frequency * time)).astype(np.float32)


def voice(frequency: float, seconds: float, *, hz: int = HZ) -> Wave:
    """Harmonics of a pitch, at a sixth of full scale."""
    return sum((sine(frequency * k, seconds, hz=hz) / k for k in range(1, 9)), np.float32(0))


def speech(hz: int = HZ) -> Wave:
    """Syllables of several pitches with pauses."""
    parts = [
        np.concatenate([voice(f, 0.2, hz=hz), np.zeros(hz // 20, np.float32)])
        for f in (120, 180, 140, 220, 160)
    ]
    return np.concatenate(parts)


@pytest.mark.parametrize("hz", [16_000, 24_000, 44_100, 48_000])
@pytest.mark.parametrize("level", [-20.0, -33.0])
def test_loudness_is_that_of_ebu_tech_3341(hz: int, level: float) -> None:
    """Its first two signals, 1 kHz at -23 and -33 dBFS in both channels, have that loudness: 3 dB less in one."""
    assert loudness_lufs(sine(1000, 5, dbfs=level, hz=hz), hz) == pytest.approx(level - 3.0, abs=0.1)


def test_loudness_ignores_silence_by_its_gates_and_has_no_value_for_silence() -> None:
    """Signal 3 of EBU Tech 3341: 10 s at -36, 60 s at -23, 10 s at -36 dBFS in both channels, shortened."""
    quiet, loud = sine(1000, 2, dbfs=-33), sine(1000, 12, dbfs=-20)
    assert loudness_lufs(np.concatenate([quiet, loud, quiet]), HZ) == pytest.approx(-23.0, abs=0.2)
    assert loudness_lufs(np.zeros(HZ, np.float32), HZ) is None
    assert loudness_lufs(sine(1000, 0.3), HZ) is None


@pytest.mark.parametrize("hz", [16_000, 44_100])
@pytest.mark.parametrize("frequency", [65.0, 110.0, 220.0, 440.0, 490.0])
def test_pitch_is_that_of_the_signal(frequency: float, hz: int) -> None:
    found = f0_hz(voice(frequency, 1, hz=hz), hz)
    assert len(found) > 90 and np.abs(found / frequency - 1).max() < 2e-3


def test_pitch_follows_a_glide_and_noise_has_none() -> None:
    time = np.arange(3 * HZ) / HZ
    phase = 2 * math.pi * (100 * time + 25 * time**2)  # 100 to 250 Hz
    glide = (0.1 * sum(np.sin(k * phase) / k for k in range(1, 6))).astype(np.float32)
    found = f0_hz(glide, HZ)
    expected = 100 + 50 * np.linspace(0.02, 2.97, len(found))
    assert np.abs(found / expected - 1).max() < 0.02
    assert len(f0_hz(np.random.default_rng(0).standard_normal(HZ).astype(np.float32), HZ)) == 0
    assert len(f0_hz(np.zeros(HZ, np.float32), HZ)) == 0
    measured = Measured(sound=Sound(name="glide", utterance="", samples=glide, hz=HZ))
    tenth, ninetieth = np.percentile(expected, [10, 90])
    assert measured.f0_range_semitones == pytest.approx(12 * math.log2(ninetieth / tenth), abs=0.1)


def distance(one: Wave, other: Wave, *, hz: int = HZ, other_hz: int = HZ) -> float:
    return aligned_distance_db(mel_levels_db(one, hz), mel_levels_db(other, other_hz))


def test_equal_sounds_have_distance_zero_and_noise_adds_to_it() -> None:
    wave = speech()
    noise = np.random.default_rng(3).standard_normal(len(wave)).astype(np.float32)
    found = [distance(wave, wave + level * noise) for level in (0, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2)]
    assert found[0] == 0.0 and found == sorted(found) and found[1] > 0.0
    assert distance(wave, 0.5 * wave) < 1e-3, "loudness is a figure of its own"
    assert distance(speech(44_100), wave, hz=44_100) < 1.0, "so is the rate"


def test_the_alignment_forgives_pace_but_not_order() -> None:
    wave = speech()
    paused = np.concatenate([wave[: HZ // 2], np.zeros(HZ // 4, np.float32), wave[HZ // 2 :]])
    slower = np.concatenate(
        [np.concatenate([voice(f, 0.3), np.zeros(HZ // 20, np.float32)]) for f in (120, 180, 140, 220, 160)]
    )
    for other in (paused, slower):
        assert distance(wave, other) < 3.0 < distance(wave, wave[::-1].copy())


def test_the_alignment_is_the_best_of_all() -> None:
    """The total of the dynamic programme, written as loops, over the length of its way."""
    draw = np.random.default_rng(5)
    one, other = draw.standard_normal((9, 4)), draw.standard_normal((7, 4))
    best: dict[tuple[int, int], tuple[float, int]] = {(-1, -1): (0.0, 0)}
    for i in range(9):
        for j in range(7):
            ways = [best[way] for way in ((i - 1, j - 1), (i - 1, j), (i, j - 1)) if way in best]
            total, steps = min(ways)
            best[i, j] = total + float(np.mean((one[i] - other[j]) ** 2)), steps + 1
    total, steps = best[8, 6]
    assert aligned_distance_db(one, other) == pytest.approx(math.sqrt(total / steps), rel=1e-12)


def test_long_sounds_are_compared_in_means_of_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mingc.audit.measures._MOST_FRAMES", 4)
    one, other = np.full((10, 40), -20.0), np.full((13, 40), -20.0)
    assert aligned_distance_db(one, other) == 0.0
    assert aligned_distance_db(one, other - 3) == pytest.approx(3)


def test_clipping_counts_runs_at_full_scale() -> None:
    assert clipped_share(sine(200, 1, dbfs=-0.001)) < 0.03
    assert clipped_share(sine(200, 1, dbfs=-1)) == 0.0
    assert clipped_share(np.array([0, 1, 1, 0, -1, -1, -1, 0, 1, 0], np.float32)) == 0.3, "two are a peak"
    # A sine of twice full scale is clipped where |sin| > 1/2: two thirds of the time.
    assert clipped_share(np.clip(sine(200, 1, dbfs=6.0206), -1, 1)) == pytest.approx(2 / 3, abs=0.02)


def test_pauses_are_found_at_the_beginning_within_and_at_the_end() -> None:
    nothing, tone = np.zeros(HZ, np.float32), sine(200, 0.5)
    assert pauses_s(np.concatenate([nothing, tone, nothing[: HZ // 2], tone, nothing, nothing]), HZ) == (
        1.0,
        2.0,
    )
    assert pauses_s(nothing, HZ) == (1.0, 0.0)
    assert pauses_s(tone, HZ) == (0.0, 0.0)


def drift_of(samples: Wave, embed: Embed | None = None) -> dict[str, float]:
    return Measured(sound=Sound(name="", utterance="", samples=samples, hz=HZ), embed=embed).drift


def test_a_long_sound_that_changes_drifts() -> None:
    assert drift_of(voice(150, 15)) == pytest.approx(
        {"drift_timbre_db": 0, "drift_loudness_lu": 0, "drift_pitch_semitones": 0}, abs=0.1
    )
    changed = drift_of(np.concatenate([voice(150, 10), 2 * voice(300, 5)]))
    assert changed["drift_pitch_semitones"] == pytest.approx(12, abs=0.1) and changed["drift_timbre_db"] > 3
    assert 4 < changed["drift_loudness_lu"] < 9
    assert drift_of(voice(150, 5)) == {}, "too short"


def test_timbre_is_a_root_mean_square_of_bands_without_the_level() -> None:
    """A tone joins quieter noise: a few bands change much, which a mean would hide, and the level is no timbre."""
    noise = np.random.default_rng(1).standard_normal(15 * HZ).astype(np.float32)
    wave = 0.1 * noise
    wave[10 * HZ :] = 0.05 * noise[10 * HZ :] + sine(3000, 5)
    bands = [mel_levels_db(each, HZ).mean(axis=0) for each in (wave[: 5 * HZ], wave[10 * HZ :])]
    change = bands[1] - bands[0] - (bands[1] - bands[0]).mean()
    wanted = float(np.sqrt(np.mean(change**2)))
    assert drift_of(wave)["drift_timbre_db"] == pytest.approx(wanted, rel=1e-3)
    assert (
        np.mean(np.abs(change)) < 0.8 * wanted and np.sqrt(np.mean((bands[1] - bands[0]) ** 2)) > 1.2 * wanted
    )


@pytest.mark.parametrize("parts", [(1.0, 4.0), (4.0, 1.0)])
def test_speech_that_gets_louder_or_quieter_is_a_fault(parts: tuple[float, float]) -> None:
    wave = np.concatenate([gain * 0.3 * voice(150, 10) for gain in parts]).astype(np.float32)
    found = faults(Measured(sound=Sound(name="", utterance="", samples=wave, hz=HZ)))
    assert "drift_loudness_lu" in found["drift"]


def test_the_speaker_network_sees_drift() -> None:
    def embed(samples: Wave, hz: int) -> NDArray[np.float32]:
        return np.array([1.0, 0.0] if np.median(f0_hz(samples, hz)) < 200 else [0.0, 1.0], np.float32)

    wave = np.concatenate([voice(150, 10), voice(300, 5)])
    assert drift_of(wave, embed)["drift_speaker"] == pytest.approx(1.0)


def encoded(wave: Wave, kind: str, hz: int = HZ, channels: int = 1) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.stack([wave] * channels, axis=1), hz, format=kind)
    return file.getvalue()


@pytest.mark.parametrize(
    ("kind", "channels"),
    [("WAV", 1), ("WAV", 2), ("WAV", 8), ("FLAC", 2), ("OGG", 1), ("MP3", 1), ("MP3", 2)],
)
def test_files_are_read_with_the_rate_and_length_of_their_headers(kind: str, channels: int) -> None:
    sound = read_sound(encoded(voice(200, 2), kind, channels=channels), "x")
    assert sound.hz == HZ and sound.stated_s == (None if kind == "MP3" else pytest.approx(2, abs=0.1))
    assert peak(sound.samples) == pytest.approx(peak(voice(200, 2)), rel=0.1), "the mean of the channels"
    assert sound.duration_s == pytest.approx(2, abs=0.1)
    assert np.median(f0_hz(sound.samples, HZ)) == pytest.approx(200, rel=1e-3)


@pytest.mark.parametrize(
    ("hz", "seconds", "why"), [(1, 60, "a rate of 1 Hz"), (4_000, 61, "longer than 1 minutes")]
)
def test_no_speech_and_sounds_that_take_too_much_memory_are_refused(
    hz: int, seconds: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mingc.audit.sounds._MOST_S", 60)
    with pytest.raises(ConfigError, match=why):
        read_sound(encoded(np.zeros(hz * seconds, np.float32), "WAV", hz), "x")


def test_figures_of_a_long_sound_are_found_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    wave = speech()
    whole = f0_hz(wave, HZ), mel_levels_db(wave, HZ), centroid_hz(wave, HZ)
    monkeypatch.setattr("mingc.audit.measures._BLOCK", 7)
    monkeypatch.setattr("mingc.media.dsp.audio_comparison._BLOCK", 7)
    for one, other in zip(
        whole, (f0_hz(wave, HZ), mel_levels_db(wave, HZ), centroid_hz(wave, HZ)), strict=True
    ):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)


def test_channels_are_averaged() -> None:
    file = io.BytesIO()
    soundfile.write(
        file, np.stack([0 * voice(200, 1), voice(200, 1), voice(200, 1)], axis=1), HZ, format="WAV"
    )
    assert peak(read_sound(file.getvalue(), "x").samples) == pytest.approx(
        2 / 3 * peak(voice(200, 1)), rel=1e-3
    )


def test_a_header_may_be_wrong_or_leave_the_length_open() -> None:
    data = bytearray(encoded(voice(200, 2), "WAV"))
    cut = read_sound(bytes(data[: len(data) // 2]), "cut")
    assert cut.stated_s == pytest.approx(2.0) and cut.duration_s == pytest.approx(1.0, abs=0.01)
    place = data.index(b"data") + 4
    data[place : place + 4] = b"\xff\xff\xff\xff"
    assert read_sound(bytes(data), "open").stated_s is None
    data[place : place + 4] = (0x7FFFF000).to_bytes(4, "little")  # SoX, into a pipe
    assert read_sound(bytes(data), "open").stated_s is None
    with pytest.raises(ConfigError, match="cannot be decoded"):
        read_sound(b"no sound", "x")


def test_the_sound_of_the_page_is_the_sound() -> None:
    again = read_sound(encode_mp3(read_sound(encoded(voice(200, 2, hz=44_100), "WAV", 44_100), "x")), "y")
    assert again.hz == 24_000 and np.median(f0_hz(again.samples, again.hz)) == pytest.approx(200, rel=1e-2)
