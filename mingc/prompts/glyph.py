"""The text that a picture shall show, as the prompt quotes it, and its ids for the glyph encoder.

Source: spec imagegen.md §2.1, §2.2.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_QUOTED = tuple(map(re.compile, (r'"(.*?)"', r"‘(.*?)’", r"“(.*?)”")))
_FIRST_QUOTE = re.compile(r'["‘“]')
_REMOVING = ("remove", "delete", "erase")
_MAX_WEIGHT = 20  # of a span between two apostrophes that is a quotation
_IDEOGRAPH_WEIGHT = 3

_PAD, _END, _UNKNOWN = 0, 1, 2
_FIRST_BYTE, _NUM_BYTES = 3, 256
_NUM_EXTRA = 125


def glyph_text(prompt: str) -> str:
    """What the glyph encoder reads for the whole text of a prompt; empty if the picture shall show no text.

    It is the last quotation; by kind: `"…"`, then `‘…’`, then `“…”`, not by position.
    """
    spans = prompt.split("'")[1::2]
    if prompt.count("'") % 2 == 0 and all(_weight(span) < _MAX_WEIGHT for span in spans):
        prompt = prompt.replace("'", '"')
    found = [span for pattern in _QUOTED for span in pattern.findall(prompt)]
    if len(found) == 1 and _is_removed(prompt):
        return ""
    return f'Text "{found[-1]}". ' if found and found[-1] else ""


def _weight(span: str) -> int:
    return sum(_IDEOGRAPH_WEIGHT if "\u4e00" <= character <= "\u9fff" else 1 for character in span)


def _is_removed(prompt: str) -> bool:
    """Whether the prompt says to remove something before its first quote mark."""
    quote = _FIRST_QUOTE.search(prompt)
    assert quote is not None, "the prompt has a quotation"
    lower = prompt.lower()
    return any(0 <= lower.find(word) < quote.start() for word in _REMOVING)


class GlyphTokenizer:
    """UTF-8 bytes and tokens → ids, padded to a fixed length.

    Args:
        added_tokens: tokens after those of ByT5, in the order of their ids.
        length: ids of a text.
    """

    def __init__(self, added_tokens: Sequence[str], length: int) -> None:
        self._length = length
        self._ids = {"<pad>": _PAD, "</s>": _END, "<unk>": _UNKNOWN}
        first = _FIRST_BYTE + _NUM_BYTES
        tokens = (*(f"<extra_id_{index}>" for index in range(_NUM_EXTRA)), *added_tokens)
        self._ids |= {token: first + index for index, token in enumerate(tokens)}
        self._token = re.compile(f"({'|'.join(map(re.escape, self._ids))})")

    def encode(self, text: str) -> NDArray[np.int64]:
        """Ids (length,) int64: of the text, `</s>`, then padding. Of a text that is too long, those that fit."""
        ids: list[int] = []
        for piece in self._token.split(text):
            ids += (
                (self._ids[piece],) if piece in self._ids else (_FIRST_BYTE + byte for byte in piece.encode())
            )
        ids = [*ids[: self._length - 1], _END]
        padded = np.full(self._length, _PAD, np.int64)
        padded[: len(ids)] = ids
        return padded
