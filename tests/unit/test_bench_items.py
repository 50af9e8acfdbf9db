"""What `mingc bench` sends, and how it counts sound."""

from __future__ import annotations

import io
import json
import wave

import numpy as np
import pytest
import soundfile

from mingc.bench.items import Synthetic
from mingc.bench.paths import PATHS
from mingc.bench.sound import Sound, read, wav

SOURCE = Synthetic(seed=7, words=30, picture_pixels=32, clip_s=1.0)


@pytest.mark.parametrize("path", PATHS)
def test_items_are_unique_and_the_same_again(path: str) -> None:
    items = [SOURCE.item(path, index) for index in range(60)]
    contents = [(json.dumps(each.messages), each.text, each.clip) for each in items]
    assert len({*contents}) == len({each.id for each in items}) == 60
    assert items[:2] == [SOURCE.item(path, index) for index in range(2)]
    other = Synthetic(seed=8, words=30, picture_pixels=32, clip_s=1.0).item(path, 0)
    assert (json.dumps(other.messages), other.text, other.clip) not in contents


def test_prompts_differ_from_their_beginning_on_in_two_languages() -> None:
    """A prefix cache keeps pages of 16 tokens: no two prompts share the first."""
    numbers = [SOURCE.item(path, index).text.split()[1] if path == "picture" else
               SOURCE.item(path, index).messages[0]["content"].split()[1]
               for path in ("text", "picture", "spoken") for index in range(0, 4000, 2)]  # fmt: skip
    assert len({*numbers}) == 6000, "of some thousand random ones, two would be equal"
    prompts = [SOURCE.item("text", index).messages[0]["content"] for index in range(200)]
    assert len({each[:16] for each in prompts}) == 200
    assert [each.isascii() for each in prompts] == [True, False] * 100
    assert all(20 <= len(each.split()) <= 45 for each in prompts[::2])


def test_a_clip_is_speech_and_a_picture_a_picture() -> None:
    item = SOURCE.item("transcription", 0)
    samples, rate = soundfile.read(io.BytesIO(item.clip))
    assert rate == 16_000 and 1.0 <= len(samples) / rate < 4.0 and 0.05 < np.abs(samples).max() <= 0.95
    assert item.expected is not None and item.expected.endswith(("short.", "second one.", "Goodbye."))
    parts = SOURCE.item("image", 0).messages[0]["content"]
    assert [each["type"] for each in parts] == ["image_url", "text"]


def _file(rate: int, width: int, channels: int, frames: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setparams((channels, width, rate, frames, "NONE", ""))
        writer.writeframes(bytes(frames * width * channels))
    return file.getvalue()


@pytest.mark.parametrize("step", [1, 7, 45, 10**6])
@pytest.mark.parametrize(("rate", "width", "channels"), [(44_100, 2, 1), (24_000, 3, 1), (8_000, 1, 2)])
def test_a_file_is_counted_however_it_is_cut(rate: int, width: int, channels: int, step: int) -> None:
    file = (
        _file(rate, width, channels, 1000) + b"LIST\x04\0\0\0name"
    )  # what follows the samples does not count
    sound = Sound(1)
    for begin in range(0, len(file), step):
        sound.feed(file[begin : begin + step], float(begin))
    assert (sum(sound.frames), sound.header_rate) == (1000, rate) and len(sound.times) == len(sound.frames)


def test_raw_samples_and_files_in_pieces_are_counted() -> None:
    raw, pieces = Sound(24_000), Sound(24_000)
    for data in (b"\0" * 5, b"\1" * 4, b"\2"):
        raw.feed(data, 0.0)
    assert (raw.frames, raw.header_rate, sum(raw.frames)) == ([2, 2, 1], None, 5)
    for _ in range(3):
        pieces.feed(_file(44_100, 2, 1, 10), 0.0)
    assert (pieces.frames, pieces.header_rate) == ([10, 10, 10], 44_100)
    for length in (b"\xff\xff\xff\xff", b"\0\0\0\0"):  # a stream does not know its length
        endless = Sound(24_000)
        header = bytearray(_file(44_100, 2, 1, 0))
        header[36:44] = b"LIST\x03\0\0\0abc\0data" + length  # a chunk of an odd length is padded
        endless.feed(bytes(header) + b"\0" * 8, 0.0)
        endless.feed(b"\0" * 8, 1.0)
        assert endless.frames == [4, 4] and endless.header_rate == 44_100
    assert len({raw.digest, pieces.digest, endless.digest, Sound(1).digest}) == 4
    with pytest.raises(ValueError, match="wanted WAV or PCM"):
        Sound(24_000).feed(b"OggS" + bytes(100), 0.0)


def test_files_are_written_as_they_are_read() -> None:
    samples = np.linspace(-1, 1, 2001, dtype=np.float32)
    found, rate = read(wav(samples, 22_050))
    assert rate == 22_050 and np.abs(found - samples).max() < 1e-4
