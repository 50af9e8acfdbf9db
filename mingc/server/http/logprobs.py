"""Log probabilities in OpenAI's shapes: of a chat, with the bytes of each token, and of a completion."""

from __future__ import annotations

import codecs
from collections.abc import Iterable
from typing import Any

from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.request import TokenLogprobs
from mingc.server.http.response_schemas import (
    ChatLogprobs,
    CompletionLogprobs,
    TokenLogprob,
    TopLogprob,
)

Entries = Iterable[tuple[int, TokenLogprobs]]
_LEAST = -9999.0  # JSON has no infinity; other servers send the same


def chat_logprobs(entries: Entries, tokenizer: TextTokenizer) -> ChatLogprobs:
    """The bytes of all tokens, joined, are the UTF-8 of the text; a special token has none (null)."""
    return ChatLogprobs(
        [
            TokenLogprob(
                **_token(token, tokenizer),
                logprob=max(each.logprob, _LEAST),
                top_logprobs=[
                    TopLogprob(**_token(other, tokenizer), logprob=max(logprob, _LEAST))
                    for other, logprob in each.top
                ],
            )
            for token, each in entries
        ]
    )


def _token(token: int, tokenizer: TextTokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    if data is None:
        return {"token": tokenizer.token_name(token), "bytes": None}
    return {"token": data.decode(errors="replace"), "bytes": list(data)}


def transcript_logprobs(entries: Entries, tokenizer: TextTokenizer) -> list[TopLogprob]:
    """Those of a transcript, without likelier tokens."""
    return [
        TopLogprob(**_token(token, tokenizer), logprob=max(each.logprob, _LEAST)) for token, each in entries
    ]


class CompletionLogprobsWriter:
    """Log probabilities of the tokens of one completion, which follow each other."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0  # characters
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def write(self, entries: Entries) -> CompletionLogprobs:
        """The next tokens. The alternatives of a token include itself, even if others are likelier."""
        made = CompletionLogprobs()
        for token, each in entries:
            made.tokens.append(self._name(token))
            made.token_logprobs.append(max(each.logprob, _LEAST))
            alternatives = {token: each.logprob, **dict(each.top)}
            made.top_logprobs.append(
                {self._name(other): max(value, _LEAST) for other, value in alternatives.items()}
            )
            made.text_offset.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token) or b""))
        return made

    def _name(self, token: int) -> str:
        """The text of a token. Half characters are written as bytes, as OpenAI does, so that they differ."""
        data = self._tokenizer.token_bytes(token)
        if data is None:
            return self._tokenizer.token_name(token)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
