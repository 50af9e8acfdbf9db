"""The numbers of the Chinese grammars: which stretches of digits they read, and how.

The grammars read unlike the regex stage (`numerals_zh.read_cardinal`): 10012 is 一万零一十二 here and 一万十二 there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache

from mingc.runtime.text.numerals_zh import read_digits, read_places, read_small

# What a rule offers at a position: (end of the stretch it reads, the words it says).
Offer = tuple[int, str]
Rule = Callable[[str, int], Iterator[Offer]]

_MAX_NUMBER_DIGITS = 12
_SIGNS = {"+": "正", "-": "负", "±": "正负"}
DIGITS = re.compile(r"[0-9]+")
_LAST_GROUP = re.compile(r",([0-9]{3})")


def _integers(text: str, start: int) -> Iterator[Offer]:
    match = DIGITS.match(text, start)
    if not match:
        return
    if text[start] == "0":
        yield start + 1, "零"
        return
    for end in range(start + 1, min(match.end(), start + _MAX_NUMBER_DIGITS) + 1):
        yield end, _read_number(text[start:end])
    grouped = _LAST_GROUP.match(text, match.end())
    if grouped and match.end() - start <= _MAX_NUMBER_DIGITS - 3:
        yield grouped.end(), _read_number(match[0] + grouped[1])


def _read_number(digits: str) -> str:
    """Read up to twelve digits. Unlike the regex stage, zeros after 万 are spoken, and 二万 becomes 两万."""
    hundred_millions, ten_thousands, rest = digits[:-8], digits[-8:-4], digits[-4:]
    words = ""
    if hundred_millions:
        words = f"{read_small(hundred_millions)}亿"
        ten_thousands = ten_thousands.lstrip("0")
        if not ten_thousands:
            return words + read_places(rest.lstrip("0"))
    if ten_thousands:
        words += f"{read_small(ten_thousands)}万"
    words += read_places(rest) if words else read_small(rest)
    # Applied to the finished words, so that 120000 is 十两万, as the grammar has it.
    return words.replace("二万", "两万")


@lru_cache(maxsize=512)  # many rules ask at the same position
def numbers(text: str, start: int) -> tuple[Offer, ...]:
    """Signed decimals of at most twelve whole digits, with 约 or 人均 before and % after them where they stand."""
    prefix = ""
    for word in ("约", "人均"):
        if text.startswith(word, start):
            prefix += word
            start += len(word)
    sign = _SIGNS.get(text[start : start + 1], "")
    offers: list[Offer] = []
    for end, spoken in _integers(text, start + bool(sign)):
        offers += _with_percent(text, end, prefix, sign + spoken)
        if text[end : end + 1] == "." and (fraction := DIGITS.match(text, end + 1)):
            for fraction_end in range(end + 2, fraction.end() + 1):
                decimal = f"{sign}{spoken}点{read_digits(text[end + 1 : fraction_end])}"
                offers += _with_percent(text, fraction_end, prefix, decimal)
    return tuple(offers)


def _with_percent(text: str, end: int, prefix: str, spoken: str) -> Iterator[Offer]:
    yield end, prefix + spoken
    if text[end : end + 1] == "%":
        yield end + 1, f"{prefix}百分之{spoken}"


def matches(pattern: re.Pattern[str], text: str, start: int, longest: int) -> Iterator[re.Match[str]]:
    """Every match of `pattern` at `start`, of any length up to `longest`."""
    if not pattern.match(text, start):
        return
    for end in range(start + 1, min(len(text), start + longest) + 1):
        if match := pattern.fullmatch(text, start, end):
            yield match


def skip_space(text: str, start: int) -> tuple[int, ...]:
    """Positions after an optional space."""
    return (start, start + 1) if text[start : start + 1] == " " else (start,)
