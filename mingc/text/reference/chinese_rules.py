"""First stage of the Chinese normaliser: reads numbers by their context, with regular expressions.

The text becomes a list of pieces (text, marks, digits). First compounds and then single numbers become readings by
their neighbours; last, marks between readings become 至, 负 or 大约. A number that matches no rule stays as digits for
the second stage (`chinese_grammar.py`). Source: the official `talker_tn/talker_re.py` and `re_utils`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import groupby, takewhile
from typing import Literal

from mingc.text.reference.chinese_compounds import (
    RANGE_MARKS,
    is_month_and_day,
    read_compound,
    read_date,
    split_range,
)
from mingc.text.reference.chinese_numerals import UnreadableNumberError, read_cardinal, read_telephone
from mingc.text.reference.chinese_tables import (
    CHINESE_UNITS,
    CURRENCIES,
    LATIN_UNITS,
    NUMERAL_CHARACTERS,
    PROPER_NAMES,
    WORDS_AFTER_COUNTS,
    WORDS_AFTER_SERIALS,
    WORDS_BEFORE_COUNTS,
    WORDS_BEFORE_SERIALS,
)

_UNITS = {**LATIN_UNITS, **{unit: unit for unit in CHINESE_UNITS}, **WORDS_AFTER_COUNTS}
_MARK_CHARACTERS = r"\-~～:：.+x*/÷=≥≤><"
_MARKS = f"[{_MARK_CHARACTERS}]+"
_TOKEN = re.compile(
    rf"(?P<compound>\d+(?:{_MARKS}\d+)+)|(?P<digits>\d+)|(?P<mark>{_MARKS})|(?P<text>[^\d{_MARK_CHARACTERS}]+)"
)
_PART = re.compile(r"\d+|\D+")
_LONGEST_WORD = 8  # no trigger word next to a number is longer

_Kind = Literal["text", "mark", "digits", "decimal", "reading"]
_CODE = re.compile(r"[A-Z0-9-]+")
_ANNOUNCEMENTS = ("SN", "sn", "序列")
_MIN_RUNS = 6
_PROPER_NAME = re.compile(
    rf"(?<!\d)(?:{'|'.join(map(re.escape, sorted(PROPER_NAMES, key=len, reverse=True)))})(?!\d)"
)


@dataclass(kw_only=True, slots=True)
class _Piece:
    """A part of the text. `text` is the unread remainder; a reading also has words, and the kind that they name."""

    kind: _Kind
    text: str = ""
    named: str = ""  # date, time, money, count_before, …: two readings of the same kind can form a range
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


def _number_words(piece: _Piece) -> str:
    return piece.number if piece.kind == "decimal" else read_cardinal(piece.text)


def _set_reading(piece: _Piece, named: str, *, prefix: str = "", suffix: str = "") -> None:
    piece.number = _number_words(piece)
    piece.kind, piece.named, piece.prefix, piece.suffix = "reading", named, prefix, suffix


def _longest_end(text: str, words: Collection[str]) -> str | None:
    """Longest of `words` at the end of `text`; a Latin word must not be the tail of a longer one."""
    for start in range(max(0, len(text) - _LONGEST_WORD), len(text)):
        word = text[start:]
        if word in words and not (_is_latin(word[0]) and start > 0 and _is_latin(text[start - 1])):
            return word
    return None


def _longest_start(text: str, words: Collection[str]) -> str | None:
    """Longest of `words` at the start of `text`; a Latin word must not be the head of a longer one."""
    for end in range(min(len(text), _LONGEST_WORD), 0, -1):
        word = text[:end]
        if word in words and not (_is_latin(word[-1]) and _is_latin(text[end : end + 1])):
            return word
    return None


def _is_latin(character: str) -> bool:
    return character.isascii() and character.isalpha()


def _take_before(pieces: list[_Piece], index: int, words: Collection[str]) -> str | None:
    if index == 0 or not pieces[index - 1].is_plain:
        return None
    neighbour = pieces[index - 1]
    if word := _longest_end(neighbour.text, words):
        neighbour.text = neighbour.text.removesuffix(word)
    return word


def _take_after(pieces: list[_Piece], index: int, words: Collection[str]) -> str | None:
    if index + 1 >= len(pieces) or not pieces[index + 1].is_plain:
        return None
    neighbour = pieces[index + 1]
    if word := _longest_start(neighbour.text, words):
        neighbour.text = neighbour.text.removeprefix(word)
    return word


def verbalize_numbers(text: str) -> str:
    """Read the numbers of `text` in Chinese; numbers that match no rule stay as digits.

    When a rule cannot read its number (`FM101.7` as a serial), the whole text is returned unchanged, as in the official
    code.
    """
    try:
        return _verbalize(text)
    except UnreadableNumberError:
        return text


def _verbalize(text: str) -> str:
    text = _spell_serials(_replace_proper_names(text.translate(NUMERAL_CHARACTERS)))
    pieces = _read_compounds(text)
    _read_single_numbers(pieces)
    _join_ranges(pieces)
    return "".join(piece.spoken() for piece in pieces)


def _replace_proper_names(text: str) -> str:
    """Spell out the names of `PROPER_NAMES` that do not touch a further digit."""
    return _PROPER_NAME.sub(lambda match: PROPER_NAMES[match[0]], text)


def _spell_serials(text: str) -> str:
    """Spell the digits of serial codes one by one (1 → 幺) and their dashes as 杠; letters stay.

    A code of capitals, digits and dashes with at least one letter and one digit is a serial when it follows an
    announcement (SN, 序列号), or alternates between letters, digits and dashes at least `_MIN_RUNS` times. Source: the
    official `talker_tn/re_utils/re_sn.py`.
    """
    pieces: list[str] = []
    end = 0
    for match in _CODE.finditer(text):
        code = match[0]
        if not (any(c.isdigit() for c in code) and any(c.isalpha() for c in code)):
            continue
        before = text[end : match.start()]
        is_announced = any(word in before for word in _ANNOUNCEMENTS)
        is_serial = is_announced or len(list(groupby(code, key=_character_kind))) >= _MIN_RUNS
        pieces += (before, _spell(code) if is_serial else code)
        end = match.end()
    return "".join(pieces) + text[end:]


def _character_kind(character: str) -> str:
    return "0" if character.isdigit() else "A" if character.isalpha() else "-"


def _spell(code: str) -> str:
    return "".join("杠" if c == "-" else read_telephone(c) if c.isdigit() else c for c in code)


def _read_compounds(text: str) -> list[_Piece]:
    pieces: list[_Piece] = []
    matches = list(_TOKEN.finditer(text))
    after = [match[0] for match in matches[1:]] + [""]
    taken = 0
    for match, following in zip(matches, after, strict=True):
        found, taken = match[0][taken:], 0
        if match["compound"]:
            before = pieces[-1].text if pieces else ""
            new_pieces, taken = _read_parts(_PART.findall(found), before, following)
            pieces += new_pieces
        elif match["digits"]:
            pieces.append(_Piece(kind="digits", text=found))
        elif match["mark"]:
            pieces.append(_Piece(kind="mark", text=found))
        elif found:
            pieces.append(_Piece(kind="text", text=found))
    return pieces


def _read_parts(parts: list[str], before: str, after: str) -> tuple[list[_Piece], int]:
    """Pieces of one compound, and the number of characters of `after` that they cover."""
    if reading := read_compound(parts, before, after):
        return [_reading(reading.kind, reading.spoken, reading.digits)], reading.taken_after
    if halves := split_range(parts):
        low = read_compound(halves[0], before, "至")
        high = read_compound(halves[1], "至", after)
        if low and high and low.kind == high.kind:
            return [
                _reading(low.kind, low.spoken, low.digits),
                _Piece(kind="text", text="至"),
                _reading(high.kind, high.spoken, high.digits),
            ], high.taken_after
    return [_Piece(kind="mark" if index % 2 else "digits", text=part) for index, part in enumerate(parts)], 0


def _reading(named: str, number: str, digits: str) -> _Piece:
    return _Piece(kind="decimal" if digits else "reading", text=digits, named=named, number=number)


def _read_single_numbers(pieces: list[_Piece]) -> None:
    """Turn digits and decimals into readings with the first rule of `_RULES` that matches their neighbours."""
    index = 0
    while index < len(pieces):
        piece = pieces[index]
        if piece.kind == "text" and not piece.text:
            del pieces[index]
            continue
        if piece.kind in ("digits", "decimal"):
            for rule in _RULES:
                if rule(pieces, index):
                    break
        index += 1


def _money_before(pieces: list[_Piece], index: int) -> bool:
    if symbol := _take_before(pieces, index, CURRENCIES):
        _set_reading(pieces[index], "money", suffix=CURRENCIES[symbol])
    return symbol is not None


def _money_after(pieces: list[_Piece], index: int) -> bool:
    if symbol := _take_after(pieces, index, CURRENCIES):
        _set_reading(pieces[index], "money", suffix=CURRENCIES[symbol])
    return symbol is not None


def _date(pieces: list[_Piece], index: int) -> bool:
    """Year, month and day by the words after the digits; a year alone has four characters."""
    row = pieces[index : index + 6]
    texts = [piece.text for piece in row]
    numbers = _leading_digits(row)
    match texts:
        case [year, "年", month, "月", day, word] if (
            numbers >= 3 and word[:1] in ("日", "号") and is_month_and_day(month, day)
        ):
            _replace_date(pieces, index, 5, read_date(year, month, day, word[0]))
        case [year, "年", month, word, *_] if (
            numbers >= 2 and word[:1] == "月" and is_month_and_day(month, "")
        ):
            _replace_date(pieces, index, 3, read_date(year, month, ""))
        case [month, "月", day, word, *_] if (
            numbers >= 2 and word[:1] in ("日", "号") and is_month_and_day(month, day)
        ):
            _replace_date(pieces, index, 3, read_date("", month, day, word[0]))
        case [year, word, *_] if word[:1] == "年" and len(year) == 4:
            if pieces[index].kind == "decimal":
                raise UnreadableNumberError(f"{year!r} cannot be read as a year")
            _replace_date(pieces, index, 1, read_date(year, "", ""))
        case _:
            return False
    return True


def _leading_digits(row: list[_Piece]) -> int:
    """Number of leading digit pieces among every second piece."""
    return len(list(takewhile(lambda piece: piece.kind == "digits", row[::2])))


def _replace_date(pieces: list[_Piece], index: int, length: int, spoken: str) -> None:
    """Replace `length` pieces by one reading and drop the first character of the piece after them."""
    pieces[index + length].text = pieces[index + length].text[1:]
    pieces[index : index + length] = [_reading("date", spoken, "")]


def _count_before(pieces: list[_Piece], index: int) -> bool:
    if word := _take_before(pieces, index, WORDS_BEFORE_COUNTS):
        _set_reading(pieces[index], "count_before", prefix=WORDS_BEFORE_COUNTS[word])
        return True
    if index and pieces[index - 1].named == "count" and pieces[index - 1].suffix == "等于":
        _set_reading(pieces[index], "count_before")
        return True
    return False


def _count_after(pieces: list[_Piece], index: int) -> bool:
    if unit := _take_after(pieces, index, _UNITS):
        _set_reading(pieces[index], "count", suffix=_UNITS[unit])
    return unit is not None


def _percent(pieces: list[_Piece], index: int) -> bool:
    sign = _take_after(pieces, index, "%")
    if sign:
        _set_reading(pieces[index], "percent", prefix="百分之")
    return sign is not None


def _serial_before(pieces: list[_Piece], index: int) -> bool:
    if word := _take_before(pieces, index, WORDS_BEFORE_SERIALS):
        _set_serial(pieces[index], prefix=word)
    return word is not None


def _serial_after(pieces: list[_Piece], index: int) -> bool:
    if word := _take_after(pieces, index, WORDS_AFTER_SERIALS):
        _set_serial(pieces[index], suffix=word)
    return word is not None


def _set_serial(piece: _Piece, *, prefix: str = "", suffix: str = "") -> None:
    if piece.kind == "decimal":
        raise UnreadableNumberError(f"{piece.text!r} cannot be read as a serial")
    piece.number = read_telephone(piece.text)
    piece.kind, piece.named, piece.prefix, piece.suffix = "reading", "serial", prefix, suffix


def _list_number(pieces: list[_Piece], index: int) -> bool:
    following = pieces[index + 1 : index + 3]
    if len(pieces[index].text) != 1 or [piece.text[:1] for piece in following] != [".", " "]:
        return False
    if following[0].text != ".":
        return False
    _set_reading(pieces[index], "list_number")
    return True


_RULES: tuple[Callable[[list[_Piece], int], bool], ...] = (
    _money_before,
    _date,
    _money_after,
    _count_before,
    _count_after,
    _percent,
    _serial_before,
    _serial_after,
    _list_number,
)

# Kinds that form ranges only with the same kind, and kinds that also take a sign or a plain number before them.
_JOINED_BY_KIND = frozenset({"date", "time", "ip"})
_MEASURED = frozenset({"decimal", "fraction", "money", "count", "count_before", "percent"})


def _join_ranges(pieces: list[_Piece]) -> None:
    """Read the marks before readings: 至 between two of the same kind, 负 or 大约 where no number precedes."""
    index = 1
    while index < len(pieces):
        piece, mark = pieces[index], pieces[index - 1]
        before = pieces[index - 2] if index > 1 else None
        if mark.kind == "mark" and mark.text in RANGE_MARKS:
            if piece.named in _JOINED_BY_KIND:
                if before and before.named == piece.named:
                    mark.kind, mark.text = "text", "至"
            elif piece.named in _MEASURED:
                if before and _are_alike(before, piece):
                    mark.kind, mark.text = "text", "至"
                elif before and before.kind == "digits":
                    piece.number = f"{read_cardinal(before.text)}至{piece.number}"
                    del pieces[index - 2 : index]
                    index -= 2
                elif before is None or before.kind == "text":
                    mark.kind, mark.text = "text", "负" if mark.text == "-" else "大约"
        index += 1


def _are_alike(low: _Piece, high: _Piece) -> bool:
    return low.named == high.named or (
        low.named in ("count_before", "money") and high.named in ("count", "money")
    )
