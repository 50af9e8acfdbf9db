"""The tokens of a model for llguidance, and the limits of its matchers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from mingc.prompts.tokenizer import TextTokenizer

# What tests/unit/test_grammar.py tries beside ordinary grammars. A state of the lexer takes about 1 kB.
_LIMITS = LLParserLimits(initial_lexer_fuel=200_000, max_lexer_states=50_000, verbose_errors=False)
_WINDOW_TOKENS = 8  # llguidance takes back up to 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Vocabulary:
    """`tokens`: the bytes of each id, or the name of a special token. `stop_ids` end an answer."""

    tokens: Sequence[bytes]
    special_ids: Sequence[int]
    stop_ids: Sequence[int]

    @classmethod
    def of(cls, tokenizer: TextTokenizer, vocab_size: int, stop_ids: Sequence[int]) -> Vocabulary:
        """All ids below `vocab_size`; those that the tokenizer lacks are empty."""
        found = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        names = {i: tokenizer.token_name(i).encode() for i, token in enumerate(found) if token is None}
        special = [token for token, name in names.items() if name]
        tokens = [names[i] if token is None else token for i, token in enumerate(found)]
        return cls(tokens=tokens, special_ids=special, stop_ids=tuple(stop_ids))

    def to_json(self) -> str:
        tokens = [token.decode("latin-1") for token in self.tokens]
        return json.dumps([tokens, list(self.special_ids), list(self.stop_ids)])

    @classmethod
    def from_json(cls, text: str) -> Vocabulary:
        tokens, special, stop = json.loads(text)
        return cls(tokens=[token.encode("latin-1") for token in tokens], special_ids=special, stop_ids=stop)


class Grammars:
    """Makes matchers for one vocabulary.

    llguidance asks `encode` for the tokens of text that the grammar forces. `encode` must not recognise special tokens:
    llguidance's own reading of a `tokenizer.json` does, and then contradicts itself where a string has their names.
    It asks at every token for all that follows, so only the beginning is tokenized.
    """

    def __init__(self, vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> None:
        # The attributes of llguidance's TokenizerWrapper.
        self.is_tokenizer_wrapper = True
        self.tokens = vocabulary.tokens
        self.special_token_ids = vocabulary.special_ids
        self.eos_token_id = vocabulary.stop_ids[0]
        self.bos_token_id = None
        self._encode = encode
        self._window = _WINDOW_TOKENS * max(map(len, vocabulary.tokens))
        self._tokenizer = LLTokenizer(self, eos_token=list(vocabulary.stop_ids))  # type: ignore[arg-type]
        self.tokens = ()  # copied

    def __call__(self, text: str) -> Sequence[int]:
        return self._encode(text[: self._window])

    def matcher(self, grammar: str) -> LLMatcher:
        """A matcher that may have an error."""
        return LLMatcher(self._tokenizer, grammar, log_level=0, limits=_LIMITS)

    def first_mask_error(self, grammar: str) -> str:
        """What is wrong with a grammar, found by compiling it and looking for its first tokens; "" if nothing is."""
        matcher = self.matcher(grammar)
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()
