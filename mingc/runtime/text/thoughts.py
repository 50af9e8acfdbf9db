"""Tells what an answer says from what it thinks first: `<think>…</think>` at its beginning is never spoken."""

from __future__ import annotations

from mingc.runtime.text.stop_strings import overlap

_BEGIN, _END = "<think>", "</think>"


class ThoughtFilter:
    """Passes the text of one answer on without its thoughts, as it arrives in deltas.

    The marks count only where the answer begins: further on they are text like any other, say of an answer about
    them. A thought that does not end is not spoken.
    """

    def __init__(self) -> None:
        self._held = ""  # text of which it is not known yet whether it is a mark
        self._is_beginning = True
        self._is_thinking = False

    def push(self, delta: str) -> str:
        """What of the text so far can be spoken now."""
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
            self._held = text[len(text) - overlap(text, _END) :]
            return ""
        self._is_thinking = False
        return answer

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        rest, self._held = self._held, ""
        return "" if self._is_thinking else rest
