"""Spells English numbers: cardinals, decimals, ordinals."""

from __future__ import annotations

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
