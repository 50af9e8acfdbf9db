"""English normaliser: spells numbers, money, units, fractions, percentages, ordinals and versions.

Source: the official `front/number_en.py` (`normalize_numbers`), and `inflect` for the spelling. The order of the rules
is part of the behaviour. Abbreviations, dates and clock times are not expanded. Chinese text is not handled here.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from mingc.text.english_numerals import (
    NumberTooLargeError,
    cardinal_words,
    decimal_words,
    ordinal_words,
)

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
