"""Speech in files and streams, by the clip of tests/data/speech, whose sentences begin and end at known times."""

from __future__ import annotations

import io
import itertools
import re
import statistics
import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray
from preprocess_data import audio_parameters, wav

from mingc.errors import RequestError
from mingc.media import decoding
from mingc.media.audio import Wave, audio_blocks, decode_audio, wave_features
from mingc.media.decoder_pool import DecoderPool
from mingc.media.decoding import InProcessDecoder
from mingc.media.voice_activity import FRAME_SAMPLES, VoiceActivity
from mingc.prompts.media_decoder import MediaTask, SpeechReader, SpeechSegment, TurnRules

CLIP = Path(__file__).parents[1] / "data" / "speech" / "three-sentences.ogg"
SENTENCES_MS = [(500, 2118), (3118, 4644), (5444, 5953)]
LENGTH_MS = 6653
TASK = MediaTask(kind="audio", where="file", max_bytes=0, audio=audio_parameters())
RULES = TurnRules(max_ms=30_000)


@pytest.fixture(scope="module")
def pool() -> Iterator[DecoderPool]:
    pool = DecoderPool()
    yield pool
    pool.close()
    assert not pool.pids


def samples_at(rate: int) -> NDArray[np.float32]:
    samples, own = soundfile.read(CLIP, dtype="float32")
    return np.asarray(soxr.resample(samples, own, rate), np.float32)


def encoded(samples: NDArray[Any], rate: int, **options: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, rate, **options)
    return file.getvalue()


def read_all(reader: SpeechReader) -> list[SpeechSegment]:
    found: list[SpeechSegment] = []
    with closing(reader):
        while (segments := reader.read()) is not None:
            found += segments
        assert reader.read() is None
    return found


def check_times(found: list[SpeechSegment], *, offset_ms: int = 0) -> None:
    assert len(found) == len(SENTENCES_MS)
    for segment, (start, end) in zip(found, SENTENCES_MS, strict=True):
        assert abs(segment.start_ms - offset_ms - start) <= 96 and abs(segment.end_ms - offset_ms - end) <= 96
        assert segment.probability > 0.6


@pytest.mark.parametrize(
    "file",
    [
        CLIP.read_bytes(),
        encoded(samples_at(8000), 8000, format="WAV"),
        encoded(samples_at(44100), 44100, format="FLAC"),
        encoded(samples_at(44100), 44100, format="MP3"),
        encoded(np.stack([samples_at(22050)] * 2, 1), 22050, format="WAV"),
        encoded(np.stack([samples_at(16000), -samples_at(16000)], 1), 16000, format="WAV"),  # they cancel
        encoded(samples_at(16000), 16000, format="WAV")[:40] + b"\xff" * 4
        + encoded(samples_at(16000), 16000, format="WAV")[44:],  # written to a pipe: no length
    ],
    ids=["opus", "8k", "flac", "mp3", "stereo", "inverted", "pipe"],
)  # fmt: skip
def test_sentences_are_found_at_their_times(pool: DecoderPool, file: bytes) -> None:
    """The process and the same code here find the same."""
    reader = pool.read_speech(TASK, file, RULES)
    found = read_all(reader)
    check_times(found)
    whole = decode_audio(file, "file", max_seconds=10)
    blocks = [*audio_blocks(file, "file", max_seconds=10)]
    np.testing.assert_array_equal(np.concatenate([each.samples for each in blocks]), whole.samples)
    assert {each.sample_rate for each in blocks} == {whole.sample_rate}
    assert abs(reader.duration_ms - LENGTH_MS) <= 60
    for one, other in zip(found, read_all(InProcessDecoder().read_speech(TASK, file, RULES)), strict=True):
        assert (one.start_ms, one.end_ms, one.probability) == (
            other.start_ms,
            other.end_ms,
            other.probability,
        )
        np.testing.assert_array_equal(one.features.mel, other.features.mel)


def test_features_are_those_of_the_speech_with_its_padding() -> None:
    rate = 16_000
    samples = samples_at(rate)
    before = 0
    for segment in read_all(InProcessDecoder().read_speech(TASK, wav(samples, rate), RULES)):
        first, last = max(before, segment.start_ms - 300) * 16, (segment.end_ms + 200) * 16
        own = wave_features(Wave(samples=samples[first:last], sample_rate=rate), audio_parameters(), "file")
        np.testing.assert_array_equal(segment.features.mel, own.mel)
        before = segment.end_ms + 512  # sixteen frames of silence end a turn


@pytest.mark.parametrize("rate", [8000, 16000, 24000, 44100])
def test_a_stream_may_be_appended_in_any_pieces(rate: int) -> None:
    samples = samples_at(rate)
    whole = VoiceActivity(rate)
    expected = whole.push(samples) + whole.finish()
    assert len(expected) == -(-len(samples) * 16000 // rate // FRAME_SAMPLES)
    generator = np.random.default_rng(0)
    cuts = np.sort(generator.integers(0, len(samples), 200))
    activity = VoiceActivity(rate)
    pieces = [each for part in np.split(samples, cuts) for each in activity.push(part)] + activity.finish()
    np.testing.assert_allclose(pieces, expected, atol=2e-3)
    assert sum(each > 0.5 for each in expected) > 80


TIME = np.arange(20 * 16000) / 16000


@pytest.mark.parametrize(
    "samples",
    [0 * TIME, *(0.5 * np.sin(2 * np.pi * hertz * TIME) for hertz in (100, 440, 3000)),
     0.3 * np.random.default_rng(0).standard_normal(len(TIME))],
)  # fmt: skip
def test_silence_tones_and_noise_are_no_speech(samples: NDArray[Any]) -> None:
    assert not read_all(InProcessDecoder().read_speech(TASK, wav(samples.astype(np.float32), 16000), RULES))


def test_a_file_may_end_within_a_word() -> None:
    """At any place of a frame; the segment ends with it."""
    samples = samples_at(16000)
    for milliseconds in range(3500, 3900, 35):
        reader = InProcessDecoder().read_speech(TASK, wav(samples[: milliseconds * 16], 16000), RULES)
        last = read_all(reader)[-1]
        assert reader.duration_ms == milliseconds and milliseconds - 64 < last.end_ms <= milliseconds


def test_speech_without_a_pause_is_cut(pool: DecoderPool) -> None:
    sentence = samples_at(16000)[8000:33888]
    found = read_all(pool.read_speech(TASK, wav(np.tile(sentence, 12), 16000), TurnRules(max_ms=5000)))
    assert len(found) >= 4
    for one, other in itertools.pairwise(found):
        assert 2000 <= one.end_ms - one.start_ms <= 5000 and one.end_ms <= other.start_ms


def long_file(minutes: int) -> bytes:
    """FLAC, whose size does not hide what is held: the clip again and again."""
    samples = samples_at(16000)
    return encoded(np.tile(samples, minutes * 60 * 16000 // len(samples)), 16000, format="FLAC")


def high_water_kib(pid: int) -> int:
    return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])


def test_a_long_file_is_read_in_constant_memory() -> None:
    """Five minutes take what two take, in both processes, besides the file itself: 11.5 MB more as float32."""
    held = {}
    VoiceActivity(16000)  # loads the model
    for minutes in (2, 5):
        file = long_file(minutes)
        pool = DecoderPool()
        pool.start()
        (pid,) = pool.pids
        kept, peaks = [], []
        tracemalloc.start()
        reader = pool.read_speech(TASK, file, RULES)
        num_segments = 0
        while (segments := reader.read()) is not None:
            num_segments += len(segments)
            now, peak = tracemalloc.get_traced_memory()
            kept.append(now)
            peaks.append(peak)
            tracemalloc.reset_peak()
        tracemalloc.stop()
        # The median: log-mel takes 1.2 MB more for a block when its second thread gets a processor in time.
        parent = max(kept), statistics.median(peaks)
        held[minutes] = *parent, high_water_kib(pid) * 1024 - 2 * len(file)  # as received, and as bytes
        assert abs(reader.duration_ms - minutes * 60_000) < 7000
        assert num_segments == 3 * round(reader.duration_ms / LENGTH_MS)
        pool.close()
    assert held[5][0] - held[2][0] < 1 << 20
    assert held[5][1] - held[2][1] < 1 << 20
    assert held[5][2] - held[2][2] < 8 << 20


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (b"no sound", "cannot be decoded"),
        (encoded(np.zeros(0), 16000, format="WAV"), "cannot be decoded"),
        (wav(np.full(1000, np.inf, np.float32), 16000), "full scale is 1"),
        (wav(np.zeros(1000, np.float32), 500_000), "at most 384000 Hz"),
        (wav(np.zeros(1000, np.float32), 1), "at least 4000 Hz"),
    ],
)
def test_what_is_no_sound_is_refused(pool: DecoderPool, file: bytes, says: str) -> None:
    for decoder in (pool, InProcessDecoder()):
        with pytest.raises(RequestError, match=says) as caught:
            read_all(decoder.read_speech(TASK, file, RULES))
        assert caught.value.where == "file"
    assert len(pool.pids) == 1  # it takes the next file


def test_a_file_is_refused_before_it_is_read_if_it_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "MAX_STREAM_SECONDS", 6)
    with pytest.raises(RequestError, match="longer than 6 seconds"):
        InProcessDecoder().read_speech(TASK, CLIP.read_bytes(), RULES).read()


def test_a_reader_that_is_closed_ends_its_process(pool: DecoderPool) -> None:
    """At once, also while a thread waits for a block; and a reader that never read needs none."""
    pool.read_speech(TASK, CLIP.read_bytes(), RULES).close()
    before = {*pool.pids}
    reader = pool.read_speech(TASK, long_file(1), RULES)
    assert reader.read() is not None
    reader.close()
    reader.close()
    assert not before & {*pool.pids}
    check_times(read_all(pool.read_speech(TASK, CLIP.read_bytes(), RULES)))


def test_a_reader_may_be_closed_on_another_thread() -> None:
    pool = DecoderPool()
    reader = pool.read_speech(TASK, long_file(10), RULES)
    ended: list[BaseException | None] = []

    def read() -> None:
        try:
            read_all(reader)
            ended.append(None)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    while not reader.duration_ms:
        assert thread.is_alive()
    reader.close()
    thread.join(30)
    assert len(ended) == 1
    pool.close()
    assert not pool.pids


def test_a_process_that_is_killed_at_the_start_is_replaced_once(pool: DecoderPool) -> None:
    reader: Any = pool.read_speech(TASK, CLIP.read_bytes(), RULES)
    first = reader.next_block
    pool.start()
    decoder = pool.take()
    pool.give_back(decoder)
    begin = decoder.begin

    def killed(*arguments: Any) -> None:
        begin(*arguments)
        decoder.process.kill()

    decoder.begin = killed  # type: ignore[method-assign]
    assert first is not None
    check_times(read_all(reader))
    assert decoder.process.pid not in pool.pids
