"""What is said of one clause: its markup removed, its numbers and symbols read in its language."""

from __future__ import annotations

import re
import unicodedata
from typing import Literal

from mingc.text.natural.chinese import read_chinese
from mingc.text.natural.english import has_abbreviation, read_english
from mingc.text.natural.markup import plain_text

Language = Literal["en", "zh", "other"]

_IDEOGRAPH = re.compile("[㐀-䶿一-鿿豈-﫿]")
_KANA_OR_HANGUL = re.compile("[぀-ヿㇰ-ㇿ가-힯ᄀ-ᇿ]")
# A clause of words alone, with a mark at its end: no rule of English changes it. Behind a capital, a full stop may
# belong to an abbreviation; `I` may be a number.
_AS_WRITTEN = re.compile(
    r"\s*((?:(?!(?:vs|St|Dr)\b)[A-Z]?[a-z]++(?:['’][a-z]++)*+ )*"
    r"(?:(?!vs\b)[a-z]++(?:['’][a-z]++)*+[,;:!?.]?|(?!(?:St|Dr)\b)[A-Z][a-z]++[,;:!?]?))\s*"
)
_LATIN_WORD = re.compile(r"[A-Za-zÀ-ɏ]+(?:['’][A-Za-z]+)*")
_AFTER_NUMBER = re.compile(r"(?<=\d)[°º]?[A-Za-zµμ/]{1,4}(?![A-Za-z])")
_QUOTES = str.maketrans(dict.fromkeys("\"“”„«»「」『』《》〈〉", " ") | {"(": ",", ")": ",", "[": ",", "]": ",",
 "{": ",", "}": ",", "（": "，", "）": "，", "【": "，", "】": "，", "’": "'", "‘": "'"})  # fmt: skip
_MARKS = ",.!?;:，。！？；：、"
# What `_spoken` changes, and letters of other scripts.
_NOT_AS_IT_IS = re.compile(rf"[^A-Za-z0-9 '\-_/{_MARKS}㐀-䶿一-鿿]")
_PAUSES = re.compile(rf"\s*([{_MARKS}])(?:\s*[{_MARKS}])*")
_LEADING = re.compile(rf"^[\s{_MARKS}'-]+")
_BLANKS = re.compile(r"\s+")
_BETWEEN_IDEOGRAPHS = re.compile("(?<=[㐀-䶿一-鿿]) +(?=[㐀-䶿一-鿿])")
_AFTER_MARK = re.compile("(?<=[，。！？；：、]) ")
_LOOSE_HYPHEN = re.compile(r"(?<!\w)[-_'/]+|'+(?!\w)|[-_/]+(?!\w)|(?<=\w)_+(?=\w)")


def language_of(text: str, before: Language) -> Language:
    """The language in which the numbers of a clause are read: of its words, else of the text before it."""
    ideographs = len(_IDEOGRAPH.findall(text))
    if _KANA_OR_HANGUL.search(text):
        return "other"
    if not ideographs and before == "zh":
        text = _AFTER_NUMBER.sub("", text)  # units are no words of another language
    words = len(_LATIN_WORD.findall(text))
    if ideographs:
        return "zh" if 2 * ideographs >= words else "en"
    if words:
        return "en"
    return "other" if any(each.isalpha() for each in text) else before


def read_clause(text: str, before: Language) -> tuple[str, Language]:
    """The words and pauses of a clause, empty if there is nothing to say, and its language.

    Letters of any script stay. Digits of a clause in another script than Latin or Han are left to the talker.
    """
    if not text or text.isspace():
        return "", before
    if (words := _AS_WRITTEN.fullmatch(text)) and not has_abbreviation(words[1]):
        return words[1].replace("’", "'"), "en"
    text = plain_text(text)
    language = language_of(text, before)
    if language == "en":
        text = read_english(text)
    elif language == "zh":
        text = read_chinese(text)
    text = _LOOSE_HYPHEN.sub(" ", _NOT_AS_IT_IS.sub(lambda found: _spoken(found[0]), text.translate(_QUOTES)))
    text = _BLANKS.sub(" ", _LEADING.sub("", _PAUSES.sub(r"\1 ", text))).strip()
    if language == "zh":
        text = _BETWEEN_IDEOGRAPHS.sub("", _AFTER_MARK.sub("", text))
    return (text, language) if any(each.isalnum() for each in text) else ("", language)


def _spoken(character: str) -> str:
    """Letters, their marks, digits, and the marks that make a pause; a blank for the rest."""
    if character.isascii():
        return character if character.isalnum() or character in " ,.!?;:'-_/" else " "
    category = unicodedata.category(character)
    if category[0] in "LM" or character in _MARKS:
        return character
    if category[0] == "N":
        value = unicodedata.numeric(character, None)
        return str(int(value)) if value is not None and value == int(value) else character
    return "," if category == "Pd" else " "
