"""A fragment of text to the string that is spoken: English numbers, clean-up, Chinese numbers.

Source: the official `talker_tn/talker_tn.py` and the loop of `omni_audio_generation`. The official English grammar
is not part of the reference (its file is missing there), so English text is only expanded and cleaned.
"""

from __future__ import annotations

import re

from mingc.runtime.text.chinese import speak_chinese_numbers
from mingc.runtime.text.cleanup import clean_up
from mingc.runtime.text.english import expand_english_numbers
from mingc.runtime.text.leftovers import speak_leftovers

_CHINESE = re.compile("[一-鿿]")


def has_chinese(text: str) -> bool:
    """Whether `text` holds a CJK ideograph (U+4E00 to U+9FFF)."""
    return _CHINESE.search(text) is not None


def normalize_text(text: str) -> str:
    """Clean `text` and, when it is Chinese, read its numbers (the official `TalkerTN`)."""
    text = clean_up(text)
    if not has_chinese(text):
        return text
    return speak_leftovers(speak_chinese_numbers(text))


def normalize_fragment(text: str) -> str:
    """Return what the acoustic model gets for one fragment of a segmented text."""
    if not has_chinese(text):
        text = expand_english_numbers(text)
    return normalize_text(text).removeprefix("，")
