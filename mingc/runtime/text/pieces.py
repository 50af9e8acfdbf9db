"""The row of pieces that the Chinese rules work on, and what stands beside a number in it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from mingc.runtime.text.numerals_zh import read_cardinal

# Longer words are not looked for beside a number.
_LONGEST_WORD = 8

Kind = Literal["text", "mark", "digits", "decimal", "reading"]


@dataclass(kw_only=True, slots=True)
class Piece:
    """A stretch of the text. `text` is what is left of it; a reading also has words and what they name."""

    kind: Kind
    text: str = ""
    named: str = ""  # date, time, money, count_before, …: two of one name can form a range
    prefix: str = ""
    number: str = ""
    suffix: str = ""

    def spoken(self) -> str:
        if self.kind in ("text", "mark", "digits"):
            return self.text
        return self.prefix + self.number + self.suffix

    @property
    def is_plain(self) -> bool:
        return self.kind in ("text", "mark")


def _number_words(piece: Piece) -> str:
    return piece.number if piece.kind == "decimal" else read_cardinal(piece.text)


def set_reading(piece: Piece, named: str, *, prefix: str = "", suffix: str = "") -> None:
    piece.number = _number_words(piece)
    piece.kind, piece.named, piece.prefix, piece.suffix = "reading", named, prefix, suffix


def _longest_end(text: str, words: Collection[str]) -> str | None:
    """The longest of `words` that ends `text`; a Latin one must not be the tail of a longer Latin word."""
    for start in range(max(0, len(text) - _LONGEST_WORD), len(text)):
        word = text[start:]
        if word in words and not (_is_latin(word[0]) and start > 0 and _is_latin(text[start - 1])):
            return word
    return None


def _longest_start(text: str, words: Collection[str]) -> str | None:
    """The longest of `words` that starts `text`; a Latin one must not be the head of a longer Latin word."""
    for end in range(min(len(text), _LONGEST_WORD), 0, -1):
        word = text[:end]
        if word in words and not (_is_latin(word[-1]) and _is_latin(text[end : end + 1])):
            return word
    return None


def _is_latin(character: str) -> bool:
    return character.isascii() and character.isalpha()


def take_before(pieces: list[Piece], index: int, words: Collection[str]) -> str | None:
    if index == 0 or not pieces[index - 1].is_plain:
        return None
    neighbour = pieces[index - 1]
    if word := _longest_end(neighbour.text, words):
        neighbour.text = neighbour.text.removesuffix(word)
    return word


def take_after(pieces: list[Piece], index: int, words: Collection[str]) -> str | None:
    if index + 1 >= len(pieces) or not pieces[index + 1].is_plain:
        return None
    neighbour = pieces[index + 1]
    if word := _longest_start(neighbour.text, words):
        neighbour.text = neighbour.text.removeprefix(word)
    return word
