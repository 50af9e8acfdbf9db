"""The input audio buffer of a realtime session, and the turns that are found in it.

Positions are milliseconds of sound since the session began. Nothing of OpenAI's events is here, nor of the network.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from mingc.errors import RequestError
from mingc.media.turns import TurnDetector, TurnEnd, TurnStart
from mingc.media.voice_activity import VoiceActivity
from mingc.prompts.media_decoder import TurnRules
from mingc.server import g711
from mingc.server.audio_format import wav_header

Encoding = Literal["audio/pcm", "audio/pcmu", "audio/pcma"]
RATES: Mapping[Encoding, int] = {"audio/pcm": 24_000, "audio/pcmu": g711.RATE_HZ, "audio/pcma": g711.RATE_HZ}

MIN_COMMIT_MS = 100
_AFTER_MS = 200  # of sound behind the last speech that a prompt has: stop consonants need it
_KEPT_MS = 1000  # beside the padding, while nobody speaks
_ON_THREAD_MS = 500  # a longer append is searched for speech on a thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Clip:
    """Sound of one item.

    Attributes:
        pcm: mono samples of 16 bits, little-endian.
        prompt_bytes: so much of it is in prompts; the silence behind it is not.
    """

    pcm: bytes
    sample_rate: int
    start_ms: int
    prompt_bytes: int

    @property
    def duration_ms(self) -> int:
        """Of the whole."""
        return len(self.pcm) * 500 // self.sample_rate

    def wav(self) -> bytes:
        """A WAV file of what prompts have, for a `MediaPart`."""
        return wav_header(self.sample_rate, self.prompt_bytes // 2) + self.pcm[: self.prompt_bytes]


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """`start_ms`: of the turn, before its first speech."""

    start_ms: int


@dataclass(frozen=True, slots=True)
class SpeechPaused:
    """200 ms of silence. If the turn ends here, prompts have the same sound: `wav()` is equal to the last byte."""

    audio: Clip


@dataclass(frozen=True, slots=True)
class SpeechResumed:
    """The turn goes on after `SpeechPaused`."""


@dataclass(frozen=True, slots=True)
class SpeechStopped:
    """A turn ended, and has left the buffer.

    `is_cut`: it became as long as a clip may be, and the next one continues it, whose `SpeechStarted` follows.
    """

    end_ms: int
    audio: Clip
    is_cut: bool = False


@dataclass(frozen=True, slots=True)
class BufferFull:
    """Without turn detection: the buffer held the longest clip, which has left it."""

    audio: Clip


InputEvent = SpeechStarted | SpeechPaused | SpeechResumed | SpeechStopped | BufferFull


@dataclass(frozen=True, slots=True)
class Idle:
    """Nobody spoke from `start_ms` to `end_ms`. `audio`: the end of this silence, at least 100 ms."""

    start_ms: int
    end_ms: int
    audio: Clip


def decode_samples(data: bytes, encoding: Encoding) -> bytes:
    """PCM samples of 16 bits, little-endian, of whole samples in an encoding."""
    if encoding == "audio/pcm":
        return data
    return g711.decode(data, "pcmu" if encoding == "audio/pcmu" else "pcma").astype("<i2").tobytes()


def clip_of(data: bytes, encoding: Encoding) -> Clip:
    """The sound of an item that the client created. An odd byte at its end is left out."""
    pcm = decode_samples(data[: len(data) & ~1] if encoding == "audio/pcm" else data, encoding)
    return _whole(pcm, RATES[encoding])


def _whole(pcm: bytes, sample_rate: int, start_ms: int = 0) -> Clip:
    return Clip(pcm=pcm, sample_rate=sample_rate, start_ms=start_ms, prompt_bytes=len(pcm))


class InputAudio:
    """One call at a time; only `idle` may be called while an `append` is awaited."""

    def __init__(self, encoding: Encoding, rules: TurnRules | None, *, max_ms: int) -> None:
        """`rules`: of turn detection, if there is any. `max_ms`: the longest clip that a prompt may have."""
        self._max_ms = max_ms
        self._encoding = encoding
        self._odd = b""
        self._base_ms = 0  # sample 0 of the encoding
        self._pcm = bytearray()  # samples from `_first` to `_end`
        self._first = self._end = 0
        self._turns: TurnDetector | None = None
        self._activity: VoiceActivity | None = None
        self._searched = 0  # the end of what `_activity` has got, whose first sample was `_search_first`
        self._search_first = 0
        self._is_searching = False
        self._is_paused = False
        self._set_rules(rules)

    @property
    def now_ms(self) -> int:
        """How much was appended."""
        return self._ms(self._end)

    @property
    def num_bytes(self) -> int:
        """Of the sound that the buffer holds."""
        return len(self._pcm)

    @property
    def is_speaking(self) -> bool:
        """Whether a turn has begun and not ended."""
        return self._turns is not None and self._turns.start_ms is not None

    @property
    def is_empty(self) -> bool:
        """Whether `configure` may change the encoding: nothing waits for a commit. Silence between turns does not."""
        return not self.is_speaking if self._turns is not None else not self._pcm

    async def append(self, data: bytes) -> list[InputEvent]:
        """Add sound in the encoding; half a sample waits for the next call. Waits for a thread if it is long.

        Raises: ConfigError without onnxruntime.
        """
        self._add(data)
        if self._turns is None:
            return self._take_full()
        self._is_searching = True
        try:
            if self._activity is None:  # the first one of the process loads the model
                self._activity = await asyncio.to_thread(VoiceActivity, self._rate)
            new = np.frombuffer(self._pcm, "<i2")[self._searched - self._first :].astype(np.float32)
            new /= np.float32(32768)
            self._searched = self._end
            if len(new) * 1000 > _ON_THREAD_MS * self._rate:
                return self._advance(await asyncio.to_thread(self._activity.push, new))
            return self._advance(self._activity.push(new))
        finally:
            self._is_searching = False

    def commit(self) -> Clip:
        """Take the turn, or all that the buffer holds if nobody speaks. No event tells the turn's end.

        Raises: RequestError below 100 ms.
        """
        most = (
            self._first + self._max_ms * self._rate // 1000
        )  # silence after the longest turn is in no prompt
        clip = self._clip(self._first, self._end, min(self._end, most))
        if len(clip.pcm) < self._least_bytes:
            raise RequestError(
                f"The input audio buffer holds {clip.duration_ms} ms of sound. Append at least {MIN_COMMIT_MS} ms "
                "before a commit; with turn detection, turns are committed by themselves.",
                code="input_audio_buffer_commit_empty",
            )
        self.clear()
        return clip

    def clear(self) -> None:
        """Drop what the buffer holds. No event tells the turn's end."""
        self._odd = b""
        self._drop_all()

    def configure(self, encoding: Encoding, rules: TurnRules | None) -> None:
        """Change settings. With turn detection switched on, turns are also found in what the buffer holds already.

        Raises: RequestError for another encoding while something waits for a commit; nothing is changed then.
        """
        if encoding != self._encoding:
            if not self.is_empty:
                raise RequestError(
                    "The format cannot change while the input audio buffer holds sound: commit or clear it before.",
                    param="session.audio.input.format",
                )
            self._base_ms = self.now_ms
            self._encoding, self._odd = encoding, b""
            self._pcm.clear()
            self._first = self._end = 0
            self._set_rules(rules, is_new=True)
        else:
            self._set_rules(rules)

    def idle(self, since_ms: int) -> Idle | None:
        """Take the silence since then. None if somebody speaks, or may speak in an append that is being searched."""
        if self._is_searching or (self._turns is not None and not self._turns.is_quiet):
            return None
        since_ms = min(since_ms, self.now_ms)
        since = (since_ms - self._base_ms) * self._rate // 1000
        first = max(self._first, self._end - _KEPT_MS * self._rate // 1000, since)
        pcm = self._clip(first, self._end, self._end).pcm
        pcm = bytes(max(0, self._least_bytes - len(pcm))) + pcm  # a client may send nothing while it is quiet
        found = Idle(since_ms, self.now_ms, _whole(pcm, self._rate, self._ms(first)))
        self._drop_all()
        return found

    @property
    def _rate(self) -> int:
        return RATES[self._encoding]

    @property
    def _least_bytes(self) -> int:
        return 2 * (MIN_COMMIT_MS * self._rate // 1000)

    def _ms(self, sample: int) -> int:
        return self._base_ms + sample * 1000 // self._rate

    def _sample(self, turn_ms: int) -> int:
        """The sample at a time of `_turns`."""
        return self._search_first + turn_ms * self._rate // 1000

    def _set_rules(self, rules: TurnRules | None, *, is_new: bool = False) -> None:
        if rules is not None:
            padding_ms = min(rules.prefix_padding_ms, self._max_ms // 2)
            rules = replace(rules, max_ms=self._max_ms, prefix_padding_ms=padding_ms)
        if rules is None:
            self._turns = self._activity = None
            self._is_paused = False
        elif self._turns is None or is_new:
            self._turns, self._activity = TurnDetector(rules), None
            self._search_first = self._searched = self._first
            self._is_paused = False
        else:
            self._turns.rules = rules

    def _add(self, data: bytes) -> None:
        if self._encoding == "audio/pcm" and (self._odd or len(data) % 2):
            data = self._odd + data
            end = len(data) & ~1
            data, self._odd = data[:end], data[end:]
        pcm = decode_samples(data, self._encoding)
        self._pcm += pcm
        self._end += len(pcm) // 2

    def _clip(self, first: int, end: int, prompt_end: int) -> Clip:
        start, stop = (2 * (each - self._first) for each in (first, end))
        return Clip(
            pcm=bytes(memoryview(self._pcm)[start:stop]),
            sample_rate=self._rate,
            start_ms=self._ms(first),
            prompt_bytes=2 * (prompt_end - first),
        )

    def _drop(self, before: int) -> None:
        """Drop samples."""
        if before > self._first:
            del self._pcm[: 2 * (before - self._first)]
            self._first = before

    def _drop_all(self) -> None:
        self._drop(self._end)
        self._is_paused = False
        if self._turns is None:
            return
        if self._searched < self._end:
            self._set_rules(self._turns.rules, is_new=True)
        else:
            self._turns.reset(-(-(self._end - self._search_first) * 1000 // self._rate))

    def _take_full(self) -> list[InputEvent]:
        found: list[InputEvent] = []
        size = self._max_ms * self._rate // 1000
        while self._end - self._first > size:
            end = self._first + size
            found.append(BufferFull(self._clip(self._first, end, end)))
            self._drop(end)
        return found

    def _advance(self, probabilities: list[float]) -> list[InputEvent]:
        turns = self._turns
        assert turns is not None
        found: list[InputEvent] = []
        for probability in probabilities:
            for event in turns.push(probability):
                if isinstance(event, TurnStart):
                    found.append(SpeechStarted(self._ms(self._sample(event.start_ms))))
                else:
                    found += self._stop(event)
            if (start_ms := turns.start_ms) is None:
                continue
            silence_ms = turns.now_ms - turns.speech_end_ms
            if self._is_paused and not silence_ms:
                self._is_paused = False
                found.append(SpeechResumed())
            elif not self._is_paused and silence_ms >= _AFTER_MS:
                self._is_paused = True
                end = self._sample(min(turns.speech_end_ms + _AFTER_MS, turns.most_ms))
                found.append(SpeechPaused(self._clip(self._sample(start_ms), end, end)))
        if turns.start_ms is None:
            self._drop(self._sample(turns.needed_from_ms) - _KEPT_MS * self._rate // 1000)
        else:
            self._drop(self._sample(turns.start_ms))
        return found

    def _stop(self, turn: TurnEnd) -> list[InputEvent]:
        first, end = self._sample(turn.start_ms), self._sample(turn.end_ms)
        prompt_end = end if turn.is_cut else min(end, self._sample(turn.speech_end_ms + _AFTER_MS))
        resumed: list[InputEvent] = [SpeechResumed()] if turn.is_cut and self._is_paused else []
        self._is_paused = False
        stopped = SpeechStopped(self._ms(end), self._clip(first, end, prompt_end), turn.is_cut)
        self._drop(end)
        return [*resumed, stopped]
