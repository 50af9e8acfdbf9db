"""What is dropped from a text before its numbers are read: markup, links, code, emoticons, stray spaces.

Source: the official `talker_tn/talker_pre_processor.py`; the steps run in its order.
"""

from __future__ import annotations

import re

_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"\$\$.*?\$\$|\$.*?\$", re.DOTALL), ""),  # formulas
    (re.compile(r"(?:https?://|www\.)[a-zA-Z0-9./?=&_:-]+"), ""),  # links
    # Inline code goes first, so the fences of a block lose their marks in pairs, and the block goes with them.
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
    """Return `text` without what cannot be spoken. Spaces at either end stay."""
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    return text.translate(_DROPPED_CHARACTERS)
