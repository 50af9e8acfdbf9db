"""Byte tokenizer for random weights: tokens of bytes and of the chat template, a distinct text for every further id."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mingc.errors import ConfigError

_TEMPLATE_TOKENS = ("<role>", "</role>", "<|role_end|>")  # written by id: no text of a client becomes one


def byte_tokenizer(vocab_size: int) -> str:
    """The tokenizer.json. A text of n bytes has n tokens; an id beyond bytes and template decodes to ` id`.

    Raises: ConfigError when these do not fit into the vocabulary.
    """
    alphabet = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *_TEMPLATE_TOKENS]
    if vocab_size < len(alphabet):
        raise ConfigError(
            f"{vocab_size} ids are too few for the {len(alphabet)} tokens of a synthetic tokenizer",
            where="vocab_size",
            fix="put a tokenizer.json beside the configs",
        )
    # In the byte-level alphabet Ġ stands for a space.
    words = alphabet + [f"Ġ{number}" for number in range(len(alphabet), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text
