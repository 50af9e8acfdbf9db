"""Numbers of Chinese text to words: the regex stage of the official normaliser.

The text becomes a row of pieces (text, marks, digits); compounds and then single numbers turn into readings by
what stands beside them; last, marks between readings become 至, 负 or 大约. A number that nothing explains stays
as digits for the grammar stage (`leftovers.py`). Source: the official `talker_tn/talker_re.py` and `re_utils`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import takewhile

from mingc.runtime.text.characters import NUMERAL_CHARACTERS, replace_proper_names
from mingc.runtime.text.compounds import (
    RANGE_MARKS,
    is_month_and_day,
    read_compound,
    read_date,
    split_range,
)
from mingc.runtime.text.numerals_zh import UnreadableNumberError, read_cardinal, read_telephone
from mingc.runtime.text.pieces import Piece, set_reading, take_after, take_before
from mingc.runtime.text.serials import spell_serials
from mingc.runtime.text.units import (
    CHINESE_UNITS,
    CURRENCIES,
    LATIN_UNITS,
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


def speak_chinese_numbers(text: str) -> str:
    """Read the numbers of `text` in Chinese; numbers without a recognisable meaning stay as digits.

    When a number asks for a reading that it cannot have (`FM101.7` as a serial), the whole text is returned as it
    came, as the official code does.
    """
    try:
        return _speak(text)
    except UnreadableNumberError:
        return text


def _speak(text: str) -> str:
    text = spell_serials(replace_proper_names(text.translate(NUMERAL_CHARACTERS)))
    pieces = _read_compounds(text)
    _read_single_numbers(pieces)
    _join_ranges(pieces)
    return "".join(piece.spoken() for piece in pieces)


def _read_compounds(text: str) -> list[Piece]:
    pieces: list[Piece] = []
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
            pieces.append(Piece(kind="digits", text=found))
        elif match["mark"]:
            pieces.append(Piece(kind="mark", text=found))
        elif found:
            pieces.append(Piece(kind="text", text=found))
    return pieces


def _read_parts(parts: list[str], before: str, after: str) -> tuple[list[Piece], int]:
    """Pieces for one compound, and how many characters of `after` they speak for."""
    if reading := read_compound(parts, before, after):
        return [_reading(reading.kind, reading.spoken, reading.digits)], reading.taken_after
    if halves := split_range(parts):
        low = read_compound(halves[0], before, "至")
        high = read_compound(halves[1], "至", after)
        if low and high and low.kind == high.kind:
            return [
                _reading(low.kind, low.spoken, low.digits),
                Piece(kind="text", text="至"),
                _reading(high.kind, high.spoken, high.digits),
            ], high.taken_after
    return [Piece(kind="mark" if index % 2 else "digits", text=part) for index, part in enumerate(parts)], 0


def _reading(named: str, number: str, digits: str) -> Piece:
    return Piece(kind="decimal" if digits else "reading", text=digits, named=named, number=number)


def _read_single_numbers(pieces: list[Piece]) -> None:
    """Turn digits and decimals into readings by the first rule of `_RULES` that their neighbours satisfy."""
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


def _money_before(pieces: list[Piece], index: int) -> bool:
    if symbol := take_before(pieces, index, CURRENCIES):
        set_reading(pieces[index], "money", suffix=CURRENCIES[symbol])
    return symbol is not None


def _money_after(pieces: list[Piece], index: int) -> bool:
    if symbol := take_after(pieces, index, CURRENCIES):
        set_reading(pieces[index], "money", suffix=CURRENCIES[symbol])
    return symbol is not None


def _date(pieces: list[Piece], index: int) -> bool:
    """Year, month and day by the words that follow the digits; a lone year has four characters."""
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


def _leading_digits(row: list[Piece]) -> int:
    """How many of every second piece are digits, counted from the first on."""
    return len(list(takewhile(lambda piece: piece.kind == "digits", row[::2])))


def _replace_date(pieces: list[Piece], index: int, length: int, spoken: str) -> None:
    """Put one reading in the place of `length` pieces; the piece behind them loses its first character."""
    pieces[index + length].text = pieces[index + length].text[1:]
    pieces[index : index + length] = [_reading("date", spoken, "")]


def _count_before(pieces: list[Piece], index: int) -> bool:
    if word := take_before(pieces, index, WORDS_BEFORE_COUNTS):
        set_reading(pieces[index], "count_before", prefix=WORDS_BEFORE_COUNTS[word])
        return True
    if index and pieces[index - 1].named == "count" and pieces[index - 1].suffix == "等于":
        set_reading(pieces[index], "count_before")
        return True
    return False


def _count_after(pieces: list[Piece], index: int) -> bool:
    if unit := take_after(pieces, index, _UNITS):
        set_reading(pieces[index], "count", suffix=_UNITS[unit])
    return unit is not None


def _percent(pieces: list[Piece], index: int) -> bool:
    sign = take_after(pieces, index, "%")
    if sign:
        set_reading(pieces[index], "percent", prefix="百分之")
    return sign is not None


def _serial_before(pieces: list[Piece], index: int) -> bool:
    if word := take_before(pieces, index, WORDS_BEFORE_SERIALS):
        _set_serial(pieces[index], prefix=word)
    return word is not None


def _serial_after(pieces: list[Piece], index: int) -> bool:
    if word := take_after(pieces, index, WORDS_AFTER_SERIALS):
        _set_serial(pieces[index], suffix=word)
    return word is not None


def _set_serial(piece: Piece, *, prefix: str = "", suffix: str = "") -> None:
    if piece.kind == "decimal":
        raise UnreadableNumberError(f"{piece.text!r} cannot be read as a serial")
    piece.number = read_telephone(piece.text)
    piece.kind, piece.named, piece.prefix, piece.suffix = "reading", "serial", prefix, suffix


def _list_number(pieces: list[Piece], index: int) -> bool:
    following = pieces[index + 1 : index + 3]
    if len(pieces[index].text) != 1 or [piece.text[:1] for piece in following] != [".", " "]:
        return False
    if following[0].text != ".":
        return False
    set_reading(pieces[index], "list_number")
    return True


_RULES: tuple[Callable[[list[Piece], int], bool], ...] = (
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

# Readings that only join with their own kind, and readings that also take a sign or a bare number before them.
_JOINED_BY_KIND = frozenset({"date", "time", "ip"})
_MEASURED = frozenset({"decimal", "fraction", "money", "count", "count_before", "percent"})


def _join_ranges(pieces: list[Piece]) -> None:
    """Say the marks before readings: 至 between two of a kind, 负 or 大约 where nothing numeric precedes."""
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


def _are_alike(low: Piece, high: Piece) -> bool:
    return low.named == high.named or (
        low.named in ("count_before", "money") and high.named in ("count", "money")
    )
