"""The grammar stage for Chinese text: reads every number that the regex stage left, and narrows punctuation.

The official normaliser runs weighted transducers (WeTextProcessing) last. They are not used here: a shortest path
over the same rules and weights (`grammar.py`) is searched instead. A character that is kept costs the most, so
numbers are read wherever a rule can read them.
"""

from __future__ import annotations

from mingc.runtime.text.characters import NARROW_CHARACTERS
from mingc.runtime.text.grammar import KEPT_CHARACTER_COST, RULES
from mingc.runtime.text.traditional import SIMPLIFIED


def speak_leftovers(text: str) -> str:
    """Read the numbers left in Chinese `text`; traditional characters and wide marks are replaced as well."""
    return _cheapest_reading(text.translate(SIMPLIFIED | NARROW_CHARACTERS))


def _cheapest_reading(text: str) -> str:
    # best[i]: cost of reading text[:i], where its last stretch starts, and what that stretch says.
    best: list[tuple[int, int, str] | None] = [(0, 0, ""), *[None] * len(text)]

    def offer(start: int, end: int, spoken: str, cost: int) -> None:
        known = best[end]
        if known is None or cost < known[0]:
            best[end] = (cost, start, spoken)

    for start, character in enumerate(text):
        reached = best[start]
        assert reached is not None
        cost = reached[0]
        offer(start, start + 1, character, cost + KEPT_CHARACTER_COST)
        for weight, rule in RULES:
            for end, spoken in rule(text, start):
                offer(start, end, spoken, cost + weight)

    words: list[str] = []
    end = len(text)
    while end:
        step = best[end]
        assert step is not None
        words.append(step[2])
        end = step[1]
    return "".join(reversed(words))
