"""Tokenizer of a `tokenizer.json`, and incremental detokenization."""

from __future__ import annotations

import re
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from tokenizers import Tokenizer

from mingc.artifacts.artifact import Artifact
from mingc.errors import ArtifactError, IntegrityError
from mingc.prompts.text_cuts import blocks, find_cut_pattern

_REPLACEMENT = "\ufffd"
_VISIBLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
# A byte-level vocabulary writes a byte as a visible character: itself, or, in order, one from U+0100 on.
_BYTES = {chr(byte): byte for byte in _VISIBLE} | {
    chr(0x100 + index): byte for index, byte in enumerate(sorted({*range(256)} - {*_VISIBLE}))
}
_MAX_PENDING_TOKENS = 64  # a character has at most 4 tokens; more pending tokens are invalid bytes
_CONTEXT_TOKENS = 8
_MIN_CACHED_CHARACTERS = 256  # shorter blocks are tokenized in tens of microseconds: not worth an entry
_SHORT_CHARACTERS = 2048  # are tokenized in a millisecond
_BLOCK_CHARACTERS = 512  # about so many are tokenized anew if a text differs in its last characters


class TextTokenizer:
    """Tokenizer of one file. No token is added to a text."""

    def __init__(self, tokenizer: Tokenizer, source: str = "tokenizer.json") -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._source = source
        # The same vocabulary (shared, not copied) without added tokens, so that no text of a client becomes one.
        self._plain = Tokenizer(tokenizer.model)
        self._plain.normalizer = tokenizer.normalizer
        self._plain.pre_tokenizer = tokenizer.pre_tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, each in added.items() if each.special)

    @classmethod
    def from_file(cls, path: Path) -> TextTokenizer:
        """Read `path`, a `tokenizer.json` or its folder. Raises: IntegrityError."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise IntegrityError(f"the tokenizer cannot be read: {error}", where=str(file)) from error
        try:
            return cls(Tokenizer.from_str(text), str(file))
        except Exception as error:  # the library raises bare Exception
            raise IntegrityError(f"not a tokenizer file: {error}", where=str(file)) from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def longest_token(self) -> int:
        """Length of the longest token in characters (byte tokens: in bytes)."""
        return max(map(len, self._tokenizer.get_vocab(with_added_tokens=True)), default=1)

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, in which special tokens are recognised. For templates, never for text of a client."""
        return self.encode_texts([text], parse_special_tokens=True)[0]

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of `text`, never an added token: `<|role_end|>` is text like any other."""
        return self.encode_texts([text], parse_special_tokens=False)[0]

    def encode_texts(self, texts: Sequence[str], *, parse_special_tokens: bool) -> list[list[int]]:
        """`encode` or `encode_plain` of each text: long texts by several threads, which leave Python's lock free.

        The library's call for a single text keeps the lock to the end (3 s for 2 MB), but changes no thread.
        """
        tokenizer = self._tokenizer if parse_special_tokens else self._plain
        if sum(map(len, texts)) <= _SHORT_CHARACTERS:
            return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
        return [each.ids for each in tokenizer.encode_batch_fast(list(texts), add_special_tokens=False)]

    def cached_encoder(self, max_characters: int, *, parse_special_tokens: bool) -> CachedEncoder:
        """`encode` or `encode_plain` with a cache: it keeps the token ids of `max_characters` of recent texts."""
        cut = find_cut_pattern(self._tokenizer if parse_special_tokens else self._plain)
        encode = partial(self.encode_texts, parse_special_tokens=parse_special_tokens)
        return CachedEncoder(encode, max_characters, cut)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of `ids`; invalid bytes become U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_name(self, token: int) -> str:
        """The token as the vocabulary writes it (`Ġthe`); "" for an id that it lacks."""
        return self._tokenizer.id_to_token(token) or ""

    def token_bytes(self, token: int) -> bytes | None:
        """What a token adds to the UTF-8 of a text, half a character too; None if it has no text: a special token.

        `decode` of some ids is their bytes, joined, in which U+FFFD replaces what is not UTF-8.
        """
        name = self._tokenizer.id_to_token(token)
        if name is None or token in self._special:
            return None
        try:
            return bytes([_BYTES[character] for character in name])
        except KeyError:
            return name.encode()

    def token_id(self, token: str) -> int:
        """The id of the token with exactly this text. Raises: IntegrityError for an unknown token."""
        found = self.find_token(token)
        if found is None:
            raise IntegrityError(f"the tokenizer has no token {token!r}", where=self._source)
        return found

    def find_token(self, token: str) -> int | None:
        """The id of the token with exactly this text; None for an unknown token."""
        found: int | None = self._tokenizer.token_to_id(token)
        return found


def load_tokenizer(artifact: Artifact, stage: str) -> TextTokenizer:
    """The tokenizer of `stage`. Raises: ArtifactError when the artifact has none."""
    file = artifact.manifest.tokenizers.get(stage)
    if file is None:
        raise ArtifactError(
            f"the artifact has no tokenizer of the {stage}",
            where="manifest.json",
            fix="export again from a checkpoint with tokenizers; mingc probe needs none",
        )
    return TextTokenizer.from_file(artifact.path(file))


class CachedEncoder:
    """Token ids of a text, with a memory of long ones: a document that is asked about again, earlier turns of a chat.

    Texts are tokenized and kept in blocks that end at matches of `cut` (`find_cut_pattern`), so a text that begins like
    an earlier one is tokenized only from the first block that differs. Without `cut` a text is one block, which only an
    equal text uses again. `encode` gets all unknown blocks of a text at once.

    The most recently used blocks are kept, at most `max_characters` together. n characters with m tokens take n to
    4 n + 4 m bytes, and a block 300 bytes. A short last block is not kept. Thread-safe.
    """

    def __init__(
        self,
        encode: Callable[[Sequence[str]], Sequence[Sequence[int]]],
        max_characters: int,
        cut: re.Pattern[str] | None,
    ) -> None:
        self._encode = encode
        self._max_characters = max_characters
        self._cut = cut
        self._lock = threading.Lock()
        self._entries: OrderedDict[str, array[int]] = OrderedDict()
        self._num_characters = 0

    def __call__(self, text: str) -> Sequence[int]:
        """The token ids of `text`."""
        if len(text) > self._max_characters:
            return self._encode([text])[0]
        parts = [*blocks(text, self._cut, _BLOCK_CHARACTERS)]
        found = self._find(parts)
        if missing := [*dict.fromkeys(each for each in parts if each not in found)]:
            encoded = {
                each: array("i", ids) for each, ids in zip(missing, self._encode(missing), strict=True)
            }
            self._keep(encoded)
            found |= encoded
        ids = array("i")
        for part in parts:
            ids.extend(found[part])
        return ids

    def _find(self, parts: Iterable[str]) -> dict[str, array[int]]:
        """The token ids of the blocks that are kept."""
        with self._lock:
            found = {each: self._entries[each] for each in parts if each in self._entries}
            for each in found:
                self._entries.move_to_end(each)
        return found

    def _keep(self, encoded: Mapping[str, array[int]]) -> None:
        """Keep the token ids of blocks that are long enough."""
        with self._lock:
            for block, ids in encoded.items():
                if len(block) >= _MIN_CACHED_CHARACTERS and block not in self._entries:
                    self._entries[block] = ids
                    self._num_characters += len(block)
            while self._num_characters > self._max_characters:
                self._num_characters -= len(self._entries.popitem(last=False)[0])

    def clear(self) -> None:
        """Forget all texts."""
        with self._lock:
            self._entries.clear()
            self._num_characters = 0


class Detokenizer:
    """Incremental detokenizer of one answer.

    The concatenated pieces equal `decode` of all ids. If the bytes of a character span several tokens, the last of them
    returns the character.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []  # the last ids, starting at a character boundary
        self._window_text = ""
        self._shown = 0  # characters of the window's text already returned

    def push(self, token_id: int) -> str:
        """The text that this id completes: "" for an incomplete character or a special token."""
        self._window.append(token_id)
        self._window_text = self._tokenizer.decode(self._window)
        # An incomplete character decodes to exactly one U+FFFD at the end.
        is_whole = not self._window_text.endswith(_REPLACEMENT)
        end = len(self._window_text) if is_whole else len(self._window_text) - 1
        piece = self._window_text[self._shown : end]
        self._shown = max(self._shown, end)
        if is_whole:
            # Keep one id as context: some decoders treat the first token of a text differently.
            self._restart(1)
        elif len(self._window) > _MAX_PENDING_TOKENS:
            self._restart(_CONTEXT_TOKENS)
        return piece

    def flush(self) -> str:
        """The remaining text at the end of the answer: U+FFFD for an incomplete character."""
        piece = self._window_text[self._shown :]
        self._window, self._window_text, self._shown = [], "", 0
        return piece

    def _restart(self, kept: int) -> None:
        hidden = len(self._window_text) - self._shown
        self._window = self._window[-kept:]
        self._window_text = self._tokenizer.decode(self._window)
        self._shown = len(self._window_text) - hidden
