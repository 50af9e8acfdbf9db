"""Filters for the text of a streamed answer: stop strings, and the thought block, which is not spoken."""

from __future__ import annotations

from collections.abc import Sequence

_BEGIN, _END = "<think>", "</think>"


class StopStrings:
    """Stop-string filter of one streamed answer; holds back text that may be the start of a stop string.

    The answer ends at the stop string that is complete first, the longest one if several are. How the text is split
    into deltas does not matter.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Returns the text to emit, and whether a stop string was found; after that, do not push any more."""
        self._held += text
        found = [(start + len(stop), start) for stop in self._stops if (start := self._held.find(stop)) >= 0]
        if found:
            _, start = min(found)
            shown, self._held = self._held[:start], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        end = len(self._held) - keep
        shown, self._held = self._held[:end], self._held[end:]
        return shown, False

    def flush(self) -> str:
        """The held text, at the end of an answer without a stop string."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, mark: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `mark`."""
    longest = min(len(mark) - 1, len(text))
    return next((size for size in range(longest, 0, -1) if text.endswith(mark[:size])), 0)


class ThoughtFilter:
    """Removes a leading `<think>…</think>` block from the deltas of one answer, so that it is not spoken.

    The tags count only at the start of the answer; later they are ordinary text. An unfinished thought is removed.
    """

    def __init__(self) -> None:
        self._held = ""  # text that may be the start of a tag
        self._is_beginning = True
        self._is_thinking = False

    def push(self, delta: str) -> str:
        """Returns the text that is certainly outside of the thought."""
        text, self._held = self._held + delta, ""
        if self._is_beginning:
            start = text.lstrip()
            if len(start) < len(_BEGIN) and _BEGIN.startswith(start):
                self._held = text
                return ""
            self._is_beginning = False
            self._is_thinking = start.startswith(_BEGIN)
        if not self._is_thinking:
            return text
        _thought, end, answer = text.partition(_END)
        if not end:
            self._held = text[len(text) - _overlap(text, _END) :]
            return ""
        self._is_thinking = False
        return answer

    def flush(self) -> str:
        """The held text, at the end of the answer."""
        rest, self._held = self._held, ""
        return "" if self._is_thinking else rest
