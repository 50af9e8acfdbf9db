"""Text segmentation for the talker: cuts a text, whole or streamed, into fragments that are spoken one by one.

A streaming cut at punctuation comes first, then a cut by semantic length. Both work on the raw text; numbers are read
afterwards, fragment by fragment. Source: the official `omni_audio_generation` loop, `front/toolkit.py` and
`front/text_segment_cut.py`.
"""

from __future__ import annotations

import re
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from mingc.text.reference.normalize import has_chinese, normalize_fragment

MAX_FRAGMENT_LENGTH = 50
_MIN_TAIL_LENGTH = 5
_MAX_CHARACTERS = 600  # longer texts are normalised in parts, because number patterns take up to cubic time
_MIN_FIRST_ELEMENTS = 12
_MIN_LATER_ELEMENTS = 8

_ELEMENT = re.compile(r"(?:[a-zA-Z]\.)+|[a-zA-Z]+(?:['-][a-zA-Z]+)*|\d+(?:\.\d+)?|[一-鿿]|\s+|\S")
_SPEAKABLE = re.compile("[a-zA-Z一-鿿1-9]")
_ENDS_IN_CHINESE = re.compile("[一-鿿]$")
_CUT_MARKS = "！？。，!?"

# Placeholder of a dot inside a number or an abbreviation. It counts as a word, as in the reference.
_DOT = "\ue000"
_WORD = re.compile(rf"[a-zA-Z]+|[一-龥]|{_DOT}")
_UNIT = re.compile(rf"{_DOT}|[a-zA-Z]+|[一-龥]|[^a-zA-Z一-龥{_DOT}]+")
_SILENT = string.punctuation + string.whitespace
_SENTENCE_MARKS = "。！？"
_CLAUSE_MARKS = "，,;；"
_WIDE_MARKS = str.maketrans(".!?,", "。！？，")


@dataclass(frozen=True, kw_only=True, slots=True)
class FragmentState:
    """State of the streaming cut at a place in a text, from which another text can continue.

    `num_elements`: how many elements the open fragment has. `has_chinese`: whether it contains Chinese. `has_spoken`:
    whether a fragment has been completed.
    """

    num_elements: int = 0
    has_chinese: bool = False
    has_spoken: bool = False


class Fragmenter:
    """Streaming cut at punctuation: collects elements until they form a fragment."""

    def __init__(self, state: FragmentState | None = None) -> None:
        state = state or FragmentState()
        self._buffer: list[str] = []
        self._num_before = state.num_elements
        self._has_chinese = state.has_chinese
        self._has_spoken = state.has_spoken

    @property
    def state(self) -> FragmentState:
        return FragmentState(
            num_elements=self._num_before + len(self._buffer),
            has_chinese=self._has_chinese,
            has_spoken=self._has_spoken,
        )

    def push(self, element: str) -> str:
        """The fragment that `element` completes, or ""."""
        is_long = self._is_long()
        self._has_chinese = self._has_chinese or has_chinese(element)
        if element.endswith("\n"):
            _append_line_end(self._buffer, element)
            is_cut = self._is_long()
        else:
            is_cut = is_long and _ends_clause(element, self._buffer)
            self._buffer.append(element)
        return self.flush() if is_cut else ""

    def flush(self) -> str:
        """The collected elements as a fragment."""
        fragment = "".join(self._buffer)
        self._buffer.clear()
        self._num_before, self._has_chinese = 0, False
        self._has_spoken = self._has_spoken or _has_content(fragment)
        return fragment

    def _is_long(self) -> bool:
        minimum = _MIN_LATER_ELEMENTS if self._has_spoken else _MIN_FIRST_ELEMENTS
        return self._num_before + len(self._buffer) >= minimum


def iter_speech_segments(
    text: str | Iterable[str], max_length: int = MAX_FRAGMENT_LENGTH, *, state: FragmentState | None = None
) -> Iterator[str]:
    """Yield the normalised input strings of the acoustic model, in order, as soon as their deltas have been read.

    A `str` is read character by character, an iterable of deltas element by element (words, numbers, ideographs), so
    the two can be cut at different places. `state` is the state at the end of the preceding text, if any. Fragments
    that normalise to nothing (links) are skipped.
    """
    for index, fragment in enumerate(iter_fragments(text, max_length, state=state)):
        in_chinese = index == 0 and state is not None and state.has_chinese
        for piece in _short_pieces(fragment):
            spoken = normalize_fragment(piece, in_chinese=in_chinese)
            if spoken.strip():
                yield spoken


def iter_fragments(
    text: str | Iterable[str], max_length: int = MAX_FRAGMENT_LENGTH, *, state: FragmentState | None = None
) -> Iterator[str]:
    """Yield the fragments of `text` before normalisation."""
    if max_length < 1:
        raise ValueError(f"max_length must be at least 1, got {max_length}")
    fragmenter = Fragmenter(state)
    for element in iter_elements(text):
        yield from cut_by_length(fragmenter.push(element), max_length)
    rest = fragmenter.flush()
    if _SPEAKABLE.search(rest):
        yield from cut_by_length(rest, max_length)


def _short_pieces(fragment: str) -> Iterator[str]:
    """Split an overlong fragment after spaces. Digits and marks have no semantic length, so it may be unbounded."""
    while len(fragment) > _MAX_CHARACTERS:
        end = fragment.rfind(" ", 0, _MAX_CHARACTERS) + 1 or _MAX_CHARACTERS
        yield fragment[:end]
        fragment = fragment[end:]
    yield fragment


def iter_elements(text: str | Iterable[str]) -> Iterator[str]:
    """Yield the elements of each delta: words, numbers, ideographs, white space, marks. A `str` yields characters."""
    for delta in text:
        for match in _ELEMENT.finditer(delta):
            yield match[0]


def _ends_clause(element: str, buffer: list[str]) -> bool:
    if element[-1] in _CUT_MARKS:
        return True
    # A dot after a digit may be a decimal point.
    return element[-1] == "." and not re.search("[0-9]$", buffer[-1] if buffer else "")


def _append_line_end(buffer: list[str], element: str) -> None:
    """Append a line end to the buffer: as a comma after Chinese, as nothing audible after English."""
    if not buffer:
        return
    if has_chinese("".join(buffer)):
        if _ENDS_IN_CHINESE.search(buffer[-1]):
            buffer.append("，")
        return
    stripped = element.removesuffix("\n")
    # An empty element also counts towards the length of the buffer.
    buffer.append(f"{stripped}." if re.search("[a-zA-Z]$", stripped) else stripped)


def semantic_length(text: str) -> int:
    """Number of ideographs (U+4E00 to U+9FA5) plus runs of Latin letters."""
    return len(_WORD.findall(text))


def cut_by_length(text: str, max_length: int = MAX_FRAGMENT_LENGTH) -> list[str]:
    """Cut `text` into fragments of at most `max_length` semantic units, at sentence and clause marks where possible.

    A short text is one fragment; a longer one gets full-width `。！？，`. White space between fragments is dropped or
    becomes one space. A text of only ASCII punctuation and white space has no fragment.
    """
    if not _has_content(text):
        return []
    text = _protect_dots(text).replace("\n", " ").replace("。，", "。")
    if semantic_length(text) <= max_length:
        return [_restore_dots(text)]
    fragments: list[str] = []
    for sentence in _sentences(text.translate(_WIDE_MARKS)):
        for piece in _pieces(_clauses(sentence), max_length):
            _append_fragment(fragments, piece, max_length)
    return [_restore_dots(fragment) for fragment in fragments]


def _has_content(text: str) -> bool:
    return any(character not in _SILENT for character in text)


def _protect_dots(text: str) -> str:
    # The pattern consumes both digits, so every second dot of 192.168.0.1 stays a full stop, as in the reference.
    text = re.sub(r"(\d)\.(\d)", rf"\1{_DOT}\2", text)
    return re.sub(r"([A-Z])\.(?=[A-Z])", rf"\1{_DOT}", text)


def _restore_dots(text: str) -> str:
    return text.replace(_DOT, ".")


def _split_after(text: str, marks: str) -> list[str]:
    """Split after each of `marks`; the last part may have none. Parts are stripped."""
    return [part.strip() for part in re.findall(f"[^{marks}]*[{marks}]|[^{marks}]+", text)]


def _sentences(text: str) -> list[str]:
    sentences = _split_after(text, _SENTENCE_MARKS)
    if not text.endswith(tuple(_SENTENCE_MARKS)):
        sentences[-1] += "。"
    return [sentence for sentence in sentences if sentence]


def _clauses(sentence: str) -> list[str]:
    clauses: list[str] = []
    for clause in _split_after(sentence, _CLAUSE_MARKS):
        if _has_content(clause):
            clauses.append(clause)
        elif clauses:
            clauses[-1] += clause
    return clauses


def _pieces(clauses: list[str], max_length: int) -> Iterator[str]:
    """Join each short clause to the next one and split long clauses."""
    waiting = iter(range(len(clauses)))
    for index in waiting:
        clause = clauses[index]
        length = semantic_length(clause)
        if length < _MIN_TAIL_LENGTH and index + 1 < len(clauses):
            joined = clause + clauses[index + 1]
            if semantic_length(joined) <= max_length:
                next(waiting)
                yield joined
                continue
        if length > max_length:
            yield from _split_units(clause, max_length)
        else:
            yield clause


def _split_units(clause: str, max_length: int) -> Iterator[str]:
    """Fill pieces up to `max_length` with ideographs, words and the characters between them."""
    piece, length = "", 0
    for unit in _UNIT.findall(clause):
        unit_length = semantic_length(unit)
        if length + unit_length > max_length:
            yield piece
            piece, length = "", 0
        piece += unit
        length += unit_length
    yield piece


def _append_fragment(fragments: list[str], piece: str, max_length: int) -> None:
    """Merge `piece` into the last fragment if both fit, otherwise append it."""
    piece = piece.lstrip("，,:;" + string.whitespace)
    if not _has_content(piece):
        return
    length = semantic_length(piece)
    if not fragments or semantic_length(fragments[-1]) + length > max_length:
        fragments.append(piece)
        return
    last = fragments[-1]
    # A short tail after a finished sentence is a separate fragment.
    if last.endswith(tuple(_SENTENCE_MARKS)) and length < _MIN_TAIL_LENGTH:
        fragments.append(piece)
        return
    space = " " if re.match("[a-zA-Z0-9]", piece) and not last.endswith(" ") else ""
    fragments[-1] = last + space + piece
