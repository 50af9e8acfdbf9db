"""Audio encoding: headers, equal samples in all formats, streams that join to one valid file."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import io
import wave
from collections.abc import Sequence

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from mingc.server.audio_format import (
    AudioFormat,
    AudioSpec,
    Base64Stream,
    ClipFile,
    to_pcm16,
    wav_header,
)
from mingc.server.http.clips import KeptClip, LiveClip

RATE = 44100
FORMATS: tuple[AudioFormat, ...] = ("wav", "pcm16", "flac")


def spec(audio_format: AudioFormat, rate: int = RATE) -> AudioSpec:
    return AudioSpec(format=audio_format, sample_rate=rate)


def chunks(*lengths: int) -> list[NDArray[np.float32]]:
    generator = np.random.default_rng(0)
    return [generator.uniform(-0.9, 0.9, n).astype(np.float32) for n in lengths]


def encode(pieces: Sequence[NDArray[np.float32]], spec: AudioSpec) -> bytes:
    """A whole clip."""
    file = io.BytesIO()
    clip = ClipFile(spec, file)
    for piece in pieces:
        clip.add(to_pcm16(piece))
    assert clip.finish() == len(file.getvalue())
    return file.read()


def stream(pieces: Sequence[NDArray[np.float32]], spec: AudioSpec) -> list[bytes]:
    """A clip as it is sent: one part for each piece, and the rest."""

    async def run() -> list[bytes]:
        clip = LiveClip(spec)
        parts = [await clip.add(piece) for piece in pieces]
        return [*parts, b"".join([part async for part in clip.rest()])]

    return asyncio.run(run())


def read(data: bytes, audio_format: AudioFormat) -> NDArray[np.int16]:
    if audio_format == "pcm16":
        return np.frombuffer(data, dtype="<i2")
    with av.open(io.BytesIO(data), "r") as container:
        frames = list(container.decode(audio=0))
    assert {frame.sample_rate for frame in frames} <= {RATE}
    return np.concatenate([frame.to_ndarray().reshape(-1) for frame in frames]).astype(np.int16)


@pytest.mark.parametrize("audio_format", FORMATS)
def test_whole_and_streamed_files_have_the_same_samples(audio_format: AudioFormat) -> None:
    pieces = chunks(14112, 14112, 5, 9000)
    expected = to_pcm16(np.concatenate(pieces))
    if audio_format != "flac":
        np.testing.assert_array_equal(
            read(b"".join(stream(pieces, spec(audio_format))), audio_format), expected
        )
    np.testing.assert_array_equal(read(encode(pieces, spec(audio_format)), audio_format), expected)


@pytest.mark.parametrize("audio_format", ["wav", "pcm16"])
def test_every_patch_gives_bytes_at_once(audio_format: AudioFormat) -> None:
    assert all(stream(chunks(14112, 14112, 14112), spec(audio_format))[:-1])


def test_a_flac_file_has_its_length_and_checksum() -> None:
    pieces = chunks(14112, 14112, 5, 9000)
    data = encode(pieces, spec("flac"))
    samples, rate = soundfile.read(io.BytesIO(data), dtype="int16")
    assert rate == RATE
    np.testing.assert_array_equal(samples, to_pcm16(np.concatenate(pieces)))
    assert data[26:42] == hashlib.md5(samples.astype("<i2").tobytes()).digest()  # RFC 9639 §8.2


@given(st.lists(st.binary(max_size=20), max_size=12))
def test_base64_in_pieces_joins_to_base64_of_the_whole(pieces: list[bytes]) -> None:
    encoder = Base64Stream()
    parts = [*[encoder.add(piece) for piece in pieces], encoder.finish()]
    assert "".join(parts) == base64.b64encode(b"".join(pieces)).decode()
    assert b"".join(base64.b64decode(part, validate=True) for part in parts) == b"".join(pieces)
    assert not any("=" in part for part in parts[:-1])


@pytest.mark.parametrize("audio_format", FORMATS)
def test_a_clip_that_is_dropped_prints_nothing(
    audio_format: AudioFormat, capfd: pytest.CaptureFixture[str]
) -> None:
    """An encoder that ends after its file reports every call of libsndfile on stderr."""

    async def leave() -> None:
        clip = KeptClip(spec(audio_format), lambda _: None)
        for piece in chunks(*[14112] * 12):
            await clip.add(piece)
        clip.close()

    asyncio.run(leave())
    gc.collect()
    assert capfd.readouterr().err == ""


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


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 9000])
def test_the_last_samples_of_a_flac_file_are_in_it(length: int) -> None:
    """libsndfile encodes blocks of 4,096 samples and keeps the rest until the file is closed."""
    (piece,) = chunks(length)
    np.testing.assert_array_equal(read(encode([piece], spec("flac")), "flac"), to_pcm16(piece))


def test_no_samples_give_a_valid_file() -> None:
    assert encode([], spec("pcm16")) == b""
    assert soundfile.info(io.BytesIO(encode([], spec("wav")))).frames == 0
    assert stream([], spec("wav")) == [wav_header(RATE, None)]
    with av.open(io.BytesIO(encode([], spec("flac"))), "r") as container:
        assert container.streams.audio[0].rate == RATE


@pytest.mark.parametrize("rate", [16000, 44100])
def test_a_flac_file_without_samples_describes_them_as_libsndfile_does(rate: int) -> None:
    """RFC 9639 §8.2: rate (20 bits), channels - 1 (3) and bits of a sample - 1 (5) begin at byte 10 of STREAMINFO."""
    start = len(b"fLaC") + 4 + 10
    empty, full = (encode(pieces, spec("flac", rate)) for pieces in ([], chunks(100)))
    described = [int.from_bytes(data[start : start + 4], "big") >> 4 for data in (empty, full)]
    assert described == [rate << 8 | 0 << 5 | 15] * 2


def test_samples_outside_the_range_are_clipped() -> None:
    samples = np.array([-2.0, -1.0, 0.0, 0.5, 1.0, 3.0], dtype=np.float32)
    assert to_pcm16(samples).tolist() == [-32767, -32767, 0, 16384, 32767, 32767]


def test_the_content_type_of_raw_pcm_has_the_rate() -> None:
    assert spec("pcm16").content_type == "audio/pcm;rate=44100;channels=1"
    assert spec("flac").content_type == "audio/flac"
