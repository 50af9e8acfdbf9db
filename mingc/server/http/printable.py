"""Client text in logs and errors."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with every unprintable character except line breaks escaped.

    These are control characters, which terminals interpret, text-direction marks, and unusual separators.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
