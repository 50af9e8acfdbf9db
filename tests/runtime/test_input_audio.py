"""The input audio buffer of a realtime session, by the clip of tests/data/speech, whose sentences have known times."""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar, get_args

import numpy as np
import onnxruntime
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from mingc.errors import RequestError
from mingc.media import voice_activity
from mingc.prompts.media_decoder import TurnRules
from mingc.server.realtime import input_audio
from mingc.server.realtime.input_audio import (
    RATES,
    BufferFull,
    Clip,
    Encoding,
    InputAudio,
    InputEvent,
    SpeechPaused,
    SpeechResumed,
    SpeechStarted,
    SpeechStopped,
    clip_of,
)

CLIP = Path(__file__).parents[1] / "data" / "speech" / "three-sentences.ogg"
SENTENCES_MS = [(500, 2118), (3118, 4644), (5444, 5953)]
T = TypeVar("T")
RULES = TurnRules()  # 300 ms before, 500 ms of silence
PCM: Encoding = "audio/pcm"
KINDS: dict[Encoding, dict[str, str]] = {
    "audio/pcm": {"subtype": "PCM_16", "endian": "LITTLE"},
    "audio/pcmu": {"subtype": "ULAW"},
    "audio/pcma": {"subtype": "ALAW"},
}


@cache
def speech(encoding: Encoding = PCM) -> bytes:
    """The clip as a client sends it, written by libsndfile."""
    samples, rate = soundfile.read(CLIP, dtype="float32")
    file = io.BytesIO()
    raw = {"format": "RAW", **KINDS[encoding]}
    soundfile.write(file, soxr.resample(samples, rate, RATES[encoding]).clip(-1, 1), RATES[encoding], **raw)
    return file.getvalue()


def ms(count: int) -> bytes:
    """Silence of the format `audio/pcm`."""
    return bytes(48 * count)


def part(start_ms: int, end_ms: int) -> bytes:
    return speech()[48 * start_ms : 48 * end_ms]


def pieces(data: bytes, cuts: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(cuts), len(data)]
    return [data[start:end] for start, end in pairwise(edges)]


async def append(audio: InputAudio, *parts: bytes) -> list[InputEvent]:
    return [event for each in parts for event in await audio.append(each)]


def events(
    *parts: bytes, encoding: Encoding = PCM, rules: TurnRules | None = RULES, max_ms: int = 300_000
) -> list[InputEvent]:
    return asyncio.run(append(InputAudio(encoding, rules, max_ms=max_ms), *parts))


def of_type(kind: type[T], found: Sequence[InputEvent]) -> list[T]:
    return [each for each in found if isinstance(each, kind)]


def kinds(found: Sequence[InputEvent]) -> list[str]:
    return [type(each).__name__.removeprefix("Speech") for each in found]


def reference(samples: np.ndarray[Any, Any], silence_frames: int) -> list[tuple[int, int, int]]:
    """First frame of speech, the one after the last, and the one after the silence of each turn; by 16 kHz samples.

    Written after Silero's description of its ONNX file: 512 samples behind the 64 before them; speech from 0.5 on,
    silence below 0.35.
    """
    run = onnxruntime.InferenceSession(
        Path(voice_activity.__file__).parent / "silero/silero_vad_16k_op15.onnx"
    ).run
    state, before = np.zeros((2, 1, 128), np.float32), np.zeros(64, np.float32)
    turns, first, last, above = [], -1, -1, 0
    for index in range(len(samples) // 512):
        frame = samples[512 * index : 512 * index + 512]
        inputs = {"input": np.concatenate([before, frame])[None], "state": state, "sr": np.array(16000)}
        found, state = run(None, inputs)
        before, p = frame[-64:], float(found[0, 0])
        above = above + 1 if p >= 0.5 else 0
        if first < 0 and above == 2:
            first, last = index - 1, index + 1
        if first >= 0 and p >= 0.35:
            last = index + 1
        if first >= 0 and index + 1 - last >= silence_frames:
            turns.append((first, last, index + 1))
            first = -1
    return turns


@pytest.mark.parametrize("encoding", get_args(Encoding))
@pytest.mark.parametrize("silence_ms", [100, 200, 500, 700])
def test_turns_are_those_of_silero(encoding: Encoding, silence_ms: int) -> None:
    """Resampling moves frames across a threshold, so times may differ by two."""
    rate, silence = (
        RATES[encoding],
        {"audio/pcm": b"\0", "audio/pcmu": b"\xff", "audio/pcma": b"\xd5"}[encoding],
    )
    data = speech(encoding) + silence * (48 if encoding == PCM else 8) * 300
    samples = np.frombuffer(clip_of(data, encoding).pcm, "<i2").astype(np.float32) / 32768
    expected = reference(soxr.resample(samples, rate, 16000), -(-silence_ms // 32))
    found = events(data, encoding=encoding, rules=replace(RULES, silence_ms=silence_ms))
    starts, stops = of_type(SpeechStarted, found), of_type(SpeechStopped, found)
    assert len(starts) == len(stops) == len(expected) >= 3
    before = 0
    for start, stop, (first, last, end) in zip(starts, stops, expected, strict=True):
        assert abs(start.start_ms - max(before, 32 * first - 300)) <= 64
        assert abs(stop.end_ms - 32 * end) <= 64
        prompt_ms = start.start_ms + stop.audio.prompt_bytes * 500 / rate
        assert prompt_ms <= stop.end_ms and abs(prompt_ms - min(32 * end, 32 * last + 200)) <= 64
        # The item has the sound from start to end, sample by sample.
        pcm = clip_of(data, encoding).pcm
        assert stop.audio.pcm == pcm[start.start_ms * rate // 500 : stop.end_ms * rate // 500]
        wav, wav_rate = soundfile.read(io.BytesIO(stop.audio.wav()), dtype="int16")
        assert (wav_rate, wav.tobytes()) == (rate, stop.audio.pcm[: stop.audio.prompt_bytes])
        before = stop.end_ms


def test_turns_are_the_sentences() -> None:
    found = events(speech())
    assert kinds(found) == ["Started", "Paused", "Stopped"] * 3
    for stop, (start, end) in zip(of_type(SpeechStopped, found), SENTENCES_MS, strict=True):
        assert abs(stop.audio.start_ms - (start - 300)) <= 96
        assert abs(stop.end_ms - (end + 500)) <= 96 and not stop.is_cut


def test_tones_and_noise_are_no_turns() -> None:
    time = np.arange(3 * 24000) / 24000
    noise = 0.3 * np.random.default_rng(0).standard_normal(len(time))
    for sound in (0.5 * np.sin(2 * np.pi * 440 * time), noise):
        assert events((sound.clip(-1, 1) * 32767).astype("<i2").tobytes()) == []


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_turns_do_not_depend_on_how_the_sound_is_cut(encoding: Encoding) -> None:
    """Neither times nor a byte of a clip; also in the middle of samples, and in appends for a thread."""
    data = speech(encoding)
    whole = events(data, encoding=encoding)

    @settings(max_examples=12, deadline=None)
    @given(st.lists(st.integers(0, len(data)), max_size=40))
    def check(cuts: list[int]) -> None:
        assert events(*pieces(data, cuts), encoding=encoding) == whole

    check()
    assert kinds(whole) == ["Started", "Paused", "Stopped"] * 3


def test_a_pause_has_what_the_turn_will_have_if_it_ends_there() -> None:
    found = events(speech(), ms(2000), rules=replace(RULES, silence_ms=1100))
    assert kinds(found) == ["Started", *["Paused", "Resumed"] * 2, "Paused", "Stopped"]
    *earlier, last = of_type(SpeechPaused, found)
    (stop,) = of_type(SpeechStopped, found)
    assert last.audio.wav() == stop.audio.wav() != earlier[1].audio.wav()
    assert stop.audio.pcm.startswith(last.audio.pcm)
    assert stop.audio.duration_ms - last.audio.duration_ms in range(900, 960)


@pytest.mark.parametrize(("silence_ms", "has_pauses"), [(100, False), (200, False), (300, True)])
def test_a_turn_that_ends_as_soon_has_no_pause(silence_ms: int, has_pauses: bool) -> None:
    found = events(speech(), rules=replace(RULES, silence_ms=silence_ms))
    assert bool(of_type(SpeechPaused, found)) == has_pauses


def test_a_start_is_told_while_the_turn_goes_on() -> None:
    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        told = [kinds(await audio.append(part(at, at + 20))) for at in range(0, 3000, 20)]
        (start,) = [20 * n for n, each in enumerate(told) if "Started" in each]
        (stop,) = [20 * n for n, each in enumerate(told) if "Stopped" in each]
        assert 500 <= start <= 500 + 64 + 52 and abs(stop - (2118 + 500)) < 96
        assert not audio.is_speaking and audio.now_ms == 3000

    asyncio.run(run())


@pytest.mark.parametrize("encoding", get_args(Encoding))
def test_without_detection_the_client_commits(encoding: Encoding) -> None:
    data = speech(encoding)
    size = 48 if encoding == PCM else 8

    async def run() -> None:
        audio = InputAudio(encoding, None, max_ms=5000)
        assert audio.is_empty and await append(audio, data[: 99 * size]) == []
        for _ in range(2):  # the error takes nothing
            with pytest.raises(RequestError, match="holds 99 ms") as error:
                audio.commit()
            assert error.value.code == "input_audio_buffer_commit_empty"
        assert await append(audio, data[99 * size : 100 * size]) == [] and not audio.is_empty
        assert audio.commit() == clip_of(data[: 100 * size], encoding)
        with pytest.raises(RequestError):
            audio.commit()
        await append(audio, data[100 * size : 400 * size])
        audio.clear()
        assert audio.is_empty and audio.now_ms == 400
        # The longest clip leaves the buffer by itself, once more would be in it.
        assert await append(audio, data[400 * size : 5400 * size]) == []
        (full,) = await append(audio, data[5400 * size : 5500 * size])
        assert isinstance(full, BufferFull) and full.audio.start_ms == 400
        assert replace(full.audio, start_ms=0) == clip_of(data[400 * size : 5400 * size], encoding)
        assert audio.commit().start_ms == 5400

    asyncio.run(run())


def test_half_a_sample_waits_for_the_next_append_but_not_beyond_a_commit() -> None:
    async def run() -> None:
        audio = InputAudio(PCM, None, max_ms=5000)
        await append(audio, *pieces(speech()[:9601], range(0, 9601, 333)))
        assert audio.commit().pcm == speech()[:9600]
        await append(audio, part(1000, 1200))
        assert audio.commit().pcm == part(1000, 1200)
        await append(audio, speech()[:9601])
        audio.clear()
        await append(audio, part(1000, 1200))
        assert audio.commit().pcm == part(1000, 1200)

    asyncio.run(run())


@pytest.mark.parametrize("call", [InputAudio.commit, InputAudio.clear])
def test_a_commit_or_clear_during_speech_ends_the_turn_silently(
    call: Callable[[InputAudio], Clip | None],
) -> None:
    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        (start,) = await append(audio, part(0, 1501))
        assert isinstance(start, SpeechStarted) and audio.is_speaking
        clip = call(audio)
        assert clip is None or (clip.start_ms, clip.pcm) == (start.start_ms, part(start.start_ms, 1501))
        assert not audio.is_speaking and not audio.num_bytes
        # Who speaks on begins another turn, which has nothing of that.
        again, *_, stop = await append(audio, part(1501, 3000))
        assert isinstance(again, SpeechStarted) and again.start_ms == 1501
        assert isinstance(stop, SpeechStopped) and abs(stop.end_ms - 2618) <= 96
        assert stop.audio.pcm == part(1501, stop.end_ms)
        # In the silence behind it there is none.
        await append(audio, part(3000, 3100))
        call(audio)
        assert await append(audio, ms(3000)) == []

    asyncio.run(run())


def test_silence_is_not_kept() -> None:
    """But the padding and one second, which a commit takes."""

    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        for _ in range(100):
            assert await audio.append(ms(200)) == []
            assert audio.num_bytes <= 48 * (300 + 1000 + 64 + 200)
        assert audio.is_empty and audio.now_ms == 20_000
        assert 1300 <= audio.commit().duration_ms <= 1364
        assert not audio.num_bytes
        found = await append(audio, speech())
        assert kinds(found[:1]) == ["Started"] and audio.now_ms == 20_000 + len(speech()) // 48
        (first, *_) = of_type(SpeechStopped, found)
        assert abs(first.audio.start_ms - 20_200) <= 96

    asyncio.run(run())


def test_the_longest_clip_cuts_a_turn() -> None:
    """Where speech is least probable; the parts follow each other without a gap; only the last one ends in silence."""
    sound = b"".join([part(500, 2100)] * 6)
    found = events(sound, ms(1000), max_ms=3000)
    stops = of_type(SpeechStopped, found)
    assert [each.is_cut for each in stops] == [True] * (len(stops) - 1) + [False] and len(stops) >= 4
    assert all(each.audio.duration_ms <= 3000 for each in stops)
    joined = b"".join(each.audio.pcm for each in stops)
    start = stops[0].audio.start_ms
    assert joined == (sound + ms(1000))[48 * start : 48 * start + len(joined)]
    assert all(each.audio.prompt_bytes == len(each.audio.pcm) for each in stops[:-1])
    for index, each in enumerate(found):
        if isinstance(each, SpeechStopped) and each.is_cut:
            after = found[index + 1]
            assert isinstance(after, SpeechStarted) and after.start_ms == each.end_ms


def test_detection_may_be_switched_off_and_on_at_any_time() -> None:
    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        (start,) = await append(audio, part(0, 1500))
        assert isinstance(start, SpeechStarted)
        audio.configure(PCM, None)  # the turn stays in the buffer, and nothing ends it
        assert await append(audio, part(1500, 4000)) == [] and not audio.is_empty
        audio.configure(PCM, RULES)  # the buffer is searched; what it holds is there already
        found = await append(audio, part(4000, 5300))
        assert kinds(found) == ["Started", "Paused", "Stopped"] * 2
        first, second = of_type(SpeechStopped, found)
        assert first.audio.start_ms == start.start_ms and abs(second.end_ms - (4644 + 500)) <= 96
        assert first.audio.pcm == part(first.audio.start_ms, first.end_ms)
        assert second.audio.pcm == part(second.audio.start_ms, second.end_ms)
        audio.configure(PCM, None)
        await append(audio, part(5300, 6000))
        audio.configure(PCM, RULES)
        audio.clear()  # also what was not searched yet
        stops = of_type(SpeechStopped, await append(audio, speech()))
        for stop, (_, end) in zip(stops, SENTENCES_MS, strict=True):
            assert abs(stop.end_ms - (6000 + end + 500)) <= 96
            assert stop.audio.pcm == part(stop.audio.start_ms - 6000, stop.end_ms - 6000)

    asyncio.run(run())


def test_new_rules_hold_for_the_present_turn() -> None:
    async def run() -> None:
        audio = InputAudio(PCM, replace(RULES, silence_ms=10_000), max_ms=300_000)
        assert kinds(await append(audio, part(0, 2900))) == ["Started", "Paused"]
        audio.configure(PCM, replace(RULES, silence_ms=300))
        (stop,) = await append(audio, ms(40))
        assert isinstance(stop, SpeechStopped) and 2900 <= stop.end_ms <= 2940
        audio.configure(PCM, replace(RULES, threshold=1.0))
        assert await append(audio, speech()) == []

    asyncio.run(run())


def test_the_format_changes_only_while_nothing_waits() -> None:
    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        await append(audio, part(0, 1000))
        with pytest.raises(RequestError, match="commit or clear") as error:
            audio.configure("audio/pcmu", None)
        assert error.value.param == "session.audio.input.format"
        assert kinds(await append(audio, part(1000, 2700))) == ["Paused", "Stopped"]
        audio.configure("audio/pcmu", RULES)  # silence between turns is no sound that waits
        assert audio.now_ms == 2700 and not audio.num_bytes
        found = await append(audio, speech("audio/pcmu"))
        assert audio.now_ms == 2700 + len(speech("audio/pcmu")) // 8
        for stop, (start, end) in zip(of_type(SpeechStopped, found), SENTENCES_MS, strict=True):
            assert abs(stop.audio.start_ms - (2700 + start - 300)) <= 96
            assert abs(stop.end_ms - (2700 + end + 500)) <= 96 and stop.audio.sample_rate == 8000
        audio.configure("audio/pcma", None)
        await append(audio, speech("audio/pcma")[:8])
        with pytest.raises(RequestError, match="commit or clear"):
            audio.configure("audio/pcm", RULES)

    asyncio.run(run())


def test_an_idle_client_has_a_clip_of_silence() -> None:
    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        idle = audio.idle(0)  # it has sent nothing
        assert idle is not None and (idle.start_ms, idle.end_ms, idle.audio.pcm) == (0, 0, ms(100))
        await append(audio, speech(), ms(5000))
        now = audio.now_ms
        for since, length in ((now - 3000, 1000), (now + 250, 100), (now, 100)):
            idle = audio.idle(since)
            assert idle is not None and idle.audio.pcm == ms(length)
            assert (idle.start_ms, idle.end_ms) == (min(since, now), now)
        await append(audio, ms(1000))
        idle = audio.idle(now + 600)
        assert idle is not None and idle.audio.duration_ms == 400
        await append(audio, part(0, 1500))
        assert audio.is_speaking and audio.idle(now) is None and audio.is_speaking

    asyncio.run(run())


@pytest.mark.parametrize(("length_ms", "is_on_thread"), [(500, False), (2000, True)])
def test_a_long_append_lets_others_run(length_ms: int, is_on_thread: bool) -> None:
    """The turns of a long one are searched on a thread; meanwhile nobody knows that the client is idle."""

    async def run() -> None:
        audio = InputAudio(PCM, RULES, max_ms=300_000)
        await audio.append(ms(20))
        idle: list[object] = []

        async def other() -> None:
            idle.append(audio.idle(0))

        task = asyncio.create_task(other())
        found = await audio.append(part(0, length_ms))
        assert idle == ([None] if is_on_thread else []) and len(found) == is_on_thread
        await task

    asyncio.run(run())


class _Loudness:
    """Stands for the network: the first sample of a frame is its probability."""

    def __init__(self, sample_rate: int) -> None:
        self._frame = sample_rate * 32 // 1000

    def push(self, samples: np.ndarray[Any, Any]) -> list[float]:
        return samples[:: self._frame].tolist()


@pytest.mark.parametrize("seed", range(30))
def test_turns_are_in_order_whatever_is_heard(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any probabilities, paddings and silences, with a longest clip of 1.6 s; none is cut in a pause."""
    monkeypatch.setattr(input_audio, "VoiceActivity", _Loudness)
    generator = random.Random(seed)
    values = [value for _ in range(60) for value in [generator.random()] * generator.choice([1, 3, 12])]
    rules = replace(
        RULES,
        prefix_padding_ms=generator.choice([0, 300, 5000]),
        silence_ms=generator.choice([100, 500, 3000]),
    )
    frames = [np.full(768, 32767 * value, "<i2").tobytes() for value in values]
    told = events(*frames, ms(5000), rules=rules, max_ms=1600)
    follows = {
        "Started": {"Paused", "Stopped", "Cut"},
        "Paused": {"Resumed", "Stopped"},
        "Resumed": {"Paused", "Stopped", "Cut"},
        "Stopped": {"Started"},
        "Cut": {"Started"},
    }
    names = ["Cut" if isinstance(each, SpeechStopped) and each.is_cut else kinds([each])[0] for each in told]
    assert names[0] == "Started" and names[-1] == "Stopped"
    assert all(after in follows[before] for before, after in pairwise(names))
    assert all(each.audio.duration_ms <= 1600 for each in of_type(SpeechStopped, told))
    for before, after in pairwise(told):
        if isinstance(before, SpeechPaused) and isinstance(after, SpeechStopped):
            assert before.audio.wav() == after.audio.wav()


@pytest.mark.parametrize("seed", range(6))
def test_no_sound_is_taken_twice_whatever_the_client_does(seed: int) -> None:
    """Appends, commits, clears and new rules in any order: clips are what was sent, in order, and apart."""
    generator = random.Random(seed)
    sent = speech() * 4
    max_ms = generator.choice([1500, 300_000])

    async def run() -> list[Clip]:
        audio = InputAudio(PCM, RULES, max_ms=max_ms)
        clips: list[Clip] = []
        speaking, position = False, 0
        while position < len(sent):
            size = generator.choice([2, 960, 1920, 4800, 48_000])
            for event in await audio.append(sent[position : position + size]):
                if isinstance(event, SpeechStopped | BufferFull):
                    clips.append(event.audio)
                if isinstance(event, SpeechStarted | SpeechStopped):
                    assert speaking == isinstance(event, SpeechStopped)
                    speaking = not speaking
                if isinstance(event, SpeechPaused | SpeechResumed):
                    assert speaking
            assert speaking == audio.is_speaking
            position += size
            assert audio.now_ms == min(position, len(sent)) // 48
            match generator.randrange(60):
                case 0:
                    audio.clear()
                case 1:
                    try:
                        clips.append(audio.commit())
                    except RequestError:
                        assert audio.num_bytes < 4800
                case 2:
                    if (
                        idle := audio.idle(position // 48 - 500)
                    ) is not None and idle.audio.duration_ms > 100:
                        clips.append(idle.audio)
                case 3:
                    padding = generator.choice([0, 300, 5000])
                    audio.configure(PCM, replace(RULES, prefix_padding_ms=padding))
                case 4:
                    audio.configure(PCM, None)
            speaking = audio.is_speaking
        return clips

    clips = asyncio.run(run())
    end = 0
    for clip in clips:
        start = next(
            at
            for at in range(48 * clip.start_ms, 48 * clip.start_ms + 48, 2)
            if sent[at : at + len(clip.pcm)] == clip.pcm
        )
        assert start >= end and clip.duration_ms <= max_ms
        end = start + len(clip.pcm)
    assert len(clips) > 5
