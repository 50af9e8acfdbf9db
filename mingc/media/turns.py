"""When somebody begins and ends to speak, by the probability of speech of each frame.

Pure logic in milliseconds: a frame has exactly 32.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from mingc.prompts.media_decoder import TurnRules

FRAME_MS = 32
_MIN_FRAMES = 2  # consecutive ones of speech that begin a turn
_HYSTERESIS = 0.15
_MIN_THRESHOLD = 0.01


@dataclass(frozen=True, slots=True)
class TurnStart:
    """Speech has begun. `start_ms`: of the turn, before its first speech."""

    start_ms: int


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """Speech has ended, or was cut at the longest length of a turn, and the next turn continues it.

    Attributes:
        start_ms, end_ms: the turn, with the padding before its speech and the silence that ended it.
        speech_start_ms, speech_end_ms: from the first frame of speech to the end of the last one.
        probability: mean probability of speech between these.
        is_cut: no silence ended it. One that goes on at the longest length may yet be long enough.
    """

    start_ms: int
    end_ms: int
    speech_start_ms: int
    speech_end_ms: int
    probability: float
    is_cut: bool = False


class TurnDetector:
    """Turns of one stream of sound."""

    def __init__(self, rules: TurnRules) -> None:
        self.rules = rules  # may change at any time
        self._num_frames = 0
        self._num_candidates = 0  # frames of speech that do not yet begin a turn
        self._least_start_ms = 0  # end of the turn before
        self._start_ms: int | None = None
        self._first = self._last = 0  # first frame of speech of the turn, and the one after its last
        self._probabilities: list[float] = []  # since `_first`

    @property
    def now_ms(self) -> int:
        """End of the last frame."""
        return self._num_frames * FRAME_MS

    @property
    def needed_from_ms(self) -> int:
        """Sound before this belongs to no turn of the future."""
        if self._start_ms is not None:
            return self._start_ms
        possible = (self._num_frames - self._num_candidates) * FRAME_MS - self.rules.prefix_padding_ms
        return max(self._least_start_ms, possible)

    def push(self, probability: float) -> list[TurnStart | TurnEnd]:
        """Take the next frame."""
        self._num_frames += 1
        if self._start_ms is not None:
            return self._continue(probability)
        if probability < self.rules.threshold:
            self._num_candidates = 0
            return []
        if not self._num_candidates:
            self._first, self._probabilities = self._num_frames - 1, []
        self._num_candidates += 1
        self._probabilities.append(probability)
        if self._num_candidates < _MIN_FRAMES:
            return []
        return [self._begin(self._first * FRAME_MS - self.rules.prefix_padding_ms)]

    @property
    def start_ms(self) -> int | None:
        """Of the present turn, if somebody speaks."""
        return self._start_ms

    @property
    def is_quiet(self) -> bool:
        """Nobody speaks, and the last frame is no speech that may begin a turn."""
        return self._start_ms is None and not self._num_candidates

    @property
    def speech_end_ms(self) -> int:
        """End of the last frame of speech of the present turn."""
        return self._last * FRAME_MS

    @property
    def most_ms(self) -> int:
        """Where the present turn ends at the latest: at its longest length, in whole frames."""
        assert self._start_ms is not None
        if self.rules.max_ms is None:
            return sys.maxsize
        return (self._start_ms + self.rules.max_ms) // FRAME_MS * FRAME_MS

    def reset(self, at_ms: int) -> None:
        """End the present turn without an event: the sound before `at_ms` was taken, or dropped; no turn has it."""
        self._end(at_ms)

    def finish(self) -> list[TurnEnd]:
        """The turn that the end of the stream ends, if any."""
        if self._start_ms is None:
            return []
        event = self._event(self.now_ms, self._last)
        self._end(self.now_ms)
        return [event]

    def _begin(self, start_ms: int) -> TurnStart:
        self._start_ms = max(start_ms, self._least_start_ms, 0)
        self._last = self._first + len(self._probabilities)
        return TurnStart(self._start_ms)

    def _continue(self, probability: float) -> list[TurnStart | TurnEnd]:
        assert self._start_ms is not None
        self._probabilities.append(probability)
        last = self._last
        if probability >= max(self.rules.threshold - _HYSTERESIS, _MIN_THRESHOLD):
            self._last = self._num_frames
        if (self._num_frames - self._last) * FRAME_MS >= self.rules.silence_ms:
            end_ms = min(self.now_ms, self.most_ms)
            event = self._event(end_ms, self._last)
            self._end(end_ms)
            return [event]
        # in silence it is not known yet whether the turn has ended
        if self.now_ms >= self.most_ms and self._last == self._num_frames:
            return self._cut(last)
        return []

    def _cut(self, last: int) -> list[TurnStart | TurnEnd]:
        """Cut where speech is least probable in the second half of the turn; the latest such frame.

        `last`: end of the speech before the present frame.
        """
        most = self.most_ms // FRAME_MS
        size = max(_MIN_FRAMES, min(most, self._num_frames) - self._first)
        place = max(range(size // 2, size), key=lambda index: (-self._probabilities[index], index))
        cut = self._first + place
        event = self._event(cut * FRAME_MS, min(cut, last), is_cut=True)
        rest, start_ms = self._probabilities[place:], cut * FRAME_MS
        if self._num_frames > most:  # speech after a silence
            cut, rest = self._num_frames - 1, rest[-1:]
            start_ms = cut * FRAME_MS - self.rules.prefix_padding_ms
        self._end(event.end_ms)
        self._first, self._probabilities = cut, rest
        return [event, self._begin(start_ms)]

    def _event(self, end_ms: int, last: int, *, is_cut: bool = False) -> TurnEnd:
        assert self._start_ms is not None
        spoken = self._probabilities[: max(1, last - self._first)]
        return TurnEnd(
            start_ms=self._start_ms,
            end_ms=end_ms,
            speech_start_ms=self._first * FRAME_MS,
            speech_end_ms=last * FRAME_MS,
            probability=sum(spoken) / len(spoken),
            is_cut=is_cut,
        )

    def _end(self, end_ms: int) -> None:
        self._start_ms, self._least_start_ms = None, end_ms
        self._num_candidates, self._probabilities = 0, []
