"""Second stage of the Chinese normaliser: reads the remaining numbers by a shortest-path search over weighted rules.

The official normaliser runs the weighted transducers of WeTextProcessing (`tn/chinese/rules`) here. This module
searches the same rules and weights directly, as far as they change a text. To keep a character costs the most, so a
number is read wherever a rule matches it.

Readings differ from the first stage: 10012 is 一万零一十二 here and 一万十二 in `chinese_numerals.read_cardinal`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import lru_cache, partial

from mingc.text.reference.chinese_numerals import read_digits, read_places, read_small, read_telephone
from mingc.text.reference.chinese_tables import (
    CHINESE_UNITS,
    CURRENCIES,
    LATIN_UNITS,
    NARROW_CHARACTERS,
    SIMPLIFIED,
    TEAMS,
)

# A match of a rule at a position: (end of the matched text, its spoken form).
_Match = tuple[int, str]
_Rule = Callable[[str, int], Iterator[_Match]]

_MAX_NUMBER_DIGITS = 12
_SIGNS = {"+": "正", "-": "负", "±": "正负"}
_DIGITS = re.compile(r"[0-9]+")
_LAST_GROUP = re.compile(r",([0-9]{3})")


def _integers(text: str, start: int) -> Iterator[_Match]:
    """Unsigned integers of at most twelve digits, with one thousands separator."""
    match = _DIGITS.match(text, start)
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
    """Read up to twelve digits; zeros after 万 are spoken, and 二万 becomes 两万, unlike in the first stage."""
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
    # The grammar replaces finished words, so 120000 is 十两万.
    return words.replace("二万", "两万")


@lru_cache(maxsize=512)  # several rules match numbers at the same position
def _numbers(text: str, start: int) -> tuple[_Match, ...]:
    """Signed decimals of at most twelve whole digits, with a leading 约 or 人均 and a trailing % if present."""
    prefix = ""
    for word in ("约", "人均"):
        if text.startswith(word, start):
            prefix += word
            start += len(word)
    sign = _SIGNS.get(text[start : start + 1], "")
    found: list[_Match] = []
    for end, spoken in _integers(text, start + bool(sign)):
        found += _with_percent(text, end, prefix, sign + spoken)
        if text[end : end + 1] == "." and (fraction := _DIGITS.match(text, end + 1)):
            for fraction_end in range(end + 2, fraction.end() + 1):
                decimal = f"{sign}{spoken}点{read_digits(text[end + 1 : fraction_end])}"
                found += _with_percent(text, fraction_end, prefix, decimal)
    return tuple(found)


def _with_percent(text: str, end: int, prefix: str, spoken: str) -> Iterator[_Match]:
    yield end, prefix + spoken
    if text[end : end + 1] == "%":
        yield end + 1, f"{prefix}百分之{spoken}"


def _matches(pattern: re.Pattern[str], text: str, start: int, longest: int) -> Iterator[re.Match[str]]:
    """All matches of `pattern` at `start`, of every length up to `longest`."""
    if not pattern.match(text, start):
        return
    for end in range(start + 1, min(len(text), start + longest) + 1):
        if match := pattern.fullmatch(text, start, end):
            yield match


def _skip_space(text: str, start: int) -> tuple[int, ...]:
    """Positions before and after an optional space."""
    return (start, start + 1) if text[start : start + 1] == " " else (start,)


_UNITS = {**LATIN_UNITS, **{unit: unit for unit in CHINESE_UNITS}}
_LONGEST_UNIT = max(map(len, _UNITS))
_MULTIPLIERS = {"k": "千", "w": "万"}
_RANGE_WORDS = {"-": "到", "~": "到", "到": "到"}


def _units(text: str, start: int, *, multiplied: bool) -> Iterator[_Match]:
    prefix = ""
    if multiplied:
        if (prefix := _MULTIPLIERS.get(text[start : start + 1], "")) == "":
            return
        start += 1
    for end in range(start + 1, min(len(text), start + _LONGEST_UNIT) + 1):
        if unit := _UNITS.get(text[start:end]):
            yield end, prefix + unit


def _counts(text: str, start: int) -> Iterator[_Match]:
    """Numbers before a unit; 2 alone is 两."""
    for end, spoken in _numbers(text, start):
        yield end, "两" if spoken == "二" else spoken


def _counts_with_unit(text: str, start: int, *, multiplied: bool) -> Iterator[_Match]:
    for end, spoken in _counts(text, start):
        for unit_start in _skip_space(text, end):
            for unit_end, unit in _units(text, unit_start, multiplied=multiplied):
                yield unit_end, spoken + unit


def _range_starts(text: str, start: int) -> Iterator[_Match]:
    """First number of a range with its 到: `3-`, `3个~`."""
    ends = [*_counts(text, start), *_counts_with_unit(text, start, multiplied=False)]
    for end, spoken in ends:
        if word := _RANGE_WORDS.get(text[end : end + 1]):
            yield end + 1, spoken + word


def _measures(text: str, start: int, *, multiplied: bool) -> Iterator[_Match]:
    for middle, low in ((start, ""), *_range_starts(text, start)):
        for end, high in _counts_with_unit(text, middle, multiplied=multiplied):
            yield end, _second_of_months(low + high)


def _second_of_months(words: str) -> str:
    """Restore 二 before 两, 月 and 号 at the start of a measure, and where it is the whole second number of a range."""
    if words[:2] in ("两两", "两月", "两号"):
        words = "二" + words[1:]
    if words.endswith(("到两两", "到两月", "到两号")):
        words = words[:-2] + "二" + words[-1]
    return words


def _rates(text: str, start: int, *, multiplied: bool) -> Iterator[_Match]:
    """Measures per unit: 10km/h → 每小时十千米."""
    for end, measure in _measures(text, start, multiplied=multiplied):
        for slash in _skip_space(text, end):
            if text[slash : slash + 1] != "/":
                continue
            for unit_start in _skip_space(text, slash + 1):
                for last, unit in _units(text, unit_start, multiplied=False):
                    yield last, f"每{unit}{measure}"


_ANNUAL = re.compile(
    r"(?:(?P<low>\d{4}|\d{2})(?P<low_unit> ?(?:年度|年|赛季))?(?P<to>[-~到]))?"
    r"(?P<high>\d{4}|\d{2})(?P<unit>年度|年|赛季)",
    re.ASCII,
)


def _years(text: str, start: int) -> Iterator[_Match]:
    """Years and seasons with their unit, and ranges of two."""
    for match in _matches(_ANNUAL, text, start, len("2024 赛季-2025赛季")):
        low = ""
        if match["low"]:
            low = read_digits(match["low"]) + (match["low_unit"] or "").strip() + "到"
        yield match.end(), f"{low}{read_digits(match['high'])}{match['unit']}"


def _money(text: str, start: int) -> Iterator[_Match]:
    """Amounts after a currency symbol."""
    for length in range(1, 5):
        if currency := CURRENCIES.get(text[start : start + length]):
            for number in _skip_space(text, start + length):
                for end, spoken in _numbers(text, number):
                    yield end, spoken + currency


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


def _dates(text: str, start: int) -> Iterator[_Match]:
    """Dates and ranges of two dates."""
    for end, spoken in _single_dates(text, start):
        yield end, spoken
        if text[end : end + 1] in ("-", "~"):
            for last, second in _single_dates(text, end + 1):
                yield last, f"{spoken}到{second}"


def _single_dates(text: str, start: int) -> Iterator[_Match]:
    for match in _matches(_DATE, text, start, len("2024-05-01")):
        found = {name[0]: value for name, value in match.groupdict().items() if value}
        words = f"{read_digits(found['y'])}年" if "y" in found else ""
        words += f"{read_small(found['m'].lstrip('0'))}月"
        yield match.end(), words + (f"{read_small(found['d'].lstrip('0'))}日" if "d" in found else "")


_TIME = re.compile(
    r"(?P<hour>0\d|1\d|2[0-4]|[1-9])[:：](?P<minute>[0-5]\d)(?:[:：](?P<second>[0-5]\d))?"
    r" ?(?P<noon>[ap]m|[AP]M|[ap] m|[AP] M|[ap]\.m\.)?",  # a space is dropped even without this word
    re.ASCII,
)


def _times(text: str, start: int) -> Iterator[_Match]:
    """Clock times and ranges of two."""
    for end, spoken in _single_times(text, start):
        yield end, spoken
        if text[end : end + 1] in ("-", "~"):
            for last, second in _single_times(text, end + 1):
                yield last, f"{spoken}到{second}"


def _single_times(text: str, start: int) -> Iterator[_Match]:
    for match in _matches(_TIME, text, start, len("10:30:00 a.m.")):
        noon, hour, minute, second = (match[name] or "" for name in ("noon", "hour", "minute", "second"))
        words = {"": "", "a": "上午", "p": "下午"}[noon[:1].lower()]
        hour = hour.lstrip("0")
        words += ("两" if hour == "2" else read_small(hour) or "零") + "点"
        if minute != "00":
            words += f"{'零' if minute[0] == '0' else ''}{read_small(minute.lstrip('0'))}分"
        if second.strip("0"):
            words += f"{read_small(second.lstrip('0'))}秒"
        yield match.end(), words


def _fractions(text: str, start: int) -> Iterator[_Match]:
    """3/4 → 四分之三."""
    for end, above in _numbers(text, start):
        for slash in _skip_space(text, end):
            if text[slash : slash + 1] != "/":
                continue
            for number in _skip_space(text, slash + 1):
                for last, below in _numbers(text, number):
                    yield last, f"{below}分之{above}"


_SERIAL_NUMBER = re.compile(r"\d+(?:\.\d+){3}|\d+-\d+-\d+|\d{3}-\d{8}|[vV][1-9]+(?:\.\d+)*", re.ASCII)
_LONGEST_SERIAL = 40


def _serial_numbers(text: str, start: int) -> Iterator[_Match]:
    """IP addresses, phone numbers with dashes, versions after v, and percentages."""
    for match in _matches(_SERIAL_NUMBER, text, start, _LONGEST_SERIAL):
        spelled = (read_digits(c) if c.isdigit() else {".": "点", "-": ""}.get(c, c) for c in match[0])
        yield match.end(), "".join(spelled)
    for end, spoken in _numbers(text, start):
        if text[end - 1] == "%" and spoken.startswith("百分之"):
            yield end, spoken


_TELEPHONE = re.compile(r"\d{11}|\d{5}|\d{3}|尾号[是为]?\d{4}", re.ASCII)


def _telephones(text: str, start: int) -> Iterator[_Match]:
    """Numbers of 3, 5 or 11 digits, and 尾号 with 4, digit by digit."""
    for match in _matches(_TELEPHONE, text, start, 11):
        digits = match[0].lstrip("尾号是为")
        yield match.end(), match[0].removesuffix(digits) + read_telephone(digits)


def _sums(text: str, start: int) -> Iterator[_Match]:
    """Numbers joined by operators; a single number is the shortest sum."""
    pending = [*_numbers(text, start)]
    while pending:
        end, spoken = pending.pop()
        yield end, spoken
        for mark in _skip_space(text, end):
            for length in (1, 2):
                if word := _OPERATORS.get(text[mark : mark + length] if mark + length <= len(text) else ""):
                    for number in _skip_space(text, mark + length):
                        for last, following in _numbers(text, number):
                            pending.append((last, spoken + word + following))


_SCORE_MARKS = ("/", "-", ":")


def _scores(text: str, start: int) -> Iterator[_Match]:
    """Sports scores after the name of a team."""
    for length in range(1, min(len(text) - start, _LONGEST_TEAM) + 1):
        team = text[start : start + length]
        if team not in TEAMS:
            continue
        for first in _skip_space(text, start + length):
            for mark, ours in _numbers(text, first):
                if text[mark : mark + 1] in _SCORE_MARKS:
                    for end, theirs in _numbers(text, mark + 1):
                        for last in _skip_space(text, end):
                            yield last, f"{team}{ours}比{theirs}"


_LONGEST_TEAM = max(map(len, TEAMS))


def _whitelisted(text: str, start: int) -> Iterator[_Match]:
    """Fixed words with an irregular reading."""
    for word, spoken in _WHITELIST.items():
        if text.startswith(word, start):
            yield start + len(word), spoken


# Costs are hundredths of the weights of the grammar: integer sums are exact, so ties stay ties.
_KEPT_CHARACTER_COST = 100_00
_MULTIPLIER_COST = 10
_RULES: tuple[tuple[int, _Rule], ...] = (
    (102, _dates),
    (103, _whitelisted),
    (104, _scores),
    (105, _fractions),
    (105, partial(_measures, multiplied=False)),
    (105 + _MULTIPLIER_COST, partial(_measures, multiplied=True)),
    (105, partial(_rates, multiplied=False)),
    (105 + _MULTIPLIER_COST, partial(_rates, multiplied=True)),
    (105, _years),
    (105, _money),
    (105, _times),
    (6, _telephones),
    (106, _serial_numbers),
    (90_00, _sums),
)


def verbalize_remaining_numbers(text: str) -> str:
    """Read the numbers that the first stage left in Chinese `text`; simplify characters and narrow wide marks."""
    return _cheapest_reading(text.translate(SIMPLIFIED | NARROW_CHARACTERS))


def _cheapest_reading(text: str) -> str:
    """The spoken form of `text` along the path of lowest cost."""
    # best[i]: cost of text[:i], start of its last match, spoken form of that match.
    best: list[tuple[int, int, str] | None] = [(0, 0, ""), *[None] * len(text)]

    def relax(start: int, end: int, spoken: str, cost: int) -> None:
        known = best[end]
        if known is None or cost < known[0]:
            best[end] = (cost, start, spoken)

    for start, character in enumerate(text):
        reached = best[start]
        assert reached is not None
        cost = reached[0]
        relax(start, start + 1, character, cost + _KEPT_CHARACTER_COST)
        for weight, rule in _RULES:
            for end, spoken in rule(text, start):
                relax(start, end, spoken, cost + weight)

    words: list[str] = []
    end = len(text)
    while end:
        step = best[end]
        assert step is not None
        words.append(step[2])
        end = step[1]
    return "".join(reversed(words))
