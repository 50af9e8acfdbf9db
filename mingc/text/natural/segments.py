"""Joins the clauses of a text to segments for the talker, while the text arrives.

A segment ends with a sentence of at least `min_units`; the first one may end with a clause, so that speech starts
early. Segments are cut between spoken words, so cuts do not change them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mingc.text.natural.clauses import Clause, ClauseSplitter
from mingc.text.natural.reading import Language, read_clause
from mingc.text.spoken_piece import SpokenPiece, places_of_parts

_WIDE = "぀-ヿ㐀-䶿一-鿿가-힯豈-﫿"
_STARTS_WIDE = re.compile(rf"[{_WIDE}]")
_ENDS_WIDE = re.compile(rf"[{_WIDE}。，！？；：、]\Z")
# A word or an ideograph, kana or syllable, with the marks and blanks behind it.
_UNIT = re.compile(rf"(?:[{_WIDE}]|[^\s{_WIDE}]*[^\W_{_WIDE}][^\s{_WIDE}]*)[^\w{_WIDE}]*")
_SENTENCE_MARKS = ".!?;。！？；"
_PAUSE = re.compile(r"[,:，：、.!?;。！？；]\s*\Z")


@dataclass(frozen=True, slots=True)
class _Part:
    text: str
    num_units: int
    ends_sentence: bool
    end: int  # in the text


class NaturalSegmenter:
    """Segmenter of one text. Not thread-safe. Iterate over one result before the next call.

    Args:
        max_units: words and ideographs of the longest segment.
        min_units: of the shortest segment but the last.
        first_min_units: the first segment ends with the first clause at so many units; None: with a sentence.
    """

    def __init__(self, max_units: int, *, min_units: int = 8, first_min_units: int | None = 4) -> None:
        if max_units < 1:
            raise ValueError(f"max_units must be at least 1, got {max_units}")
        self._splitter = ClauseSplitter()
        self._language: Language = "en"
        self._parts: list[_Part] = []
        self._max_units = max_units
        self._min_units = min(min_units, max_units)
        self._first_min_units = first_min_units

    def push(self, delta: str) -> Iterator[SpokenPiece]:
        """The segments that `delta` completes."""
        yield from self._read(self._splitter.push(delta))

    def flush(self) -> Iterator[SpokenPiece]:
        """The remaining segments, at the end of the text."""
        yield from self._read(self._splitter.finish())
        if self._parts:
            yield self._take()._replace(end=self._splitter.num_pushed)

    def _read(self, clauses: Iterable[Clause]) -> Iterator[SpokenPiece]:
        for clause in clauses:
            words, self._language = read_clause(clause.text, self._language)
            if words:
                yield from self._add(words, clause)
            elif clause.ends_sentence and self._parts:  # an empty line ends the clause before it
                last = self._parts.pop()
                yield from self._add(last.text, clause)

    def _add(self, words: str, clause: Clause) -> Iterator[SpokenPiece]:
        pieces = list(_short_pieces(words, self._max_units))
        places = places_of_parts(clause.text, [num_units for _, num_units in pieces])
        start = clause.end - len(clause.text)
        for index, ((piece, num_units), place) in enumerate(zip(pieces, places, strict=True)):
            if self._parts and self._num_units + num_units > self._max_units:
                yield self._take()
            is_end = clause.ends_sentence and index == len(pieces) - 1
            self._parts.append(_Part(piece, num_units, is_end, start + place))
        is_early = self._first_min_units is not None and self._num_units >= self._first_min_units
        if is_early or (clause.ends_sentence and self._num_units >= self._min_units):
            yield self._take()

    @property
    def _num_units(self) -> int:
        return sum(part.num_units for part in self._parts)

    def _take(self) -> SpokenPiece:
        """The waiting parts as one segment; there is at least one."""
        taken, self._parts = self._parts, []
        self._first_min_units = None
        text = ""
        for part, before in zip(taken, [None, *taken], strict=False):
            text = part.text if before is None else _joined(text, part.text, is_apart=before.ends_sentence)
        return SpokenPiece(text, taken[-1].end)


def _joined(before: str, after: str, *, is_apart: bool) -> str:
    is_wide = _STARTS_WIDE.match(after) is not None and _ENDS_WIDE.search(before) is not None
    if is_apart and before[-1] not in _SENTENCE_MARKS:
        before = before.rstrip(",:，：、") + ("。" if is_wide else ".")
    return before + ("" if is_wide else " ") + after


def _short_pieces(text: str, max_units: int) -> Iterator[tuple[str, int]]:
    """Split spoken words into pieces of at most `max_units`, behind a mark where there is one in the second half."""
    units = [match.span() for match in _UNIT.finditer(text)]
    start = first = 0
    while len(units) - first > max_units:
        ends = range(first + max_units, first + max_units // 2, -1)
        cut = next((end for end in ends if _PAUSE.search(text, start, units[end - 1][1])), first + max_units)
        yield text[start : units[cut - 1][1]].rstrip(), cut - first
        start, first = units[cut - 1][1], cut
    yield text[start:], len(units) - first
