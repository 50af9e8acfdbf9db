"""Finds places to cut a text such that its parts, tokenized one by one, have the token ids of the whole text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from tokenizers import Tokenizer, models

# A cut follows a character of a word and precedes one that cannot follow it in a word. Only letters that every version
# of Unicode calls letters are cut from a newline or a mark, as `_` and a newline can be one word.
_AFTER_WORDS = re.compile(r"\w(?= )|[a-zA-Z一-龥ぁ-ゖァ-ヺ](?=[\n，。、；：！？])")
_AFTER_FULL_STOPS = re.compile(r"\.")

_CUTS = {
    # The released thinker.
    (
        "Regex",
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+",
        "Isolated",
    ): _AFTER_WORDS,
    # Qwen2, the released talker.
    (
        "Regex",
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+",
        "Isolated",
    ): _AFTER_WORDS,
    # Synthetic checkpoints.
    ("String", ".", "MergedWithPrevious"): _AFTER_FULL_STOPS,
}


def find_cut_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    r"""The pattern whose matches end where a text of `tokenizer` can be cut; None when no place is known.

    The proof holds for known ways of splitting a text into words, if each word is tokenized alone, without
    normalization or with NFC:

    - No match of the known expressions contains both characters around a cut, so every text has a word boundary there.
    - The expressions look back at nothing, so the text after a cut is split as if it were the whole text.
    - The character after a cut continues no match and satisfies no lookahead that the end of the text does not, so the
      end of the text has the same effect. A run of whitespace, whose end they look for (`\s+(?!\S)`), never reaches a
      cut.
    - NFC combines none of the characters after a cut with an earlier one.

    Added tokens must not contain a cut or depend on the text around them.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    words = Tokenizer(models.BPE())  # without the vocabulary, which takes long to write
    words.normalizer, words.pre_tokenizer = tokenizer.normalizer, tokenizer.pre_tokenizer
    match json.loads(words.to_str()):
        case {
            "normalizer": None | {"type": "NFC"},
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    {"type": "Split", "pattern": pattern, "behavior": behavior, "invert": False},
                    {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
                ],
            },
        }:
            ((kind, text),) = pattern.items()
            cut = _CUTS.get((kind, text, behavior))
        case _:
            return None
    for token in added:
        if token.lstrip or token.rstrip or token.single_word or token.normalized:
            return None
        if cut is not None and cut.search(token.content):
            return None
    return cut


def blocks(text: str, cut: re.Pattern[str] | None, size: int) -> Iterator[str]:
    """The parts of `text` between cuts: the shortest with at least `size` characters; the last may be shorter.

    Texts with a common beginning have common first blocks: the length of a block depends on nothing after the character
    that follows it. Without `cut`, the whole text is one block.
    """
    start = 0
    if cut is not None:
        while match := cut.search(text, start + size - 1):
            yield text[start : match.end()]
            start = match.end()
    if start < len(text):
        yield text[start:]
