"""Filters for the text of a streamed answer: stop strings, the thought block, white space around calls."""

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


class ThoughtSplitter:
    """Separates a leading `<think>…</think>` block from the deltas of one answer.

    The tags count only at the start of the answer; later they are ordinary text. How the text is split into deltas does
    not matter. White space inside of the tags, and after the thought, is left out.

    Attributes:
        is_thinking: whether the thought has begun and not ended.
    """

    def __init__(self) -> None:
        self._held = ""  # text that may be the start of a tag, or white space at the end of the thought
        self._is_beginning = True
        self.is_thinking = False
        self._has_thought = self._has_text = False

    def push(self, delta: str) -> tuple[str, str]:
        """Returns the parts of the thought and of the text that are certain now."""
        text, self._held = self._held + delta, ""
        if self._is_beginning:
            start = text.lstrip()
            if len(start) < len(_BEGIN) and _BEGIN.startswith(start):
                self._held = text
                return "", ""
            self._is_beginning = False
            self.is_thinking = start.startswith(_BEGIN)
            self._has_text = not self.is_thinking
            if self.is_thinking:
                text = start.removeprefix(_BEGIN)
        if not self.is_thinking:
            return "", self._answer(text)
        thought, end, answer = text.partition(_END)
        if not self._has_thought:
            thought = thought.lstrip()
        if end:
            self.is_thinking = False
            return thought.rstrip(), self._answer(answer)
        shown = thought[: len(thought) - _overlap(thought, _END)].rstrip()
        self._held = thought[len(shown) :]
        self._has_thought |= bool(shown)
        return shown, ""

    def flush(self) -> tuple[str, str]:
        """The rest of the thought or of the text, at the end of the answer or before a call."""
        self._is_beginning = False
        rest, self._held = self._held, ""
        return (rest.rstrip(), "") if self.is_thinking else ("", rest)

    def _answer(self, text: str) -> str:
        if not self._has_text:
            text = text.lstrip()
            self._has_text = bool(text)
        return text


class SpaceAroundCalls:
    """Leaves out the white space between the text of an answer and its calls, and between calls.

    White space between two texts stays, whatever is between them.
    """

    def __init__(self) -> None:
        self._held = ""  # white space at the end
        self._has_text = self._has_call = False

    def push(self, text: str) -> str:
        """The text that is certain now."""
        text = self._held + text
        shown = text.rstrip()
        self._held = text[len(shown) :]
        if self._has_call and not self._has_text:
            shown = shown.lstrip()
        self._has_text |= bool(shown)
        return shown

    def add_call(self) -> None:
        """A call stands here."""
        self._has_call = True
        if not self._has_text:
            self._held = ""

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return "" if self._has_call else self._held
