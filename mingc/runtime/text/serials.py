"""Serial codes of capital letters, digits and dashes: spelled one character at a time where they are recognised.

Source: the official `talker_tn/re_utils/re_sn.py`.
"""

from __future__ import annotations

import re
from itertools import groupby

from mingc.runtime.text.numerals_zh import read_telephone

_CODE = re.compile(r"[A-Z0-9-]+")
_ANNOUNCEMENTS = ("SN", "sn", "序列")
_MIN_RUNS = 6


def spell_serials(text: str) -> str:
    """Read the digits of serial codes one by one (1 → 幺) and their dashes as 杠; letters stay.

    A code holds a letter and a digit, and is announced (SN, 序列号) since the code before it, or changes between
    letters, digits and dashes often enough to be nothing else.
    """
    pieces: list[str] = []
    end = 0
    for match in _CODE.finditer(text):
        code = match[0]
        if not (any(c.isdigit() for c in code) and any(c.isalpha() for c in code)):
            continue
        before = text[end : match.start()]
        is_announced = any(word in before for word in _ANNOUNCEMENTS)
        is_serial = is_announced or len(list(groupby(code, key=_character_kind))) >= _MIN_RUNS
        pieces += (before, _spell(code) if is_serial else code)
        end = match.end()
    return "".join(pieces) + text[end:]


def _character_kind(character: str) -> str:
    return "0" if character.isdigit() else "A" if character.isalpha() else "-"


def _spell(code: str) -> str:
    return "".join("杠" if c == "-" else read_telephone(c) if c.isdigit() else c for c in code)
