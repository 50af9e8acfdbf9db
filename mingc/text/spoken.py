"""What is spoken of a text: the pieces for the talker, by one of two sets of rules.

`natural` reads English and Chinese as a person does. `reference` are the rules of the official code, which the recorded
goldens pin.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

from mingc.text.natural.segments import NaturalSegmenter
from mingc.text.reference.live import LiveSegment, LiveSegmenter
from mingc.text.reference.segment import iter_speech_segments
from mingc.text.stream_filters import ThoughtFilter

SpeechText = Literal["natural", "reference"]
SPEECH_TEXTS: tuple[SpeechText, ...] = get_args(SpeechText)

_TICK_S = 0.05  # how often to check whether the first segment has waited long enough
_FIRST_WAIT_S = 0.45
_MAX_UNITS = 40  # of a natural segment


def spoken_pieces(text: str, max_length: int, rules: SpeechText) -> Iterator[str]:
    """Yield the normalised pieces of a whole text, one per segment of the talker, of at most `max_length` units."""
    if rules == "reference":
        yield from iter_speech_segments(text, max_length)
        return
    segmenter = _natural(max_length, first_wait_s=math.inf)
    yield from segmenter.push(text)
    yield from segmenter.flush()


class SpokenText:
    """Turns the text deltas of one answer, without its thought, into normalised pieces, one per segment of the talker.

    Iterating over a result computes the pieces; iterate over one result before the next call.

    Args:
        max_length: length of the longest piece, in words and ideographs.
        is_reproducible: whether the pieces depend on the text alone; otherwise the first segment has a maximum wait.
        clock: returns seconds, for this wait.

    Attributes:
        tick_s: call `tick` after so many seconds without a delta; None: never.
    """

    def __init__(
        self,
        max_length: int,
        rules: SpeechText,
        *,
        is_reproducible: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tick_s = None if is_reproducible else _TICK_S
        self._thoughts = ThoughtFilter()
        wait_s = math.inf if is_reproducible else _FIRST_WAIT_S
        self._segmenter = (
            _natural(max_length, first_wait_s=wait_s, clock=clock)
            if rules == "natural"
            else _ReferenceSegmenter(max_length, first_wait_s=wait_s, clock=clock)
        )

    def push(self, delta: str) -> Iterator[str]:
        """The pieces that `delta` completes."""
        return self._segmenter.push(self._thoughts.push(delta))

    def tick(self) -> Iterator[str]:
        """The pieces that have waited long enough."""
        return self._segmenter.tick()

    def finish(self) -> Iterator[str]:
        """The remaining pieces, at the end of the answer."""
        yield from self._segmenter.push(self._thoughts.flush())
        yield from self._segmenter.flush()


def _natural(
    max_length: int, *, first_wait_s: float, clock: Callable[[], float] = time.monotonic
) -> NaturalSegmenter:
    return NaturalSegmenter(min(max_length, _MAX_UNITS), first_wait_s=first_wait_s, clock=clock)


class _ReferenceSegmenter:
    """The live segmenter with the official cut behind it."""

    def __init__(self, max_length: int, *, first_wait_s: float, clock: Callable[[], float]) -> None:
        self._max_length = max_length
        self._segmenter = LiveSegmenter(clock, first_wait_ms=first_wait_s * 1000)

    def push(self, delta: str) -> Iterator[str]:
        return self._pieces(self._segmenter.push(delta))

    def tick(self) -> Iterator[str]:
        return self._pieces(self._segmenter.tick())

    def flush(self) -> Iterator[str]:
        return self._pieces(self._segmenter.flush())

    def _pieces(self, segments: Iterable[LiveSegment]) -> Iterator[str]:
        for segment in segments:
            yield from iter_speech_segments(segment.text, self._max_length, state=segment.state)
