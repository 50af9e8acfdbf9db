"""Numbers with units in the Chinese grammars: measures, rates, ranges, years and seasons, money.

Source: the `measure` and `money` rules of WeTextProcessing's Chinese grammars.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mingc.runtime.text.grammar_numbers import Offer, matches, numbers, skip_space
from mingc.runtime.text.numerals_zh import read_digits
from mingc.runtime.text.units import CHINESE_UNITS, CURRENCIES, LATIN_UNITS

_UNITS = {**LATIN_UNITS, **{unit: unit for unit in CHINESE_UNITS}}
_LONGEST_UNIT = max(map(len, _UNITS))
_MULTIPLIERS = {"k": "千", "w": "万"}
_RANGE_WORDS = {"-": "到", "~": "到", "到": "到"}


def _units(text: str, start: int, *, multiplied: bool) -> Iterator[Offer]:
    prefix = ""
    if multiplied:
        if (prefix := _MULTIPLIERS.get(text[start : start + 1], "")) == "":
            return
        start += 1
    for end in range(start + 1, min(len(text), start + _LONGEST_UNIT) + 1):
        if unit := _UNITS.get(text[start:end]):
            yield end, prefix + unit


def _counts(text: str, start: int) -> Iterator[Offer]:
    """Numbers of a measure, where a lone 2 is 两."""
    for end, spoken in numbers(text, start):
        yield end, "两" if spoken == "二" else spoken


def _counts_with_unit(text: str, start: int, *, multiplied: bool) -> Iterator[Offer]:
    for end, spoken in _counts(text, start):
        for unit_start in skip_space(text, end):
            for unit_end, unit in _units(text, unit_start, multiplied=multiplied):
                yield unit_end, spoken + unit


def _range_starts(text: str, start: int) -> Iterator[Offer]:
    """A first number of a range with its 到: `3-`, `3个~`."""
    ends = [*_counts(text, start), *_counts_with_unit(text, start, multiplied=False)]
    for end, spoken in ends:
        if word := _RANGE_WORDS.get(text[end : end + 1]):
            yield end + 1, spoken + word


def measures(text: str, start: int, *, multiplied: bool) -> Iterator[Offer]:
    for middle, low in ((start, ""), *_range_starts(text, start)):
        for end, high in _counts_with_unit(text, middle, multiplied=multiplied):
            yield end, _second_of_months(low + high)


def _second_of_months(words: str) -> str:
    """2 is 二 again in front of 两, 月 and 号: at the start of a measure, and as its whole second number."""
    if words[:2] in ("两两", "两月", "两号"):
        words = "二" + words[1:]
    if words.endswith(("到两两", "到两月", "到两号")):
        words = words[:-2] + "二" + words[-1]
    return words


def rates(text: str, start: int, *, multiplied: bool) -> Iterator[Offer]:
    """10km/h → 每小时十千米."""
    for end, measure in measures(text, start, multiplied=multiplied):
        for slash in skip_space(text, end):
            if text[slash : slash + 1] != "/":
                continue
            for unit_start in skip_space(text, slash + 1):
                for last, unit in _units(text, unit_start, multiplied=False):
                    yield last, f"每{unit}{measure}"


_ANNUAL = re.compile(
    r"(?:(?P<low>\d{4}|\d{2})(?P<low_unit> ?(?:年度|年|赛季))?(?P<to>[-~到]))?"
    r"(?P<high>\d{4}|\d{2})(?P<unit>年度|年|赛季)",
    re.ASCII,
)


def years(text: str, start: int) -> Iterator[Offer]:
    for match in matches(_ANNUAL, text, start, len("2024 赛季-2025赛季")):
        low = ""
        if match["low"]:
            low = read_digits(match["low"]) + (match["low_unit"] or "").strip() + "到"
        yield match.end(), f"{low}{read_digits(match['high'])}{match['unit']}"


def money(text: str, start: int) -> Iterator[Offer]:
    for length in range(1, 5):
        if currency := CURRENCIES.get(text[start : start + length]):
            for number in skip_space(text, start + length):
                for end, spoken in numbers(text, number):
                    yield end, spoken + currency
