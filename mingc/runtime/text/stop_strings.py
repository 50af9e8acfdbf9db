"""Ends an answer at a stop string, also when it is spread over several tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Holds back text that may be the beginning of a stop string; what follows one never comes out."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that may be shown, whether a stop string was met). Nothing may be pushed after one was."""
        self._held += text
        found = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((overlap(self._held, stop) for stop in self._stops), default=0)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown, False

    def flush(self) -> str:
        """What was held back, when the answer ended otherwise."""
        shown, self._held = self._held, ""
        return shown


def overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that `mark` could go on from: a proper beginning of it."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)
