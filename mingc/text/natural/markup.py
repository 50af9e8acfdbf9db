"""Removes what is not read aloud from a clause: markup, emoji, addresses of links. The words inside markup stay."""

from __future__ import annotations

import html
import re
import unicodedata

_TAGS = (
    "speak voice prosody emphasis say-as sub phoneme lang audio mark break p s w a b i u em strong small big del ins "
    "br hr div span h1 h2 h3 h4 h5 h6 ul ol li dl dt dd table thead tbody tr td th code pre kbd img sup center font "
    "blockquote details summary html head body title script style think answer"
).replace(" ", "|")
_TAG = re.compile(
    rf"<!--.*?-->|<[!?/]?(?:(?:{_TAGS})(?![\w.@-])|[A-Za-z]+:[\w-]+)(?:\s+[^<>]*=[^<>]*)?\s*/?>",
    re.IGNORECASE | re.DOTALL,
)
_PAUSE_TAG = re.compile(r"<(?:break|br|hr|/?p|/?li|/?tr|/?h\d|/?div)\b", re.IGNORECASE)
_EMOJI = re.compile(
    "[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\u2300-\u23ff\u25a0-\u25ff\u200b-\u200f\u2060\ufe00-\ufe0f\u20e3\ufeff"
    "\U000e0000-\U000e007f]+"
)
_STEPS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"!?\[([^\[\]\n]*)\](?:\([^()\s]*\)|\[[^\[\]\n]*\])"), r"\1"),  # links and images
    (re.compile(r"\[\^\w+\]|(?<=[\w.,;)])\[\d+(?:[,–-] ?\d+)*\]"), ""),  # footnotes
    (re.compile(r"^\s*(?:[-*_] ?){3,}\s*$"), ""),  # rules
    # the line below the head of a table
    (re.compile(r"^\s*\|?(?:\s*:?-{2,}:?\s*\|)+\s*(?::?-{2,}:?)?\s*$"), ""),
    (re.compile(r"^(?:\s*>)+\s?"), ""),
    (re.compile(r"^\s*#{1,6}(?:\s+|$)"), ""),
    (re.compile(r"\s+#+\s*$"), ""),
    (re.compile(r"^\s*(?:[-*+•·▪‣○●]|[-*+]\s+\[[ xX]\])\s+(?=\S)"), ""),
    (re.compile(r"^\s*(\d+)[.)]\s+(?=\D)"), r"\1. "),
    (re.compile(r"\*{2,3}|__|~~|`+"), ""),
    (re.compile(r"(?<![\w*])\*(?=[^\s*])([^*\n]*[^\s*])\*(?![\w*])"), r"\1"),
    (re.compile(r"(?<![\w_])_(?=[^\s_])([^_\n]*[^\s_])_(?![\w_])"), r"\1"),
    (re.compile(r"\$\$?([^$\n]*[\\^_=][^$\n]*)\$\$?|\\[(\[](.*?)\\[)\]]"), r"\1\2"),  # formulas
)
# No rule of this file changes a text of these characters alone.
_PLAIN = re.compile(r"[A-Za-z ,.!?;:'\"㐀-䶿一-鿿，。！？；：、]*")
_ROW = re.compile(r"^\s*\|(.*)\|\s*$")
# Full-width letters, digits and symbols become narrow; marks of Chinese stay.
_NARROW = {code: chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F) if chr(code) not in "，。！？；：（）"}
_FOLDED = str.maketrans(
    {**{chr(code): text for code, text in _NARROW.items()}, "\u3000": " ", "\xa0": " ", "\u202f": " "}
)
_LETTERLIKE = re.compile("[⁰-₟²³¹ℂ-ℹ㎀-㏟㍱-㍶ﬀ-ﬆ①-⓪Ⅰ-ⅿ]")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_SUPERSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+")


def plain_text(text: str) -> str:
    """The words of a clause with its marks, symbols and numbers, in narrow characters."""
    if _PLAIN.fullmatch(text):
        return text
    if "&" in text:
        text = html.unescape(text)
    if "<" in text:
        text = _TAG.sub(lambda tag: ", " if _PAUSE_TAG.match(tag[0]) else " ", text)
    text = _EMOJI.sub(" ", text)
    if row := _ROW.match(text):
        text = text if set(row[1]) <= set("-:| ") else ", ".join(cell.strip() for cell in row[1].split("|"))
    for pattern, replacement in _STEPS:
        text = pattern.sub(replacement, text)
    text = text.translate(_FOLDED)
    text = _SUPERSCRIPT.sub(lambda found: f"^{found[0].translate(_SUPERSCRIPTS)} ", text)
    return _LETTERLIKE.sub(lambda found: unicodedata.normalize("NFKC", found[0]), text)
