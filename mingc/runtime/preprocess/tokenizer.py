"""Text ↔ token ids through a `tokenizer.json`, and text that grows token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from mingc.errors import IntegrityError

_REPLACEMENT = "\ufffd"
_MAX_PENDING_TOKENS = 64  # a character takes 4 tokens at most; more pending tokens are broken bytes
_KEPT_PENDING_TOKENS = 8


class TextTokenizer:
    """A tokenizer file. Special tokens written out in a text are recognised; none is added."""

    def __init__(self, tokenizer: Tokenizer, source: str = "tokenizer.json") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._source = source

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """Reads `path`, a `tokenizer.json` or the folder that holds one. Raises IntegrityError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"the tokenizer cannot be read: {error}", where=str(file)) from error
        try:
            return cls(Tokenizer.from_str(text), str(file))
        except Exception as error:  # the library raises bare Exception
            raise IntegrityError(f"this is no tokenizer: {error}", where=str(file)) from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def longest_token(self) -> int:
        """Characters of the longest token; of tokens that are bytes as many as it has bytes."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no character become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_id(self, token: str) -> int:
        """The id of a token given by its exact text. Raises IntegrityError when there is none."""
        found = self._tokenizer.token_to_id(token)
        if found is None:
            raise IntegrityError(f"the tokenizer has no token {token!r}", where=self._source)
        return int(found)

    def detokenizer(self) -> Detokenizer:
        """A new stream of text."""
        return Detokenizer(self)


class Detokenizer:
    """Turns generated ids into text piece by piece. Not shared between requests.

    Joined, the pieces are `decode` of all ids. A character whose bytes are spread over several tokens comes with the
    last of them, never in halves.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last ids, from a place where characters are whole
        self._window_text = ""
        self._shown = 0  # characters of the window's text already given out

    def push(self, token_id: int) -> str:
        """The text that this id makes visible: "" while a character is incomplete and for special tokens."""
        self._window.append(token_id)
        self._window_text = self._tokenizer.decode(self._window)
        # Of an unfinished character decoding shows exactly one U+FFFD, at the end.
        is_whole = not self._window_text.endswith(_REPLACEMENT)
        end = len(self._window_text) if is_whole else len(self._window_text) - 1
        piece = self._window_text[self._shown : end]
        self._shown = max(self._shown, end)
        if is_whole:
            # One id stays as context: some decoders treat the first token of a text in its own way.
            self._restart(1)
        elif len(self._window) > _MAX_PENDING_TOKENS:
            self._restart(_KEPT_PENDING_TOKENS)
        return piece

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never became whole."""
        piece = self._window_text[self._shown :]
        self._window, self._window_text, self._shown = [], "", 0
        return piece

    def _restart(self, kept: int) -> None:
        hidden = len(self._window_text) - self._shown
        self._window = self._window[-kept:]
        self._window_text = self._tokenizer.decode(self._window)
        self._shown = len(self._window_text) - hidden
