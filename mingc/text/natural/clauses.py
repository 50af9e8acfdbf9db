"""Cuts a text that arrives in deltas into clauses. The places do not depend on how it was split into deltas.

Every clause is read on its own, so a live answer has the same words as the whole text. A place is decided as soon as no
further text can change it: inside a link, a tag, inline code, a number or an abbreviation it waits for what follows.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_WINDOW = 640  # characters that decide about the end of a clause
_LONGEST = 600  # characters of a clause without any mark
_LONG = 40  # words or ideographs after which a clause is cut between words
_NEARBY = 12  # characters between such a cut and a digit or markup

# Ideographs, kana, hangul syllables, and the marks that are written with them.
_WIDE = "\u3000-〿぀-ヿ㐀-䶿一-鿿가-힯豈-﫿\uff01-\uff60"
_MARK = re.compile(
    r"(?P<line>\n)|(?P<code>`+)|(?P<tag><)|(?P<link>\[)"
    r"|(?P<wide>[。！？；])|(?P<pause>(?<=[぀-ヿ㐀-䶿一-鿿가-힯豈-﫿])，|(?<=[a-z]),)|(?P<end>[.!?;…]+)|(?P<clause>[,:，：—]+)"
)
_CLOSERS = re.compile(r"[\"'”’)\]*_~`]*")
_GOES_ON = re.compile(rf"\s|[{_WIDE}“”‘’—]")
_TAG = re.compile(r"<[/!?]?[A-Za-z][^<>\n]*>|<!--.*?-->")
_OPEN_TAG = re.compile(r"<(?:[/!?]?(?:[A-Za-z][^<>\n]*)?|!--.*)\Z")
_LINK = re.compile(r"\[[^\[\]\n]*\]\([^()\s]*\)")
_OPEN_LINK = re.compile(r"\[[^\[\]\n]*(?:\](?:\([^()\s]*)?)?\Z")
_ABBREVIATION = re.compile(
    r"(?:(?<![A-Za-z])[A-Za-z]|(?<![A-Za-z])(?:mrs?|ms|drs?|prof|st|no|nos|vs?|etc|inc|ltd|co|corp|jr|sr|gen|col"
    r"|capt|lt|sgt|"
    r"rev|hon|gov|sen|rep|pres|mt|ft|ave|blvd|rd|fig|figs|eq|sec|ch|vol|pp?|approx|est|dept|min|max|tel|ext|cf|al"
    r"|ca|apt|hwy|ln|sq|bros|appt|incl|misc|gov?t|assn|"
    r"jan|feb|mar|apr|jun|jul|aug|sept?|oct|nov|dec|mon|tues?|wed|thurs?|thu|fri|sat|sun))\.\Z",
    re.IGNORECASE,
)
_PLAIN_WORDS = re.compile(r"[\sA-Za-z'’,-]+")
_MONTH = re.compile(
    r"\b(?:jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?),\Z",
    re.IGNORECASE,
)
_LIST_NUMBER = re.compile(r"\s*\d+\.\Z")
_FENCE = re.compile(r"[ \t]*(`{3,}|~{3,})[^`\n]*\n")
_OPEN_FENCE = re.compile(r"\s*(?:`{3,}[^`\n]*|~{3,}[^\n]*|~{1,2})\Z")
_WORD = re.compile(rf"[{_WIDE}]|[^\s{_WIDE}]+")
_GAP = re.compile(rf"\s+|(?<=[{_WIDE}])(?=[{_WIDE}])")
_DELICATE = re.compile(r"[\d`<>\[\]$€£¥₹@/|]")


@dataclass(frozen=True, slots=True)
class Clause:
    """Raw text; all clauses together are the text, without blocks of code.

    `ends_sentence`: what follows is apart. `end`: characters of the text up to its end.
    """

    text: str
    ends_sentence: bool
    end: int


class ClauseSplitter:
    """Splitter of one text. Iterate over one result before the next call.

    Attributes:
        num_pushed: characters so far.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._fence = ""  # the marks that end the open block of code
        self.num_pushed = 0

    def push(self, delta: str) -> Iterator[Clause]:
        """The clauses that `delta` completes."""
        self._buffer += delta
        self.num_pushed += len(delta)
        return self._clauses(is_last=False)

    def finish(self) -> Iterator[Clause]:
        """The rest, at the end of the text. A block of code that was not closed is dropped."""
        return self._clauses(is_last=True)

    def _clauses(self, *, is_last: bool) -> Iterator[Clause]:
        while self._buffer:
            if self._fence:
                if not self._leave_fence(is_last=is_last):
                    return
                continue
            if fence := _FENCE.match(self._buffer):
                self._fence = fence[1]
                self._buffer = self._buffer[fence.end() :]
                continue
            window = self._buffer[:_WINDOW]
            is_complete = is_last or len(window) == _WINDOW
            if not is_complete and _OPEN_FENCE.match(window):
                return
            cut = _next_cut(window, is_complete=is_complete)
            if cut is None:
                return
            end, ends_sentence = cut
            clause, self._buffer = self._buffer[:end], self._buffer[end:]
            yield Clause(clause, ends_sentence, self.num_pushed - len(self._buffer))

    def _leave_fence(self, *, is_last: bool) -> bool:
        """Drop the lines of the open block; whether text follows it."""
        while self._fence:
            line, end, rest = self._buffer.partition("\n")
            if not end and not is_last:
                return False
            self._buffer = rest
            mark = line.strip()
            if mark.startswith(self._fence) and not mark.strip(self._fence[0]):
                self._fence = ""
            elif not end:
                return False
        return True


def _next_cut(text: str, *, is_complete: bool) -> tuple[int, bool] | None:
    """End of the first clause and whether it ends a sentence; None: more text is needed."""
    end, ends_sentence, is_open = _marked_end(text, is_complete=is_complete)
    limit = end if end is not None else len(text)
    if limit > _LONG:
        forced = _forced_end(text, limit, is_complete=is_complete)
        if forced is not None:
            return forced, False
    if is_open and not is_complete:
        return None
    if end is not None and not is_open and end <= _LONGEST:
        return end, ends_sentence
    if not is_complete:
        return None
    if len(text) < _WINDOW:
        return len(text), True
    return max(text.rfind(" ", 0, _LONGEST), text.rfind("\n", 0, _LONGEST)) + 1 or _LONGEST, False


def _marked_end(text: str, *, is_complete: bool) -> tuple[int | None, bool, bool]:
    """End of the clause by its marks or None, whether it ends a sentence, and whether more text can change that.

    If more text can change it, the end is the start of what is open.
    """
    position = 0
    while match := _MARK.search(text, position):
        position = end = match.end()
        is_at_end = end == len(text) and not is_complete
        match match.lastgroup:
            case "line":
                return end, True, False
            case "wide":
                return end, True, False
            case "pause" if match[0] == "，" or _ends_plain_words(text, end):
                return end, False, False  # whatever follows, so that speech need not wait for it
            case "code":
                closing, line = text.find(match[0], end), text.find("\n", end)
                if closing >= 0 and (line < 0 or closing < line) and not is_at_end:
                    position = closing + len(match[0])
                elif is_at_end or (line < 0 and not is_complete):
                    return match.start(), False, True
            case "tag" | "link":
                whole, opened = (_TAG, _OPEN_TAG) if match[0] == "<" else (_LINK, _OPEN_LINK)
                if found := whole.match(text, match.start()):
                    position = found.end()
                elif not is_complete and opened.match(text, match.start()):
                    return match.start(), False, True
            case "end":
                closed = _CLOSERS.match(text, end)
                assert closed is not None, "it may be empty"
                if closed.end() == len(text):
                    if not is_complete:
                        return match.start(), False, True
                    continue
                if not _GOES_ON.match(text, closed.end()):
                    continue
                is_number = _LIST_NUMBER.match(text[:end]) is not None
                if match[0] != "." or not (is_number or _ABBREVIATION.search(text, max(0, end - 8), end)):
                    return closed.end(), True, False
            case _:
                after = text[end:].lstrip(" ")[:1]
                if not after and not is_complete:
                    return match.start(), False, True
                is_word_mark = match[0][-1] in ",:" and not text[end : end + 1].isspace()
                if after and not is_word_mark and not (after.isdigit() or _digit_before(text, match.start())):
                    return end, False, False
    return None, False, False


def _ends_plain_words(text: str, end: int) -> bool:
    """Whether all before the comma at `end` are words; a date may go on behind the name of a month."""
    return _PLAIN_WORDS.fullmatch(text, 0, end) is not None and not _MONTH.search(text, 0, end)


def _digit_before(text: str, start: int) -> bool:
    return text[:start].rstrip()[-1:].isdigit()


def _forced_end(text: str, limit: int, *, is_complete: bool) -> int | None:
    """A place between words after `_LONG` of them, away from numbers and markup, before `limit`; None: there is none.

    It depends only on the text up to `_NEARBY` characters behind it.
    """
    num_words = 0
    for word in _WORD.finditer(text, 0, limit):
        num_words += 1
        end = word.end()
        if num_words < _LONG:
            continue
        if end + _NEARBY > (limit if not is_complete else len(text)) or end >= limit:
            return None
        if _GAP.match(text, end) and not _DELICATE.search(text, max(0, end - _NEARBY), end + _NEARBY):
            return end
    return None
