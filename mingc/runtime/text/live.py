"""Live segmentation: cut the text deltas of a running answer into segments for the talker.

The first segment leaves after a short wait so that speech starts early; later segments end with a sentence; all have a
maximum length. Segments are raw text: pass them through `speech_segments` before synthesis.

Rules and constants come from the segmenter of sglang-omni for this model, with two differences: Chinese is counted by
character (there, a text without spaces counts as one word and waits for the end), and a word that may still grow is not
cut.
"""

from __future__ import annotations

import re
import time
from bisect import bisect_right
from collections.abc import Callable

# One unit: an ideograph, kana or hangul syllable, or a run of anything else between spaces.
_WIDE = "぀-ヿ㐀-䶿一-鿿가-힯豈-﫿"
_UNIT = re.compile(rf"[{_WIDE}]|[^\s{_WIDE}]*?[^\W_{_WIDE}][^\s{_WIDE}]*")
_SENTENCE_END = re.compile(r"[.!?;。！？；]+[\"'”’）)」』】》]*")
_CLAUSE_END = re.compile(r"[,，、：:]+")
_OPEN_WORD = re.compile(rf"[^\s{_WIDE}]*[^\W_{_WIDE}]$")
_INITIALS = re.compile(r"\w\.\w.\Z")
_TITLE = re.compile(r"[A-Z][a-z]\.\Z")


class LiveSegmenter:
    """Segmenter of one utterance. Not thread-safe; it reads the clock and never sleeps.

    The concatenated segments equal the pushed text except for white space between them. Call `tick` while no delta
    arrives, and `flush` once at the end.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        min_units: int = 8,
        max_units: int = 40,
        first_min_units: int = 4,
        first_wait_ms: float = 450.0,
    ) -> None:
        """`clock` returns seconds. Units are Chinese characters and words."""
        if not 0 < first_min_units <= min_units <= max_units:
            raise ValueError(
                f"want 0 < first_min_units <= min_units <= max_units, got {first_min_units}, {min_units}, {max_units}"
            )
        self._clock = clock
        self._min_units = min_units
        self._max_units = max_units
        self._first_min_units = first_min_units
        self._first_wait_s = first_wait_ms / 1000.0
        self._buffer = ""
        self._started_s: float | None = None
        self._num_segments = 0

    def push(self, delta: str) -> list[str]:
        """Append text and return the segments that it completes."""
        self._buffer += delta
        self._note_start()
        segments: list[str] = []
        while end := self._next_end():
            segments += self._take(end)
        return segments + self.tick()

    def tick(self) -> list[str]:
        """Return the first segment once it has waited long enough; later segments wait for their end."""
        if self._num_segments or self._started_s is None:
            return []
        if self._clock() - self._started_s < self._first_wait_s:
            return []
        if count_units(self._buffer) < self._first_min_units:
            return []
        # The last word may continue in the next delta, so it stays.
        open_word = _OPEN_WORD.search(self._buffer)
        end = open_word.start() if open_word else len(self._buffer)
        return self._take(end)

    def flush(self) -> list[str]:
        """Return the remaining text as a segment, at the end of the answer."""
        return self._take(len(self._buffer))

    def _note_start(self) -> None:
        if self._started_s is None and self._buffer.strip():
            self._started_s = self._clock()

    def _take(self, end: int) -> list[str]:
        segment = self._buffer[:end].strip()
        self._buffer = self._buffer[end:]
        if not segment:
            return []
        self._buffer = self._buffer.lstrip()
        self._num_segments += 1
        self._started_s = None
        self._note_start()
        return [segment]

    def _next_end(self) -> int:
        """End of the next segment in the buffer, or 0 when it has to wait."""
        unit_ends = [match.end() for match in _UNIT.finditer(self._buffer)]
        if len(unit_ends) < self._min_units:
            return 0
        limit = self._limit(unit_ends)
        in_reach = self._buffer[: limit or len(self._buffer)]
        ends = [match.end() for match in _SENTENCE_END.finditer(in_reach) if self._ends_sentence(match)]
        if limit:
            # The limit is hard: without a sentence end, cut at a clause end.
            ends = ends or [match.end() for match in _CLAUSE_END.finditer(in_reach)]
            ends = [end for end in ends if bisect_right(unit_ends, end) >= self._min_units] or [limit]
        return max((end for end in ends if bisect_right(unit_ends, end) >= self._min_units), default=0)

    def _limit(self, unit_ends: list[int]) -> int:
        """End of the last unit within the limit, or 0 while the whole buffer may fit."""
        if len(unit_ends) < self._max_units:
            return 0
        end = unit_ends[self._max_units - 1]
        # The unit at the end of the buffer is incomplete while letters or digits can follow.
        if end == len(self._buffer) and _OPEN_WORD.search(self._buffer):
            return 0
        marks = re.compile(rf"[^\w\s{_WIDE}]*").match(self._buffer, end)
        return marks.end() if marks else end

    def _ends_sentence(self, match: re.Match[str]) -> bool:
        text, end = match.string, match.end()
        if not match[0].startswith("."):
            return True
        if _is_abbreviation(text, match.start() + 1):
            return False
        if end == len(text):
            # `3.` may become 3.5 with the next delta.
            return not text[match.start() - 1].isdigit()
        # A dot inside a word (`example.com`) does not end a sentence.
        return text[end].isspace() or not text[end].isalnum() or not text[end].isascii()


def count_units(text: str) -> int:
    """Number of Chinese characters plus words of other scripts; marks alone do not count."""
    return sum(1 for _ in _UNIT.finditer(text))


def _is_abbreviation(text: str, end: int) -> bool:
    """Whether the dot before `end` belongs to an abbreviation: `U.S.`, `Dr.`."""
    return bool(_INITIALS.search(text, max(0, end - 4), end) or _TITLE.search(text, max(0, end - 3), end))
