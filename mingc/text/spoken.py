"""What is spoken of a text: the pieces for the talker, by one of two sets of rules.

`natural` reads English and Chinese as a person does. `reference` are the rules of the official code, which the recorded
goldens pin.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, get_args

from mingc.text.natural.segments import NaturalSegmenter
from mingc.text.reference.live import LiveSegment, LiveSegmenter
from mingc.text.reference.segment import iter_speech_segments
from mingc.text.spoken_piece import SpokenPiece, places_of_parts
from mingc.text.stream_filters import ThoughtSplitter

SpeechText = Literal["natural", "reference"]
SPEECH_TEXTS: tuple[SpeechText, ...] = get_args(SpeechText)

_MAX_UNITS = 40  # of a natural segment


def spoken_pieces(text: str, max_length: int, rules: SpeechText) -> Iterator[str]:
    """Yield the normalised pieces of a whole text, one per segment of the talker, of at most `max_length` units."""
    if rules == "reference":
        yield from iter_speech_segments(text, max_length)
        return
    segmenter = NaturalSegmenter(min(max_length, _MAX_UNITS), first_min_units=None)
    for pieces in (segmenter.push(text), segmenter.flush()):
        yield from (piece.text for piece in pieces)


class SpokenText:
    """Turns the text deltas of one answer, without its thought, into normalised pieces, one per segment of the talker.

    The first piece ends with the first clause that is long enough, so that speech starts early; the pieces depend on
    the text alone. Iterating over a result computes the pieces; iterate over one result before the next call.

    Pieces end where the text ends that they say. What is not spoken (a thought, a block of code, blanks) belongs to the
    piece after it; at the end of the text, to the last piece, or to none if that was complete before.

    Args:
        max_length: length of the longest piece, in words and ideographs.
        starts_early: False: the first piece ends with a sentence, too. By the natural rules the pieces are then those
            of `spoken_pieces`.
    """

    def __init__(self, max_length: int, rules: SpeechText, *, starts_early: bool = True) -> None:
        self._thoughts = ThoughtSplitter()
        self._num_skipped = 0  # characters of the text that the segmenter has not got
        self._segmenter: NaturalSegmenter | _ReferenceSegmenter
        if rules == "reference":
            self._segmenter = _ReferenceSegmenter(max_length, starts_early=starts_early)
        elif starts_early:
            self._segmenter = NaturalSegmenter(min(max_length, _MAX_UNITS))
        else:
            self._segmenter = NaturalSegmenter(min(max_length, _MAX_UNITS), first_min_units=None)

    def push(self, delta: str) -> Iterator[SpokenPiece]:
        """The pieces that `delta` completes."""
        text = self._thoughts.push(delta)[1]
        self._num_skipped += len(delta) - len(text)
        return self._placed(self._segmenter.push(text))

    def finish(self) -> Iterator[SpokenPiece]:
        """The remaining pieces, at the end of the answer or where something else than text stands."""
        rest = self._thoughts.flush()[1]
        self._num_skipped -= len(rest)
        yield from self._placed(self._segmenter.push(rest))
        yield from self._placed(self._segmenter.flush())

    def _placed(self, pieces: Iterable[SpokenPiece]) -> Iterator[SpokenPiece]:
        for text, end in pieces:
            yield SpokenPiece(text, None if end is None else end + self._num_skipped)


class _ReferenceSegmenter:
    """The live segmenter with the official cut behind it."""

    def __init__(self, max_length: int, *, starts_early: bool) -> None:
        self._max_length = max_length
        self._segmenter = LiveSegmenter() if starts_early else LiveSegmenter(first_min_units=8)
        self._start = 0  # of the next segment, in the text

    def push(self, delta: str) -> Iterator[SpokenPiece]:
        return self._pieces(self._segmenter.push(delta))

    def flush(self) -> Iterator[SpokenPiece]:
        return self._pieces(self._segmenter.flush())

    def _pieces(self, segments: Iterable[LiveSegment]) -> Iterator[SpokenPiece]:
        for segment in segments:
            pieces = list(iter_speech_segments(segment.text, self._max_length, state=segment.state))
            for piece, place in zip(pieces, places_of_parts(segment.text, [*map(len, pieces)]), strict=False):
                yield SpokenPiece(piece, self._start + place)
            self._start += len(segment.text)
