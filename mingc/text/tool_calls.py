"""A call of a tool while the model writes it: `{"name": "f", "arguments": {…}}` between two special tokens."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import NamedTuple, NoReturn


class WrittenCall(NamedTuple):
    """A complete call. `arguments`: the JSON object as the model wrote it."""

    name: str
    arguments: str


class CallScanner:
    """Scans the JSON of one call. How its text is split into pieces does not matter.

    Args:
        names: of the functions that may be called.

    Attributes:
        text: all of the call so far.
        name: its function, once that is known to be callable and the arguments have begun.
        is_in_string: whether the next character belongs to a string.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self.text = ""
        self.name: str | None = None
        self.is_in_string = False
        self._is_escaped = False
        self._depth = 0
        self._string_start = 0
        self._string = self._key = ""  # raw strings of the outer object: the last one, and the current key
        self._name_string = ""
        self._start = self._end = self._sent = -1  # of the arguments

    def push(self, piece: str) -> str:
        """Returns the characters of the arguments that can be sent now; `name` is set with the first."""
        begin = len(self.text)
        self.text += piece
        for index in range(begin, len(self.text)):
            self._scan(self.text[index], index)
        if self._sent < 0 and self._start >= 0 and self._name_string:
            self._sent = self._start
            self.name = self._known_name()
        if self.name is None:
            return ""
        end = len(self.text) if self._end < 0 else self._end
        begin, self._sent = self._sent, end
        return self.text[begin:end]

    def finish(self) -> WrittenCall | None:
        """The call; None if it is broken: no JSON, arguments that are no object, or a function that is not callable."""
        if self.name is None or self._end < 0:
            return None
        arguments = self.text[self._start : self._end]
        try:
            call = json.loads(self.text, parse_constant=_refuse)
            inner = json.loads(arguments)
        except (ValueError, RecursionError):
            return None
        # A key that was written twice, or with escapes, has another value for a parser than for this scanner.
        is_same = call.get("name") == self.name and call.get("arguments") == inner
        return WrittenCall(self.name, arguments) if is_same else None

    def _scan(self, character: str, index: int) -> None:
        if self.is_in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif character == "\\":
                self._is_escaped = True
            elif character == '"':
                self.is_in_string = False
                if self._depth == 1:
                    self._end_string(self.text[self._string_start : index + 1])
        elif character == '"':
            self.is_in_string, self._string_start = True, index
        elif character in "{[":
            self._depth += 1
            if self._depth == 2 and self._key == '"arguments"' and character == "{" and self._start < 0:
                self._start = index
        elif character in "}]":
            self._depth -= 1
            if self._depth == 1 and self._start >= 0 and self._end < 0:
                self._end = index + 1
        elif self._depth == 1 and character == ":":
            self._key = self._string
        elif self._depth == 1 and character == ",":
            self._key = ""

    def _end_string(self, raw: str) -> None:
        self._string = raw
        if self._key == '"name"' and not self._name_string:
            self._name_string = raw

    def _known_name(self) -> str | None:
        try:
            name = json.loads(self._name_string)
        except ValueError:
            return None
        is_object = self.text.lstrip().startswith("{")
        return name if is_object and name in self._names else None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")
