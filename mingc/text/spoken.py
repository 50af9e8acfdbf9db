"""The spoken part of a streamed answer: its text without the thought, cut into the pieces that the talker speaks."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from mingc.text.live import LiveSegment, LiveSegmenter
from mingc.text.segment import iter_speech_segments
from mingc.text.stream_filters import ThoughtFilter


class SpokenText:
    """Turns the text deltas of one answer into normalised pieces, one per segment of the talker.

    Iterating over a result computes the pieces; iterate over one result before the next call.

    Args:
        max_length: length of the longest piece, in the units of `iter_speech_segments`.
    """

    def __init__(self, max_length: int) -> None:
        self._max_length = max_length
        self._thoughts = ThoughtFilter()
        self._segmenter = LiveSegmenter()

    def push(self, delta: str) -> Iterator[str]:
        """The pieces that `delta` completes."""
        return self._pieces(self._segmenter.push(self._thoughts.push(delta)))

    def finish(self) -> Iterator[str]:
        """The remaining pieces, at the end of the answer."""
        return self._pieces([*self._segmenter.push(self._thoughts.flush()), *self._segmenter.flush()])

    def _pieces(self, segments: Iterable[LiveSegment]) -> Iterator[str]:
        for segment in segments:
            yield from iter_speech_segments(segment.text, self._max_length, state=segment.state)
