"""Tokenizer for random weights: tokens of bytes and of the chat template, and one word for every further id."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mingc.errors import ConfigError

_TEMPLATE_TOKENS = ("<role>", "</role>", "<|role_end|>")  # written by id: no text of a client becomes one
_CONSONANTS, _VOWELS, _NUM_SYLLABLES = "bcdfghjklmnprstvz", "aeiou", 3
_WORDS_A_MARK = 13  # one word in this many ends a sentence, one a clause
# Logarithms of probabilities: the most probable pieces of a text are its tokens.
_WORD, _BYTE, _NEVER = -1.0, -10.0, -1e6


def word(number: int) -> str:
    """A word of three syllables for an id, one of 614,125; some end with a full stop or a comma.

    Random ids are then a text whose sentences have about the length of written ones, as what is spoken is cut there.
    """
    syllables, rest = "", number
    for _ in range(_NUM_SYLLABLES):
        rest, vowel = divmod(rest, len(_VOWELS))
        rest, consonant = divmod(rest, len(_CONSONANTS))
        syllables += _CONSONANTS[consonant] + _VOWELS[vowel]
    return syllables + {0: ".", _WORDS_A_MARK // 2: ","}.get(number % _WORDS_A_MARK, "")


def byte_tokenizer(vocab_size: int) -> str:
    """The tokenizer.json. An id beyond bytes and template is a space and its `word`; all other text is tokens of bytes.

    So a prompt of random words has tokens from the whole vocabulary.

    Raises: ConfigError when the bytes and the template do not fit into the vocabulary.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_fixed = len(alphabet) + len(_TEMPLATE_TOKENS)
    if vocab_size < num_fixed:
        raise ConfigError(
            f"{vocab_size} ids are too few for the {num_fixed} tokens of a synthetic tokenizer",
            where="vocab_size",
            fix="put a tokenizer.json beside the configs",
        )
    pieces = [(letter, _BYTE) for letter in alphabet] + [(name, _NEVER) for name in _TEMPLATE_TOKENS]
    # In the byte-level alphabet Ġ stands for a space.
    pieces += [(f"Ġ{word(number)}", _WORD) for number in range(num_fixed, vocab_size)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    text: str = tokenizer.to_str()
    return text
