"""Finds the speech in a long file, block by block, and computes the features of each segment."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mingc.artifacts.parameters import AudioParameters
from mingc.media.audio import Wave, check_peak, wave_features
from mingc.media.turns import TurnDetector, TurnEnd, TurnStart
from mingc.media.voice_activity import VoiceActivity
from mingc.prompts.media_decoder import SpeechSegment, TurnRules

_AFTER_MS = 200  # of sound behind the last speech of a segment, which stop consonants need


class SpeechFinder:
    """Segments of one stream of blocks. Holds the samples of the present segment only."""

    def __init__(self, parameters: AudioParameters, rules: TurnRules, where: str) -> None:
        self._parameters = parameters
        self._turns = TurnDetector(rules)
        self._where = where
        self._rate = 0
        self._activity: VoiceActivity | None = None
        self._kept: list[NDArray[np.float32]] = []  # from sample `_first` on
        self._first = self._end = 0

    @property
    def duration_ms(self) -> int:
        return self._end * 1000 // self._rate if self._rate else 0

    def push(self, wave: Wave) -> list[SpeechSegment]:
        """The segments that end in a block. Raises: RequestError for samples that are no sound."""
        check_peak(wave.samples, self._where)
        if self._activity is None:
            self._rate = wave.sample_rate
            self._activity = VoiceActivity(wave.sample_rate)
        self._kept.append(wave.samples)
        self._end += len(wave.samples)
        return self._advance(self._activity.push(wave.samples))

    def finish(self) -> list[SpeechSegment]:
        """The last segments."""
        found = [] if self._activity is None else self._advance(self._activity.finish())
        return found + [self._segment(each) for each in self._turns.finish()]

    def _advance(self, probabilities: list[float]) -> list[SpeechSegment]:
        turns: list[TurnStart | TurnEnd] = []
        for each in probabilities:
            turns += self._turns.push(each)
        found = [self._segment(each) for each in turns if isinstance(each, TurnEnd)]
        needed = self._turns.needed_from_ms * self._rate // 1000
        while self._kept and self._first + len(self._kept[0]) <= needed:
            self._first += len(self._kept.pop(0))
        return found

    def _segment(self, turn: TurnEnd) -> SpeechSegment:
        end_ms = min(turn.end_ms, turn.speech_end_ms + _AFTER_MS)
        first, last = (ms * self._rate // 1000 - self._first for ms in (turn.start_ms, end_ms))
        samples = np.concatenate(self._kept)[first:last]
        features = wave_features(Wave(samples=samples, sample_rate=self._rate), self._parameters, self._where)
        return SpeechSegment(
            start_ms=turn.speech_start_ms,
            end_ms=min(turn.speech_end_ms, self.duration_ms),
            probability=turn.probability,
            features=features,
        )


class BlockReader:
    """A `SpeechReader` over decoded blocks."""

    def __init__(self, finder: SpeechFinder, blocks: Iterator[Wave] | None = None) -> None:
        self._finder = finder
        self._blocks = blocks or iter(())
        self._is_ended = False

    @property
    def duration_ms(self) -> int:
        """See `SpeechReader`."""
        return self._finder.duration_ms

    def read(self) -> list[SpeechSegment] | None:
        """See `SpeechReader`."""
        if self._is_ended:
            return None
        if (block := self.next_block()) is not None:
            return self._finder.push(block)
        self._is_ended = True
        return self._finder.finish()

    def next_block(self) -> Wave | None:
        """Decode the next block; None after the last one."""
        return next(self._blocks, None)

    def close(self) -> None:
        """See `SpeechReader`."""
