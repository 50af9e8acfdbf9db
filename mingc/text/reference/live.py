"""Live segmentation: cuts the text deltas of a running answer into segments for the talker.

The first segment ends with the first clause that is long enough, so that speech starts early; later segments end with a
sentence. All segments have a maximum length. They are raw text with the state of the streaming cut: pass both to
`iter_speech_segments`.

Cuts do not change the spoken words: none is next to a digit, and a cut inside a fragment of the streaming cut keeps the
language in which its numbers are read.

Rules and constants come from the segmenter of sglang-omni for this model, with three differences: Chinese is counted
by character (there, a text without spaces counts as one word and waits for the end), a word that may still grow is not
cut, and the first segment ends with a clause instead of 450 ms after its first text: cuts depend on the text alone.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mingc.text.reference.segment import Fragmenter, FragmentState

# One unit: an ideograph, kana or hangul syllable, or a run of anything else between spaces.
_WIDE = "぀-ヿ㐀-䶿一-鿿가-힯豈-﫿"
_UNIT = re.compile(rf"[{_WIDE}]|[^\s{_WIDE}]*?[^\W_{_WIDE}][^\s{_WIDE}]*")
_CLOSERS = "\"'”’）)」』】》"
_SENTENCE_END = re.compile(rf"[.!?;。！？；]+[{_CLOSERS}]*")
_CLAUSE_END = re.compile(rf"[,，、:：]+[{_CLOSERS}]*")
_OPEN_WORD = re.compile(rf"[^\s{_WIDE}]*[^\W_{_WIDE}]$")
_MARKS = re.compile(rf"[^\w\s{_WIDE}]*")
_INITIALS = re.compile(r"\w\.\w.\Z")
_MAY_GO_ON = re.compile(r"\d\Z|(?<!\w)[A-Za-z]\Z")
_TITLE = re.compile(r"[A-Z][a-z]\.\Z")
_DIGIT = re.compile(r"\d")
# A link or address, with its beginning and its rest, and the characters that continue it after a mark.
_LINK = re.compile(rf"(?:(?<![a-zA-Z])[a-zA-Z]+://|(?<!\w)www(?!\w)|\w@)(?P<rest>[^\s{_WIDE}]*)")
_IN_LINK = re.compile(r"[a-zA-Z0-9/=&_%#-]")
# Markup that is removed up to its counterpart, and words that change the reading of later numbers.
_LONG_CONTEXT = re.compile(r"[$`\[]|版本|SN|sn|序列")
_NUMBER_CONTEXT = 8  # characters between a number and a cut without a mark, so that it keeps its unit


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveSegment:
    """The raw text of one segment, and the state of the streaming cut at its start."""

    text: str
    state: FragmentState


class LiveSegmenter:
    """Segmenter of one utterance. Not thread-safe.

    The concatenated segments equal the pushed text. Call `flush` once at the end.
    """

    def __init__(self, *, min_units: int = 8, max_units: int = 40, first_min_units: int = 4) -> None:
        """Units are Chinese characters and words."""
        if not 0 < first_min_units <= min_units <= max_units:
            raise ValueError(
                f"want 0 < first_min_units <= min_units <= max_units, got {first_min_units}, {min_units}, {max_units}"
            )
        self._min_units = min_units
        self._max_units = max_units
        self._first_min_units = first_min_units
        self._buffer = ""
        self._fragmenter = Fragmenter()
        self._states = [FragmentState()]  # state before each buffer position, and at the end
        self._num_segments = 0

    def push(self, delta: str) -> list[LiveSegment]:
        """Append text and return the segments that it completes."""
        self._buffer += delta
        for character in delta:
            self._fragmenter.push(character)
            self._states.append(self._fragmenter.state)
        segments: list[LiveSegment] = []
        while end := self._next_end():
            segments += self._take(end)
        return segments

    def flush(self) -> list[LiveSegment]:
        """Return the remaining text as a segment, at the end of the answer."""
        return self._take(len(self._buffer)) if self._buffer.strip() else []

    def _take(self, end: int) -> list[LiveSegment]:
        if not end:
            return []
        segment = LiveSegment(text=self._buffer[:end], state=self._states[0])
        self._buffer, self._states = self._buffer[end:], self._states[end:]
        self._num_segments += 1
        return [segment]

    def _unit_ends(self) -> list[int]:
        return [match.end() for match in _UNIT.finditer(self._buffer)]

    def _next_end(self) -> int:
        """End of the next segment in the buffer, or 0 when it has to wait."""
        unit_ends = self._unit_ends()
        if not self._num_segments and len(unit_ends) >= self._first_min_units:
            whole = len(self._buffer)
            ends = sorted([*self._sentence_ends(whole), *self._clause_ends(whole)])
            first = next((end for end in ends if bisect_right(unit_ends, end) >= self._first_min_units), 0)
            if first:
                return first
        if len(unit_ends) < self._min_units:
            return 0
        limit = self._limit(unit_ends)
        end = _last(self._sentence_ends(limit or len(self._buffer)), unit_ends, self._min_units)
        if end or not limit:
            return end
        # The limit is hard: without a sentence end, cut at a clause end, or far from numbers.
        return (
            _last(self._clause_ends(limit), unit_ends, self._min_units)
            or _last(self._word_ends(unit_ends, limit), unit_ends, self._min_units)
            or limit
        )

    def _limit(self, unit_ends: list[int]) -> int:
        """End of the last unit within the limit, or 0 while the whole buffer may fit."""
        if len(unit_ends) < self._max_units:
            return 0
        end = unit_ends[self._max_units - 1]
        # The unit at the end of the buffer is incomplete while letters or digits can follow.
        if end == len(self._buffer) and _OPEN_WORD.search(self._buffer):
            return 0
        marks = _MARKS.match(self._buffer, end)
        return marks.end() if marks else end

    def _sentence_ends(self, limit: int) -> Iterator[int]:
        # Links are found once for all marks, of which a long text without spaces has many.
        links = [match.span("rest") for match in _LINK.finditer(self._buffer)]
        for match in _SENTENCE_END.finditer(self._buffer, 0, limit):
            if self._ends_sentence(match, links) and self._keeps_words(match.start(), match.end()):
                yield match.end()

    def _clause_ends(self, limit: int) -> Iterator[int]:
        """Ends of clauses without a digit on either side of the mark; the next character must have arrived."""
        for match in _CLAUSE_END.finditer(self._buffer, 0, limit):
            before = self._buffer[: match.start()].rstrip()[-1:]
            after = self._buffer[match.end() :].lstrip()[:1]
            is_word_mark = match[0].isascii() and not self._buffer[match.end() :][:1].isspace()
            if not after or before.isdigit() or after.isdigit() or is_word_mark:
                continue
            if self._keeps_words(match.start(), match.end()):
                yield match.end()

    def _word_ends(self, unit_ends: list[int], limit: int) -> Iterator[int]:
        """Ends of units without a digit nearby, for a text without marks."""
        for end in unit_ends:
            nearby = self._buffer[max(0, end - _NUMBER_CONTEXT) : end + _NUMBER_CONTEXT]
            if end <= limit and not _DIGIT.search(nearby):
                yield end

    def _keeps_words(self, start: int, end: int) -> bool:
        """Whether a cut after the mark [start, end) changes no spoken word of the text, whatever follows."""
        if any(state.num_elements == 0 for state in self._states[start + 1 : end + 1]):
            return True  # the streaming cut ends a fragment here
        opening = self._fragment_start(end)
        fragment = self._buffer[opening:end]
        if _LONG_CONTEXT.search(fragment):
            return False
        return self._states[end].has_chinese or not _DIGIT.search(fragment)

    def _fragment_start(self, end: int) -> int:
        """Start of the open fragment at `end`, as far as it is in the buffer."""
        return next((start for start in range(end, 0, -1) if self._states[start].num_elements == 0), 0)

    def _ends_sentence(self, match: re.Match[str], links: Iterable[tuple[int, int]]) -> bool:
        """`links`: start and end of the rest of each link."""
        text, end = self._buffer, match.end()
        if match[0].isascii() and any(first <= match.start() <= last for first, last in links):
            # The next characters may belong to the link: they decide.
            return end < len(text) and not _IN_LINK.match(text, end)
        if not match[0].startswith("."):
            return True
        if _is_abbreviation(text, match.start() + 1):
            return False
        if end == len(text):
            # `3.` may become 3.5 with the next delta, and `U.` U.S.
            return not _MAY_GO_ON.search(text[max(0, match.start() - 2) : match.start()])
        # A dot inside a word (`example.com`) does not end a sentence.
        return text[end].isspace() or not text[end].isalnum() or not text[end].isascii()


def _last(ends: Iterable[int], unit_ends: list[int], min_units: int) -> int:
    """The last of `ends` with at least `min_units` before it, or 0."""
    return max((end for end in ends if bisect_right(unit_ends, end) >= min_units), default=0)


def _is_abbreviation(text: str, end: int) -> bool:
    """Whether the dot before `end` belongs to an abbreviation: `U.S.`, `Dr.`."""
    return bool(_INITIALS.search(text, max(0, end - 4), end) or _TITLE.search(text, max(0, end - 3), end))
