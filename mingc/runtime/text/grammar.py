"""The rules of the Chinese grammars and their costs: what can be read at a position, and how it sounds.

Source: the Chinese rules of WeTextProcessing (`tn/chinese/rules`) as far as they change a text, with the weights of
its normaliser. The search over them is in `leftovers.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

from mingc.runtime.text.grammar_measures import measures, money, rates, years
from mingc.runtime.text.grammar_numbers import Offer, Rule, matches, numbers, skip_space
from mingc.runtime.text.numerals_zh import read_digits, read_small, read_telephone
from mingc.runtime.text.teams import TEAMS

_WHITELIST = {
    "B2B": "B to B",
    "O2O": "O to O",
    "P2P": "P to P",
    "M.V.P": "M V P",
    "BY2": "BY TWO",
    "By2": "By Two",
    **{f"{decade}0后": f"{name}零后" for decade, name in zip("0156789", "零一五六七八九", strict=True)},
}
_OPERATORS = {
    "<=": "小于等于",
    ">=": "大于等于",
    "≤": "小于等于",
    "≥": "大于等于",
    "×": "乘",
    "÷": "除",
    "-": "减",
    "+": "加",
    "=": "等于",
    "~": "到",
    ":": "比",
    "<": "小于",
    ">": "大于",
}


_YEAR = r"[1-9]\d{3}"
_MONTH2 = r"(?:0[1-9]|1[0-2])"
_MONTH = rf"(?:{_MONTH2}|[1-9])"
_DAY = r"(?:0[1-9]|[12]\d|3[01]|[1-9])"
_SEPARATOR = "[-/.]"


def _date_pattern(suffix: str) -> str:
    year, month, day = (
        f"(?P<y{{}}{suffix}>{_YEAR})",
        f"(?P<m{{}}{suffix}>{_MONTH})",
        f"(?P<d{{}}{suffix}>{_DAY})",
    )
    two_digit_month = f"(?P<m{{}}{suffix}>{_MONTH2})"
    orders = [
        (year, month, day),
        (day, month, year),
        (year, two_digit_month),
        (two_digit_month, year),
        (two_digit_month, day),
    ]
    return "|".join(
        _SEPARATOR.join(part.replace("{}", str(number)) for part in order)
        for number, order in enumerate(orders)
    )


_DATE = re.compile(_date_pattern("a"), re.ASCII)


def _dates(text: str, start: int) -> Iterator[Offer]:
    for end, spoken in _single_dates(text, start):
        yield end, spoken
        if text[end : end + 1] in ("-", "~"):
            for last, second in _single_dates(text, end + 1):
                yield last, f"{spoken}到{second}"


def _single_dates(text: str, start: int) -> Iterator[Offer]:
    for match in matches(_DATE, text, start, len("2024-05-01")):
        found = {name[0]: value for name, value in match.groupdict().items() if value}
        words = f"{read_digits(found['y'])}年" if "y" in found else ""
        words += f"{read_small(found['m'].lstrip('0'))}月"
        yield match.end(), words + (f"{read_small(found['d'].lstrip('0'))}日" if "d" in found else "")


_TIME = re.compile(
    r"(?P<hour>0\d|1\d|2[0-4]|[1-9])[:：](?P<minute>[0-5]\d)(?:[:：](?P<second>[0-5]\d))?"
    r" ?(?P<noon>[ap]m|[AP]M|[ap] m|[AP] M|[ap]\.m\.)?",  # the space goes even without a word behind it
    re.ASCII,
)


def _times(text: str, start: int) -> Iterator[Offer]:
    for end, spoken in _single_times(text, start):
        yield end, spoken
        if text[end : end + 1] in ("-", "~"):
            for last, second in _single_times(text, end + 1):
                yield last, f"{spoken}到{second}"


def _single_times(text: str, start: int) -> Iterator[Offer]:
    for match in matches(_TIME, text, start, len("10:30:00 a.m.")):
        noon, hour, minute, second = (match[name] or "" for name in ("noon", "hour", "minute", "second"))
        words = {"": "", "a": "上午", "p": "下午"}[noon[:1].lower()]
        hour = hour.lstrip("0")
        words += ("两" if hour == "2" else read_small(hour) or "零") + "点"
        if minute != "00":
            words += f"{'零' if minute[0] == '0' else ''}{read_small(minute.lstrip('0'))}分"
        if second.strip("0"):
            words += f"{read_small(second.lstrip('0'))}秒"
        yield match.end(), words


def _fractions(text: str, start: int) -> Iterator[Offer]:
    for end, above in numbers(text, start):
        for slash in skip_space(text, end):
            if text[slash : slash + 1] != "/":
                continue
            for number in skip_space(text, slash + 1):
                for last, below in numbers(text, number):
                    yield last, f"{below}分之{above}"


_SERIAL_NUMBER = re.compile(r"\d+(?:\.\d+){3}|\d+-\d+-\d+|\d{3}-\d{8}|[vV][1-9]+(?:\.\d+)*", re.ASCII)
_LONGEST_SERIAL = 40


def _serial_numbers(text: str, start: int) -> Iterator[Offer]:
    for match in matches(_SERIAL_NUMBER, text, start, _LONGEST_SERIAL):
        spelled = (read_digits(c) if c.isdigit() else {".": "点", "-": ""}.get(c, c) for c in match[0])
        yield match.end(), "".join(spelled)
    for end, spoken in numbers(text, start):
        if text[end - 1] == "%" and spoken.startswith("百分之"):
            yield end, spoken


_TELEPHONE = re.compile(r"\d{11}|\d{5}|\d{3}|尾号[是为]?\d{4}", re.ASCII)


def _telephones(text: str, start: int) -> Iterator[Offer]:
    for match in matches(_TELEPHONE, text, start, 11):
        digits = match[0].lstrip("尾号是为")
        yield match.end(), match[0].removesuffix(digits) + read_telephone(digits)


def _sums(text: str, start: int) -> Iterator[Offer]:
    """Numbers joined by operators; a number by itself is the shortest sum."""
    pending = [*numbers(text, start)]
    while pending:
        end, spoken = pending.pop()
        yield end, spoken
        for mark in skip_space(text, end):
            for length in (1, 2):
                if word := _OPERATORS.get(text[mark : mark + length] if mark + length <= len(text) else ""):
                    for number in skip_space(text, mark + length):
                        for last, following in numbers(text, number):
                            pending.append((last, spoken + word + following))


_SCORE_MARKS = ("/", "-", ":")


def _scores(text: str, start: int) -> Iterator[Offer]:
    for length in range(1, min(len(text) - start, _LONGEST_TEAM) + 1):
        team = text[start : start + length]
        if team not in TEAMS:
            continue
        for first in skip_space(text, start + length):
            for mark, ours in numbers(text, first):
                if text[mark : mark + 1] in _SCORE_MARKS:
                    for end, theirs in numbers(text, mark + 1):
                        for last in skip_space(text, end):
                            yield last, f"{team}{ours}比{theirs}"


_LONGEST_TEAM = max(map(len, TEAMS))


def _whitelisted(text: str, start: int) -> Iterator[Offer]:
    for word, spoken in _WHITELIST.items():
        if text.startswith(word, start):
            yield start + len(word), spoken


# Costs are in hundredths of the grammars' weights, so that sums are exact and ties stay ties.
KEPT_CHARACTER_COST = 100_00
_MULTIPLIER_COST = 10
RULES: tuple[tuple[int, Rule], ...] = (
    (102, _dates),
    (103, _whitelisted),
    (104, _scores),
    (105, _fractions),
    (105, partial(measures, multiplied=False)),
    (105 + _MULTIPLIER_COST, partial(measures, multiplied=True)),
    (105, partial(rates, multiplied=False)),
    (105 + _MULTIPLIER_COST, partial(rates, multiplied=True)),
    (105, years),
    (105, money),
    (105, _times),
    (6, _telephones),
    (106, _serial_numbers),
    (90_00, _sums),
)
