"""Reads numbers of several parts in Chinese: dates, times, decimals, fractions, versions, addresses, phones, sums.

A compound is digits joined by marks without spaces (`10:30`, `2024-05-01`). Every reading that matches has a score, and
the highest score wins. Text between two compounds is not considered here. Source: `score_digits` of the classes in the
official `talker_tn/re_utils`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mingc.text.reference.chinese_numerals import read_cardinal, read_digits, read_telephone, read_year

RANGE_MARKS = ("-", "~", "～")

_COLONS = ("：", ":")
_HALF_DAYS = {
    **dict.fromkeys(("a m", "am", "A M", "AM"), "上午"),
    **dict.fromkeys(("p m", "pm", "P M", "PM"), "下午"),
}
_OPERATORS = {
    "+": "加",
    "-": "减",
    "x": "乘",
    "*": "乘",
    "/": "除",
    "÷": "除",
    "=": "等于",
    "≥": "大于等于",
    "≤": "小于等于",
    ">=": "大于等于",
    "<=": "小于等于",
    ">": "大于",
    "<": "小于",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compound:
    """One reading of a compound: kind, words, score, and the number of following characters that it covers."""

    kind: str
    spoken: str
    score: int
    digits: str = ""  # the digits of a decimal, which may still combine with a unit
    taken_after: int = 0


# A reader takes digits and marks in turn, with digits at both ends, and the text before and after the compound.
_Reader = Callable[[list[str], str, str], Compound | None]


def read_compound(parts: list[str], before: str, after: str) -> Compound | None:
    """The reading of `parts` with the highest score. Without one, the compound may be a range, or stays unread."""
    if len(parts) < 3:
        return None
    candidates = [compound for reader in _READERS if (compound := reader(parts, before, after))]
    return max(candidates, key=lambda compound: compound.score, default=None)


def split_range(parts: list[str]) -> tuple[list[str], list[str]] | None:
    """Split a compound that has no reading at the range mark nearest to its middle; None without a range mark."""
    marks = [index for index, part in enumerate(parts) if part in RANGE_MARKS]
    if not marks:
        return None
    middle = min(marks, key=lambda index: abs(index - len(parts) / 2))
    return parts[:middle], parts[middle + 1 :]


def read_decimal(whole: str, fraction: str) -> str:
    """Read a decimal: the whole part as a count, the fraction digit by digit."""
    return f"{read_cardinal(whole)}点{read_digits(fraction)}"


def _is_month(digits: str) -> bool:
    return len(digits) <= 2 and 1 <= int(digits) <= 12


def _is_day(digits: str) -> bool:
    return len(digits) <= 2 and 1 <= int(digits) <= 31


def read_date(year: str, month: str, day: str, day_word: str = "号") -> str:
    """Read a date; empty parts are left out."""
    words = f"{read_year(year)}年" if year else ""
    words += f"{read_cardinal(month)}月" if month else ""
    return words + (f"{read_cardinal(day)}{day_word}" if day else "")


def is_month_and_day(month: str, day: str) -> bool:
    """Whether the digits can be a month and a day of the month; an empty day is accepted."""
    return _is_month(month) and (not day or _is_day(day))


def _date(parts: list[str], before: str, after: str) -> Compound | None:
    match parts:
        case [year, ("." | "-" | "/") as mark, month, other, day] if mark == other and is_month_and_day(
            month, day
        ):
            return Compound(kind="date", spoken=read_date(year, month, day), score=80)
    return None


def _decimal(parts: list[str], before: str, after: str) -> Compound | None:
    match parts:
        case [whole, ".", fraction]:
            return Compound(
                kind="decimal", spoken=read_decimal(whole, fraction), score=50, digits=f"{whole}.{fraction}"
            )
    return None


def _time(parts: list[str], before: str, after: str) -> Compound | None:
    numbers, marks = parts[::2], parts[1::2]
    if (
        len(marks) not in (1, 2)
        or any(mark not in _COLONS for mark in marks)
        or any(len(n) > 2 for n in numbers)
    ):
        return None
    half_day, taken_after = "", 0
    for length in (2, 3):
        if after[:length] in _HALF_DAYS:
            half_day, taken_after = _HALF_DAYS[after[:length]], length
            break
    score = 60 if len(marks) == 1 else 80
    return Compound(kind="time", spoken=half_day + _clock(*numbers), score=score, taken_after=taken_after)


def _clock(hour: str, minute: str, second: str = "") -> str:
    words = "两点" if hour in ("2", "02") else f"{read_cardinal(hour)}点"
    if int(minute) == 0 and int(second or "0") == 0:
        return f"{words}整"
    words += f"{_sexagesimal(minute)}分"
    return words + (f"{_sexagesimal(second)}秒" if second else "")


def _sexagesimal(digits: str) -> str:
    """Read minutes or seconds: a first digit that is missing or zero is 零 (5 and 05 → 零五)."""
    if int(digits) == 0:
        return "零"
    return read_cardinal(digits) if len(digits) == 2 and digits[0] != "0" else f"零{read_cardinal(digits)}"


def _version(parts: list[str], before: str, after: str) -> Compound | None:
    match parts:
        case [major, ".", minor, ".", patch]:
            is_named = before.endswith(("v", "V")) or "版本" in before
            spoken = "点".join(read_cardinal(number) for number in (major, minor, patch))
            return Compound(kind="version", spoken=spoken, score=90 if is_named else 50)
    return None


def _ip_address(parts: list[str], before: str, after: str) -> Compound | None:
    if parts[1::2] != [".", ".", "."]:
        return None
    return Compound(kind="ip", spoken="点".join(read_telephone(number) for number in parts[::2]), score=50)


def _fraction(parts: list[str], before: str, after: str) -> Compound | None:
    match parts:
        case [above, "/", below]:
            start = ""
        case [low, ("-" | "~" | "～"), above, "/", below]:
            start = f"{read_cardinal(low)}至"
        case _:
            return None
    spoken = f"{start}{read_cardinal(below)}分之{read_cardinal(above)}"
    return Compound(kind="fraction", spoken=spoken, score=50)


def _telephone(parts: list[str], before: str, after: str) -> Compound | None:
    lengths = [len(number) for number in parts[::2]]
    if any(mark != "-" for mark in parts[1::2]):
        return None
    match lengths:
        case [3, 8] | [4, 7 | 8]:
            score = 80
        case [3 | 4, 3 | 4, 4] if parts[0] == "400" or parts[0][0] == "0":
            score = 90
        case _:
            return None
    spoken = "".join(read_telephone(number) for number in parts[::2])
    return Compound(kind="telephone", spoken=spoken, score=score)


def _formula(parts: list[str], before: str, after: str) -> Compound | None:
    marks = parts[1::2]
    # A single dash between two numbers is a range, not a difference.
    if marks == ["-"] or any(mark not in _OPERATORS for mark in marks):
        return None
    spoken = "".join(
        _OPERATORS[part] if index % 2 else read_cardinal(part) for index, part in enumerate(parts)
    )
    return Compound(kind="formula", spoken=spoken, score=85 if "=" in marks else 10)


_READERS: tuple[_Reader, ...] = (
    _date,
    _decimal,
    _time,
    _version,
    _ip_address,
    _fraction,
    _telephone,
    _formula,
)
