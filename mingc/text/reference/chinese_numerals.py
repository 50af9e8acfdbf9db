"""Reads digits in Chinese: as cardinals, digit by digit, or digit by digit with 幺 for 1.

Callers choose the reading; units and context are not considered here.
"""

from __future__ import annotations

_DIGITS = "零一二三四五六七八九"
_TELEPHONE_DIGITS = "零幺二三四五六七八九"
_PLACES = ("", "十", "百", "千")
_GROUPS = ("", "万", "亿", "兆", "京", "垓", "秭", "穰", "沟", "涧", "正", "载", "极")


class UnreadableNumberError(ValueError):
    """The number has no reading of the requested kind; its text must stay unchanged."""


def read_digits(digits: str) -> str:
    """Read each digit: 2024 → 二零二四."""
    return "".join(_DIGITS[_value(digit)] for digit in digits)


def read_telephone(digits: str) -> str:
    """Read each digit, 1 as 幺: 110 → 幺幺零."""
    return "".join(_TELEPHONE_DIGITS[_value(digit)] for digit in digits)


def read_year(digits: str) -> str:
    """Read each digit after the leading zeros."""
    return read_digits(digits.lstrip("0"))


def read_cardinal(digits: str) -> str:
    """Read a count in groups of four: 12345 → 一万两千三百四十五.

    Source: the regex stage of the official `talker_tn`. Groups are read separately, so leading zeros of a group are not
    spoken (10012 → 一万十二), and 2 is 两 only before 百 and 千.
    """
    rest, words = digits, ""
    for group_name in _GROUPS:
        if not rest:
            break
        group = rest[-4:].lstrip("0")
        rest = rest[:-4]
        if group:
            words = read_small(group) + group_name + words
    return read_telephone(rest) + words or "零"


def read_small(digits: str) -> str:
    """Read one to four digits without leading zeros; 10 to 19 start with 十."""
    return (
        read_places(digits).removeprefix("一")
        if len(digits) == 2 and digits[0] == "1"
        else read_places(digits)
    )


def read_places(digits: str) -> str:
    """Read up to four digits by their places; each run of zeros before a digit is one 零 (0012 → 零一十二)."""
    words, zero_is_due = "", False
    for place, digit in zip(range(len(digits) - 1, -1, -1), digits, strict=True):
        value = _value(digit)
        if value == 0:
            zero_is_due = True
            continue
        name = "两" if value == 2 and place >= 2 else _DIGITS[value]
        words += ("零" if zero_is_due else "") + name + _PLACES[place]
        zero_is_due = False
    return words


def _value(digit: str) -> int:
    # `str.isdecimal` also accepts decimals of other scripts, which have no reading here.
    if digit not in "0123456789":
        raise UnreadableNumberError(f"{digit!r} is not one of 0-9")
    return int(digit)
