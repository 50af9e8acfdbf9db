"""English normaliser: spells numbers, money, units, fractions, percentages, ordinals and versions.

Source: the official `front/number_en.py` (`normalize_numbers`), and `inflect` for the spelling. The order of the rules
is part of the behaviour. Abbreviations, dates and clock times are not expanded. Chinese text is not handled here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise


def _names(words: str) -> list[str]:
    return words.split("|")


_ONES = _names(
    "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|"
    "seventeen|eighteen|nineteen"
)
_TENS = _names("||twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety")
_SCALES = _names(
    "|thousand|million|billion|trillion|quadrillion|quintillion|sextillion|septillion|octillion|nonillion|decillion"
)
_IRREGULAR_ORDINALS = {
    "one": "first",
    "two": "second",
    "three": "third",
    "five": "fifth",
    "eight": "eighth",
    "nine": "ninth",
    "twelve": "twelfth",
}

_UNIT_WORDS = {
    "ms": "milliseconds",
    "s": "seconds",
    "hz": "hertz",
    "khz": "kilohertz",
    "mhz": "megahertz",
    "ghz": "gigahertz",
    "kb": "kilobytes",
    "mb": "megabytes",
    "gb": "gigabytes",
    "tb": "terabytes",
    "bps": "bits per second",
    "kbps": "kilobits per second",
    "mbps": "megabits per second",
    "gbps": "gigabits per second",
    "cm": "centimeters",
    "km": "kilometers",
    "kg": "kilograms",
    "v": "volts",
    "a": "amperes",
    "w": "watts",
    "°c": "degrees celsius",
    "°f": "degrees fahrenheit",
}

_GROUPED_DIGITS = re.compile(r"[0-9][0-9,]+[0-9]")
# The sign counts only after a word boundary, that is after a letter or digit.
_WITH_UNIT = re.compile(rf"\b(-?\d+(?:\.\d+)?)\s*({'|'.join(_UNIT_WORDS)})\b", re.IGNORECASE)
_POUNDS = re.compile(r"£(-?[0-9,]*[0-9](?:\.[0-9]+)?)")
_DOLLARS = re.compile(r"\$(-?[0-9.,]*[0-9](?:\.[0-9]+)?)")
_FRACTION = re.compile(r"([0-9]+)/([0-9]+)")
_PERCENT = re.compile(r"(-?[0-9.,]*[0-9])%")
_ORDINAL = re.compile(r"\b([0-9]+)(?:st|nd|rd|th)\b")
_VERSION = re.compile(r"\b([a-zA-Z]+)-?([0-9]+(?:\.[0-9]+)?)\b")
_NUMBER = re.compile(r"\b-?[0-9]+(?:\.[0-9]+)?\b")
_WHITE_SPACE = re.compile(r"\s+")


class NumberTooLargeError(ValueError):
    """The number exceeds the largest named scale."""


def cardinal_words(value: int, *, with_and: bool = False) -> str:
    """Spell a non-negative integer: 1234 → one thousand, two hundred thirty-four.

    Groups are joined by commas, except that a last group below 100 follows without one. `with_and` puts "and"
    before tens and ones (one hundred and one).
    """
    if value == 0:
        return _ONES[0]
    groups: list[tuple[int, str]] = []
    for scale in _SCALES:
        value, group = divmod(value, 1000)
        if group:
            groups.append((group, scale))
        if not value:
            break
    else:
        raise NumberTooLargeError("no name for a number of more than 36 digits")
    groups.reverse()
    spelled = [f"{_below_thousand(group, with_and)} {scale}".rstrip() for group, scale in groups]
    words = spelled[0]
    for _, ((group, scale), text) in pairwise(zip(groups, spelled, strict=True)):
        if scale or group >= 100:
            words += f", {text}"
        else:
            words += f" and {text}" if with_and else f" {text}"
    return words


def decimal_words(whole: str, fraction: str, *, with_and: bool = False) -> str:
    """Spell a decimal: the whole part as a cardinal, then each digit of the fraction."""
    digits = " ".join(_ONES[int(digit)] for digit in fraction)
    return f"{cardinal_words(int(whole), with_and=with_and)} point {digits}"


def ordinal_words(value: int) -> str:
    """Spell an ordinal: 21 → twenty-first."""
    words = cardinal_words(value, with_and=True)
    for cardinal, ordinal in _IRREGULAR_ORDINALS.items():
        if words.endswith(cardinal):
            return words.removesuffix(cardinal) + ordinal
    if words.endswith("y"):
        return words.removesuffix("y") + "ieth"
    return words + "th"


def _below_thousand(value: int, with_and: bool) -> str:
    hundreds, rest = divmod(value, 100)
    parts = []
    if hundreds:
        parts.append(f"{_ONES[hundreds]} hundred")
    if rest:
        tens, ones = divmod(rest, 10)
        small = _ONES[rest] if rest < 20 else _TENS[tens] + (f"-{_ONES[ones]}" if ones else "")
        parts.append(f"and {small}" if hundreds and with_and else small)
    return " ".join(parts)


def expand_english_numbers(text: str) -> str:
    """Replace the numbers of `text` by words; collapse white space and strip both ends."""
    text = _GROUPED_DIGITS.sub(lambda match: match[0].replace(",", ""), text)
    text = _WITH_UNIT.sub(_unit, text)
    text = _POUNDS.sub(_money("pound"), text)
    text = _DOLLARS.sub(_money("dollar"), text)
    text = _FRACTION.sub(_fraction, text)
    text = _PERCENT.sub(lambda match: f" {_signed_words(match[1]) or match[1]} percent ", text)
    text = _ORDINAL.sub(_ordinal, text)
    text = _VERSION.sub(_version, text)
    text = _NUMBER.sub(lambda match: f" {_signed_words(match[0]) or match[0]} ", text)
    return _WHITE_SPACE.sub(" ", text).strip()


def _unit(match: re.Match[str]) -> str:
    unit = match[2].lower()
    words = _signed_words(match[1])
    return f" {words} {_UNIT_WORDS[unit]} " if words else f" {match[1]} {unit} "


def _money(currency: str) -> Callable[[re.Match[str]], str]:
    def expand(match: re.Match[str]) -> str:
        amount = match[1].removeprefix("-")
        words = _signed_words(match[1])
        if words is None:
            return f" {amount} {currency}s "
        return f" {words} {currency if float(amount) == 1.0 else currency + 's'} "

    return expand


def _fraction(match: re.Match[str]) -> str:
    above, below = int(match[1]), int(match[2])
    try:
        words = cardinal_words(above, with_and=True)
        match below:
            case 2:
                name = "half" if above == 1 else "halves"
            case 4:
                name = "quarter" if above == 1 else "quarters"
            case _:
                # Always singular: 2/3 is "two third" in the reference.
                name = ordinal_words(below)
    except NumberTooLargeError:
        return f" {above} over {below} "
    return f" {words} {name} "


def _ordinal(match: re.Match[str]) -> str:
    try:
        return f" {cardinal_words(int(match[1]), with_and=True)} "
    except NumberTooLargeError:
        return match[0]


def _version(match: re.Match[str]) -> str:
    whole, _, fraction = match[2].partition(".")
    try:
        words = (
            decimal_words(whole, fraction, with_and=True)
            if fraction
            else cardinal_words(int(whole), with_and=True)
        )
    except NumberTooLargeError:
        return match[0]
    return f"{match[1]} {words}"


def _signed_words(number: str) -> str | None:
    """Words of `[-]digits[.digits]`, or None when `number` is malformed (`1.2.3`) or too large."""
    whole, dot, fraction = number.removeprefix("-").partition(".")
    whole = whole or "0"
    if not whole.isdigit() or (dot and not fraction.isdigit()):
        return None
    try:
        words = decimal_words(whole, fraction) if dot else cardinal_words(int(whole))
    except NumberTooLargeError:
        return None
    return f"minus {words}" if number.startswith("-") else words
