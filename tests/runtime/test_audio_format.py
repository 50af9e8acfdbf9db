"""Audio encoding: every format against another decoder; rates, tempos, and streams that join to one valid file."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import io
import math
import wave
from collections.abc import Sequence

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from mingc.server.audio_format import (
    RATES,
    AudioFormat,
    AudioSpec,
    Base64Groups,
    ClipEncoder,
    ClipFile,
    SampleConverter,
    default_rate,
    to_pcm16,
    wav_header,
)
from mingc.server.http.clips import KeptClip, LiveClip

RATE = 44100
PATCH = 14112
FORMATS: tuple[AudioFormat, ...] = ("wav", "pcm16", "flac", "mp3", "opus", "aac", "pcmu", "pcma")
EXACT = FORMATS[:3]
STREAMED: tuple[AudioFormat, ...] = ("wav", "pcm16", "mp3", "opus", "aac", "pcmu", "pcma")
Samples = NDArray[np.float32]


def spec(
    audio_format: AudioFormat, rate: int = RATE, *, speed: float = 1.0, source: int | None = None
) -> AudioSpec:
    return AudioSpec(format=audio_format, sample_rate=rate, source_rate=source, speed=speed)


def chunks(*lengths: int) -> list[Samples]:
    generator = np.random.default_rng(0)
    return [generator.uniform(-0.9, 0.9, n).astype(np.float32) for n in lengths]


def tone(frequency: float, seconds: float, rate: int = RATE) -> Samples:
    return (0.4 * np.sin(2 * np.pi * frequency * np.arange(int(seconds * rate)) / rate)).astype(np.float32)


def voice(seconds: float) -> Samples:
    """Harmonics below 2 kHz whose pitch and loudness vary as in speech."""
    time = np.arange(int(seconds * RATE)) / RATE
    phase = 2 * np.pi * np.cumsum(140 + 40 * np.sin(2 * np.pi * 1.7 * time)) / RATE
    sound = sum(np.sin(k * phase) / k for k in range(1, 12))
    return (0.15 * sound * (1.1 + np.sin(2 * np.pi * 2.9 * time))).astype(np.float32)


def pieces_of(samples: Samples, size: int = PATCH) -> list[Samples]:
    return [samples[start : start + size] for start in range(0, len(samples), size)]


def encode(pieces: Sequence[Samples], spec: AudioSpec) -> bytes:
    """A whole clip."""
    file = io.BytesIO()
    clip = ClipFile(spec, file)
    for piece in pieces:
        clip.add(piece)
    assert clip.finish() == len(file.getvalue())
    data = file.read()
    clip.close()
    return data


def stream(pieces: Sequence[Samples], spec: AudioSpec) -> list[bytes]:
    """A clip as it is sent: one part for each piece, and the rest."""

    async def run() -> list[bytes]:
        clip = LiveClip(spec)
        parts = [await clip.add(piece) for piece in pieces]
        parts.append(b"".join([part async for part in clip.rest()]))
        clip.close()
        return parts

    return asyncio.run(run())


def read(data: bytes, audio_format: AudioFormat) -> tuple[NDArray[np.float64], int]:
    """Samples and rate by libsndfile, AAC by FFmpeg; a raw clip has no rate."""
    if audio_format == "pcm16":
        return np.frombuffer(data, dtype="<i2") / 32767, 0
    if audio_format in ("pcmu", "pcma"):
        subtype = "ULAW" if audio_format == "pcmu" else "ALAW"
        raw = {"channels": 1, "samplerate": 8000, "format": "RAW", "subtype": subtype}
        return soundfile.read(io.BytesIO(data), **raw)
    if audio_format != "aac":
        samples, rate = soundfile.read(io.BytesIO(data))
        return samples, rate
    with av.open(io.BytesIO(data), "r") as container:
        frames = list(container.decode(audio=0))
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]), frames[0].sample_rate


def offset_of(found: NDArray[np.float64], expected: NDArray[np.float64]) -> tuple[int, float]:
    """Where `expected` begins in `found`, and how much of its power is there."""
    size = len(found) + len(expected)
    product = np.fft.irfft(np.fft.rfft(found, size) * np.conj(np.fft.rfft(expected, size)), size)
    offset = int(product.argmax())
    part = found[offset : offset + len(expected)]
    noise = part - expected[: len(part)]
    return offset, 1 - float(np.sum(noise**2) / np.sum(expected**2))


def frequency_of(samples: NDArray[np.floating], rate: int) -> float:
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return int(power.argmax()) * rate / len(samples)


@pytest.mark.parametrize("audio_format", EXACT)
def test_whole_and_streamed_files_have_the_same_samples(audio_format: AudioFormat) -> None:
    pieces = chunks(14112, 14112, 5, 9000)
    whole = encode(pieces, spec(audio_format))
    for data in [whole] if audio_format == "flac" else [whole, b"".join(stream(pieces, spec(audio_format)))]:
        samples, _ = read(data, audio_format)
        scale = 32767 if audio_format == "pcm16" else 32768
        np.testing.assert_array_equal(np.rint(samples * scale), to_pcm16(np.concatenate(pieces)))


@pytest.mark.parametrize(
    ("audio_format", "rate"),
    [(each, rate) for each in RATES for rate in RATES[each] if rate >= 8000],
)
def test_compressed_clips_sound_like_the_speech(audio_format: AudioFormat, rate: int) -> None:
    """Their length differs by less than the codec's delay and last frame; Opus declares both."""
    speech = voice(2.0)
    audio = spec(audio_format, rate, source=RATE)
    found, found_rate = read(encode(pieces_of(speech), audio), audio_format)
    assert found_rate == rate
    expected = SampleConverter(spec("wav", rate, source=RATE)).add(speech, is_last=True)
    offset, likeness = offset_of(found, expected.astype(np.float64))
    longest = {"opus": 0, "mp3": 1105 + 1152, "aac": 2048, "pcmu": 0, "pcma": 0}[audio_format]
    assert 0 <= len(found) - len(expected) <= longest
    assert offset <= longest and likeness > 0.97


@pytest.mark.parametrize("audio_format", STREAMED)
def test_every_patch_gives_bytes_at_once(audio_format: AudioFormat) -> None:
    """Most of a patch of 0.25 s can be heard before the next arrives; LAME has the longest delay."""
    audio = spec(audio_format, default_rate(audio_format, RATE), source=RATE)
    parts = stream([voice(0.25), *pieces_of(voice(0.96))], audio)
    assert all(parts[:-1])
    heard, rate = read(parts[0], audio_format)
    assert len(heard) / (rate or 24000) > 0.15


def test_parts_join_to_the_whole() -> None:
    """For every way to cut the speech, in every format, rate and tempo."""
    speech = voice(0.6)

    @settings(max_examples=25, deadline=None)
    @given(
        cuts=st.lists(st.integers(0, len(speech)), max_size=8).map(sorted),
        audio_format=st.sampled_from(STREAMED),
        rate=st.sampled_from([24000, 48000]),
        speed=st.sampled_from([1.0, 0.7, 2.5]),
    )
    def check(cuts: list[int], audio_format: AudioFormat, rate: int, speed: float) -> None:
        if audio_format in ("pcmu", "pcma"):
            rate = 8000
        audio = spec(audio_format, rate, source=RATE, speed=speed)
        whole = encode([speech], audio)
        parts = b"".join(stream(np.split(speech, cuts), audio))
        if audio_format == "wav":  # whose header has the length only when it is whole
            whole, parts = whole[44:], parts[44:]
        assert parts == whole

    check()


@settings(max_examples=60, deadline=None)
@given(
    num_samples=st.integers(0, 50_000),
    source=st.sampled_from([16000, 24000, 44100]),
    rate=st.sampled_from([8000, 11025, 16000, 24000, 32000, 44100, 47999, 48000]),
    speed=st.one_of(st.just(1.0), st.floats(0.25, 4.0)),
)
def test_no_sample_is_lost_and_none_is_added(num_samples: int, source: int, rate: int, speed: float) -> None:
    sound = tone(200, 4.0, source)[:num_samples]
    audio = spec("pcm16", rate, source=source, speed=speed)
    stretched = math.floor(num_samples / speed + 0.5)
    data = b"".join(stream(pieces_of(sound, 7001), audio))
    # Rounded; of two that are as near, soxr gives either.
    assert abs(len(data) * source - 2 * stretched * rate) <= source


@pytest.mark.parametrize("rate", [8000, 24000, 48000])
def test_another_rate_has_the_same_wave(rate: int) -> None:
    samples, _ = read(encode(pieces_of(tone(1000, 1.0)), spec("pcm16", rate, source=RATE)), "pcm16")
    expected = tone(1000, 1.0, rate)
    inside = slice(rate // 20, -rate // 20)  # the filter rings at both ends
    np.testing.assert_allclose(samples[inside], expected[inside], atol=2e-3)


@pytest.mark.parametrize("speed", [0.25, 0.4, 0.5, 0.9, 1.25, 2.0, 3.0, 4.0])
def test_another_tempo_keeps_the_pitch_and_moves_every_sound(speed: float) -> None:
    silence = np.zeros(RATE // 2, np.float32)
    sound = np.concatenate([silence, tone(330, 0.5), silence, tone(330, 1.0), silence])
    samples, rate = read(encode(pieces_of(sound), spec("wav", speed=speed)), "wav")
    assert len(samples) == math.floor(len(sound) / speed + 0.5)
    assert frequency_of(samples, rate) == pytest.approx(330, rel=0.01)
    loud = np.convolve(np.abs(samples), np.ones(400) / 400, "same") > 0.1
    edges = np.flatnonzero(np.diff(loud.astype(int))) / rate * speed
    # A window of the filter has 46 ms.
    np.testing.assert_allclose([edges[0], edges[-1]], [0.5, 2.5], atol=0.05 * max(1, speed))
    assert np.abs(samples[loud]).max() == pytest.approx(0.4, rel=0.1)


def test_a_flac_file_has_its_length_and_checksum() -> None:
    pieces = chunks(14112, 14112, 5, 9000)
    data = encode(pieces, spec("flac"))
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(samples, to_pcm16(np.concatenate(pieces)))
    assert data[26:42] == hashlib.md5(samples.astype("<i2").tobytes()).digest()  # RFC 9639 §8.2


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_base64_in_pieces_joins_to_base64_of_the_whole(pieces: list[bytes]) -> None:
    groups = Base64Groups()
    parts = [base64.b64encode(part) for part in (*[groups.add(piece) for piece in pieces], groups.finish())]
    assert b"".join(parts) == base64.b64encode(b"".join(pieces))
    assert not any(b"=" in part for part in parts[:-1])


@pytest.mark.parametrize("audio_format", FORMATS)
def test_a_clip_that_is_dropped_prints_nothing_and_is_freed(
    audio_format: AudioFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also when its request is cancelled while the encoder runs. FFmpeg's objects would wait for the collector."""

    def count() -> int:
        # Objects created since `gc.collect`. By type: a deprecated name of torch warns when code asks for its class.
        return sum(issubclass(type(each), av.container.OutputContainer) for each in gc.get_objects(0))

    async def leave(clip: KeptClip | LiveClip) -> None:
        for piece in chunks(*[14112] * 12):
            await clip.add(piece)
        task = asyncio.ensure_future(clip.add(chunks(5 * RATE)[0]))
        await asyncio.sleep(0)
        task.cancel()
        clip.close()
        for _ in range(1000):
            if count() == before:
                return
            await asyncio.sleep(0.01)

    gc.collect()
    gc.disable()
    try:
        before = count()
        asyncio.run(leave(KeptClip(spec(audio_format, 48000, source=RATE), lambda _: None)))
        if audio_format != "flac":
            asyncio.run(leave(LiveClip(spec(audio_format, 48000, source=RATE))))
        assert count() == before
    finally:
        gc.enable()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("audio_format", FORMATS)
def test_no_clip_is_larger_than_planned(audio_format: AudioFormat) -> None:
    noise = chunks(*[PATCH] * 20)
    for speed in (1.0, 0.5, 2.0):
        audio = spec(audio_format, default_rate(audio_format, RATE), source=RATE, speed=speed)
        assert len(encode(noise, audio)) <= audio.most_bytes(20 * PATCH) + 4096


@pytest.mark.parametrize("audio_format", ["wav", "flac"])
@pytest.mark.parametrize("rate", [16000, 24000, 44100])
def test_the_header_has_the_rate_and_length(audio_format: AudioFormat, rate: int) -> None:
    with soundfile.SoundFile(io.BytesIO(encode(chunks(1000, 234), spec(audio_format, rate)))) as file:
        assert (file.samplerate, file.channels, file.frames, file.subtype) == (rate, 1, 1234, "PCM_16")


def test_a_streamed_wav_is_read_by_soundfile_and_by_the_standard_library() -> None:
    pieces = chunks(14112, 100)
    data = b"".join(stream(pieces, spec("wav")))
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(samples, to_pcm16(np.concatenate(pieces)))
    with wave.open(io.BytesIO(data)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getsampwidth()) == (RATE, 1, 2)


@pytest.mark.parametrize("rate", [16000, 44100])
@pytest.mark.parametrize("lengths", [(), (1,), (14112, 100)])
def test_a_wav_file_has_the_bytes_that_the_standard_library_writes(
    rate: int, lengths: tuple[int, ...]
) -> None:
    pieces = chunks(*lengths)
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(rate)
        writer.writeframes(b"".join(to_pcm16(piece).tobytes() for piece in pieces))
    assert encode(pieces, spec("wav", rate)) == file.getvalue()
    # A stream differs in its two lengths only, which are the largest number.
    streamed = b"".join(stream(pieces, spec("wav", rate)))
    whole, unknown = file.getvalue(), b"\xff" * 4
    assert streamed == whole[:4] + unknown + whole[8:40] + unknown + whole[44:]


@pytest.mark.parametrize("length", [1, 4607, 4608, 4609, 9300])
def test_the_last_samples_of_a_flac_file_are_in_it(length: int) -> None:
    """FFmpeg encodes blocks of 4,608 samples and keeps the rest until the file is closed."""
    (piece,) = chunks(length)
    samples, _ = soundfile.read(io.BytesIO(encode([piece], spec("flac"))), dtype="int16")
    np.testing.assert_array_equal(samples, to_pcm16(piece))


def test_no_samples_give_a_valid_file() -> None:
    assert not any(encode([], spec(each, 48000)) for each in ("pcm16", "mp3", "opus", "aac"))
    assert not encode([], spec("pcmu", 8000, source=RATE))
    assert soundfile.info(io.BytesIO(encode([], spec("wav")))).frames == 0
    assert stream([], spec("wav")) == [wav_header(RATE, None)]
    with av.open(io.BytesIO(encode([], spec("flac"))), "r") as container:
        assert container.streams.audio[0].rate == RATE


def test_samples_outside_the_range_are_clipped() -> None:
    samples = np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0], dtype=np.float32)
    assert to_pcm16(samples).tolist() == [-32767, -32767, 0, 16384, 32767, 32767]


def test_the_default_rate_loses_nothing_that_the_format_can_keep() -> None:
    found = {
        source: [default_rate(each, source) for each in FORMATS] for source in (16000, 24000, 44100, 96000)
    }
    # wav, pcm16 (always 24 kHz), flac, mp3, opus, aac, pcmu, pcma
    assert found == {
        16000: [16000, 24000, 16000, 16000, 16000, 16000, 8000, 8000],
        24000: [24000, 24000, 24000, 24000, 24000, 24000, 8000, 8000],
        44100: [44100, 24000, 44100, 44100, 48000, 44100, 8000, 8000],
        96000: [96000, 24000, 96000, 48000, 48000, 48000, 8000, 8000],
    }


def test_the_content_type_of_raw_pcm_has_the_rate() -> None:
    assert spec("pcm16").content_type == "audio/pcm;rate=44100;channels=1"
    assert spec("flac").content_type == "audio/flac"


def test_an_encoder_may_be_closed_at_any_time() -> None:
    for audio_format in STREAMED:
        encoder = ClipEncoder(spec(audio_format, 48000))
        encoder.close()
        encoder = ClipEncoder(spec(audio_format, 48000))
        encoder.add(voice(0.1))
        encoder.close()
        encoder.close()
