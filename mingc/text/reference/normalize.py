"""Text normalisation for the talker: cleans a text up, then reads its numbers.

Source: the official `talker_tn/talker_tn.py`, `talker_tn/talker_pre_processor.py` and the loop of
`omni_audio_generation`. The official English grammar is missing from the reference, so English text is only expanded
and cleaned.
"""

from __future__ import annotations

import re

from mingc.text.reference.chinese_grammar import verbalize_remaining_numbers
from mingc.text.reference.chinese_rules import verbalize_numbers
from mingc.text.reference.english import expand_english_numbers

_CHINESE = re.compile("[一-鿿]")

# Applied in this order.
_CLEANUP_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\$\$.*?\$\$|\$.*?\$", re.DOTALL), ""),  # formulas
    (re.compile(r"(?:https?://|www\.)[a-zA-Z0-9./?=&_:-]+"), ""),  # links
    # Inline code; it removes the fences of a code block in pairs, and the block with them.
    (re.compile(r"`.*?`", re.DOTALL), ""),
    (re.compile(r"!\[.*?\]\(.*?\)"), ""),  # images
    (re.compile(r"(?<=\d),(?=\d{3})"), ""),  # 1,234
    (re.compile(r"(?<=[^a-zA-Z.]) +(?=[^a-zA-Z.])"), ""),
    (re.compile(r"(?<=[a-zA-Z]) +(?=[a-zA-Z])"), " "),
    (re.compile(r"\*{2,3}|###|---"), ""),  # emphasis, headings, rules
)
_EMOTICONS = range(0x1F600, 0x1F650)
_SHAPES = "▼●★☆■□▲△◆◇○◎√×✔✖\ufe0e"
_DROPPED_CHARACTERS = dict.fromkeys([*_EMOTICONS, *map(ord, _SHAPES), *map(ord, "\t\n\r\f")])


def clean_up(text: str) -> str:
    """Remove markup, links, code, emoticons and stray spaces from `text`. Spaces at either end stay."""
    for pattern, replacement in _CLEANUP_STEPS:
        text = pattern.sub(replacement, text)
    return text.translate(_DROPPED_CHARACTERS)


def has_chinese(text: str) -> bool:
    """Whether `text` holds a CJK ideograph (U+4E00 to U+9FFF)."""
    return _CHINESE.search(text) is not None


def normalize_text(text: str, *, in_chinese: bool = False) -> str:
    """Clean `text` and, if it contains Chinese, verbalize its numbers (the official `TalkerTN`)."""
    text = clean_up(text)
    if not (in_chinese or has_chinese(text)):
        return text
    return verbalize_remaining_numbers(verbalize_numbers(text))


def normalize_fragment(text: str, *, in_chinese: bool = False) -> str:
    """The spoken form of one fragment of a segmented text: the input of the acoustic model.

    `in_chinese`: `text` continues a fragment with Chinese, so its numbers are always read in Chinese.
    """
    if not (in_chinese or has_chinese(text)):
        text = expand_english_numbers(text)
    return normalize_text(text, in_chinese=in_chinese).removeprefix("，")
