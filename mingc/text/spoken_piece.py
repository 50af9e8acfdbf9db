"""Pieces of what is spoken of a text, with the places of the text where they end."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

_WIDE = "぀-ヿ㐀-䶿一-鿿가-힯豈-﫿"
_GAP = re.compile(rf"\s+|(?<=[{_WIDE}])(?=[{_WIDE}])")


class SpokenPiece(NamedTuple):
    """What is said in one segment of the talker.

    Attributes:
        text: normalised words.
        end: characters of the source up to the end of the piece, which begins where the one before it ends. None:
            unknown.
    """

    text: str
    end: int | None = None


def places_of_parts(source: str, sizes: Sequence[int]) -> Iterator[int]:
    """Where the parts of a source end that have these sizes when they are spoken: the last one at the end.

    The others end between words where their share of the source ends.
    """
    gaps = [match.end() for match in _GAP.finditer(source)] if len(sizes) > 1 else []
    place = 0
    for size in accumulate(sizes[:-1]):
        share = size / sum(sizes) * len(source)
        place = max(place, min(gaps, key=lambda gap: abs(gap - share), default=round(share)))
        yield place
    yield len(source)
