"""Text of clients as logs and errors show it."""

from __future__ import annotations


def printable(text: str) -> str:
    """`text` with an escape for every character that does not print, except line breaks.

    These are controls, which terminals act on, marks that reverse the direction of text, and other separators.
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escape(each) for each in text)


def _escape(character: str) -> str:
    return character.encode("unicode_escape").decode()
