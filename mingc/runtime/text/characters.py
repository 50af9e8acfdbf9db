"""Characters and fixed names that are replaced one for one, before and after numbers are read.

Facts only. Source: `char_map0` and `proper_noun` of the official `talker_tn/talker_re.json`, and the character
changes observed in its Chinese grammars (punctuation: only the marks listed here change width).
"""

from __future__ import annotations

import re
import unicodedata

from mingc.runtime.text.numerals_zh import read_cardinal

_NUMERAL_RANGES = (
    ("Ⅰ", "Ⅻ"),
    ("①", "⑳"),
    ("㉑", "㉟"),
    ("㊱", "㊿"),
    ("⓵", "⓾"),
    ("⓪", "⓪"),
    ("❶", "❿"),
    ("⓫", "⓴"),
)
_NUMERALS = {
    code: read_cardinal(str(int(unicodedata.numeric(chr(code)))))
    for first, last in _NUMERAL_RANGES
    for code in range(ord(first), ord(last) + 1)
}
# U+FF10 and on: digits, capitals and small letters lie at a fixed distance from ASCII.
_FULL_WIDTH_DISTANCE = 0xFEE0
_FULL_WIDTH_DIGITS = {ord(digit) + _FULL_WIDTH_DISTANCE: digit for digit in "0123456789"}

NUMERAL_CHARACTERS: dict[int, str] = {**_NUMERALS, **_FULL_WIDTH_DIGITS}

_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
_NARROWED_MARKS = "!\"$%&'()*+-./;<=>?@\\^_`{|}~"
NARROW_CHARACTERS: dict[int, str] = {
    **_FULL_WIDTH_DIGITS,
    **{ord(character) + _FULL_WIDTH_DISTANCE: character for character in _LETTERS + _NARROWED_MARKS},
    ord("“"): '"',
    ord("”"): '"',
}

PROPER_NAMES = {
    "上证50": "上证五十",
    "沪深300": "沪深三百",
    "中证500": "中证五百",
    "科创50": "科创五十",
    "标普500": "标普五百",
    "标准普尔500": "标准普尔五百",
    "道琼斯30": "道琼斯三十",
    "纳斯达克100": "纳斯达克一百",
    "罗素2000": "罗素两千",
    "富时100": "富时一百",
    "日经225": "日经二百二十五",
    "c++": "C加加",
    "C++": "C加加",
}
_PROPER_NAME = re.compile(
    rf"(?<!\d)(?:{'|'.join(map(re.escape, sorted(PROPER_NAMES, key=len, reverse=True)))})(?!\d)"
)


def replace_proper_names(text: str) -> str:
    """Spell out the names of `PROPER_NAMES` where no further digit touches them."""
    return _PROPER_NAME.sub(lambda match: PROPER_NAMES[match[0]], text)
