"""Tokenizer for random weights: tokens of bytes and of prompt templates, and one word for every further id."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from mingc.errors import ConfigError

_CONSONANTS, _VOWELS, _NUM_SYLLABLES = "bcdfghjklmnprstvz", "aeiou", 3
_WORDS_A_MARK = 13  # one word in this many ends a sentence, one a clause
# Logarithms of probabilities: the most probable pieces of a text are its tokens.
_WORD, _BYTE, _NEVER = -1.0, -10.0, -1e6


def word(number: int) -> str:
    """The three-syllable word of an id, one of 614,125 words; some end with a full stop or a comma.

    Text of random ids then has sentences of about natural length, at which speech is cut into segments.
    """
    syllables, rest = "", number
    for _ in range(_NUM_SYLLABLES):
        rest, vowel = divmod(rest, len(_VOWELS))
        rest, consonant = divmod(rest, len(_CONSONANTS))
        syllables += _CONSONANTS[consonant] + _VOWELS[vowel]
    return syllables + {0: ".", _WORDS_A_MARK // 2: ","}.get(number % _WORDS_A_MARK, "")


def byte_tokenizer(vocab_size: int, special_tokens: Sequence[str]) -> str:
    """The text of a tokenizer.json.

    An id beyond bytes and special tokens is a space and its `word`; other text is bytes. So a prompt of random words
    has tokens from the whole vocabulary.

    Args:
        vocab_size: number of ids, special tokens included.
        special_tokens: tokens of the prompt's template. As in any tokenizer, they are recognised in templates, but a
            client's text is encoded without added tokens and never becomes one.

    Raises: ConfigError when bytes and special tokens do not fit into the vocabulary.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    num_fixed = len(alphabet) + len(special_tokens)
    if vocab_size < num_fixed:
        raise ConfigError(
            f"{vocab_size} ids are too few for the {num_fixed} tokens of a synthetic tokenizer",
            where="vocab_size",
            fix="put a tokenizer.json next to the configs",
        )
    pieces = [(letter, _BYTE) for letter in alphabet] + [(name, _NEVER) for name in special_tokens]
    # In the byte-level alphabet Ġ stands for a space.
    pieces += [(f"Ġ{word(number)}", _WORD) for number in range(num_fixed, vocab_size)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=None, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # No piece goes on after a full stop, so this changes no token. A server can then tokenize the parts of a
            # text one by one, and keep their tokens.
            pre_tokenizers.Split(".", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*special_tokens])  # with the ids that they have
    text: str = tokenizer.to_str()
    return text
