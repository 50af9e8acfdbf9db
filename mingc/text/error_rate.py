"""Word error rates of transcripts, of characters where words have no blanks between them.

Both texts are normalised alike, as the evaluation of Seed-TTS does it (`run_wer.py` of seed-tts-eval), and by NFKC
first, so that full-width letters and digits equal the plain ones: letters become lower case; punctuation and symbols
go, also those inside of words ("twenty-one" is "twentyone"), except an apostrophe between letters ("don't", also with
a typographic one). Numerals stay as they are written: "42" and "forty-two" differ, and so do traditional and simplified
ideographs. A caller who wants them equal rewrites both texts before.

A unit of `word_errors` is a word, or one ideograph or kana: for English it is the word error rate, for Chinese the
character error rate that the literature reports, for a mixed text the mixed error rate.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_APOSTROPHES = str.maketrans("’‘ʼ`´", "'''''")
_EDGE_APOSTROPHE = re.compile(r"(?<![^\W_])'|'(?![^\W_])")
# Kana, ideographs of every plane, and the mark that repeats an ideograph.
_WRITTEN_WITHOUT_BLANKS = re.compile(
    "([\u3005\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff])"
)


@dataclass(frozen=True, slots=True)
class UnitErrors:
    """The fewest substitutions, insertions and deletions that make the reference of `num_units` the hypothesis."""

    num_edits: int
    num_units: int

    @property
    def rate(self) -> float:
        """Edits per unit of the reference: above 1 when much was inserted. An empty reference counts as one unit."""
        return self.num_edits / max(1, self.num_units)


def word_errors(reference: str, hypothesis: str) -> UnitErrors:
    """Compare words and, of languages without blanks, characters."""
    return _errors(_words(reference), _words(hypothesis))


def normalised(text: str) -> str:
    """Return `text` without case, punctuation and superfluous blanks, as the module's description says."""
    plain = unicodedata.normalize("NFKC", text.translate(_APOSTROPHES)).casefold()
    kept = "".join(
        each for each in plain if each == "'" or each.isspace() or unicodedata.category(each)[0] in "LMN"
    )
    return " ".join(_EDGE_APOSTROPHE.sub("", kept).split())


def _words(text: str) -> list[str]:
    return _WRITTEN_WITHOUT_BLANKS.sub(r" \1 ", normalised(text)).split()


def _errors(reference: Sequence[str], hypothesis: Sequence[str]) -> UnitErrors:
    """Levenshtein's distance, one row of the table at a time."""
    numbers: dict[str, int] = {}
    wanted, got = (
        np.array([numbers.setdefault(unit, len(numbers)) for unit in units], dtype=np.int64)
        for units in (reference, hypothesis)
    )
    columns = np.arange(len(got) + 1)
    row = columns.copy()
    for unit in wanted:
        changed = np.minimum(row[1:] + 1, row[:-1] + (got != unit))  # deleted, or kept or substituted
        row = np.concatenate(([row[0] + 1], changed))
        row = np.minimum.accumulate(row - columns) + columns  # inserted, once or more
    return UnitErrors(int(row[-1]), len(wanted))
