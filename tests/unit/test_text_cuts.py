"""Texts that are tokenized part by part have the token ids that the library gives for the whole text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from preprocess_data import CHECKPOINT
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from mingc.export.assets.byte_tokenizer import byte_tokenizer, word
from mingc.prompts.text_cuts import blocks, find_cut_pattern
from mingc.prompts.tokenizer import TextTokenizer

FILES = {"thinker": CHECKPOINT / "tokenizer.json", "talker": CHECKPOINT / "talker/llm/tokenizer.json"}
WORDS = [f" {word(number)}" for number in range(300, 340)]
# Whatever a tokenizer may split, join, normalize or take for a token of its own.
FRAGMENTS = [
    "the", "The ", " a", "end.", "'s", "'S", "'ll ", "'l", "’s", "don't", "1", "23 ", "４", "Ⅷ ", "_", "__ ", "_\n",
    " ", "  ", "\t", "\n", "\r\n", "\r", "\n\n", " \n ", "\u00a0", "\u3000", "\u2028", "\u200b", "\u180e", "\x1c",
    "\x85", "。", "，", "！\n", "；", "你好", "世界 ", "。\n", "か", "か\u3099", "ヺ", "한국", "\u1100\u1161\u11a8",
    "é", "e\u0301", "\u0301", " \u0301", "\u0344", "\u0345 ", "\u0378", "\u0378\n", "👩\u200d👩\u200d👧", "🏽",
    "\ufe0f", ".", "...", "?", "!!", "<|role_end|>", "<role>", "<|role", "_end|>", "<", "|>", "<|im_end|> ", "\u017f",
    "\u212a ", "ß", "\uf900", "\ufb01", *WORDS[:4],
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(FRAGMENTS) | st.characters(exclude_categories=["Cs"])).map("".join)


@cache
def corpus() -> list[str]:
    """Texts to train on, so that tokens span whatever a wrong cut would separate."""
    source = random.Random(0)
    return ["".join(source.choices(FRAGMENTS, k=12)) for _ in range(300)]


@cache
def tokenizer(name: str) -> Tokenizer:
    """One of the cuttable tokenizers. Those of the checkpoint are trained anew: they have few tokens of many bytes."""
    if name == "synthetic":
        return Tokenizer.from_str(byte_tokenizer(1000, ("<role>", "<|role_end|>")))
    released = Tokenizer.from_file(str(FILES[name]))
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer, trained.normalizer = released.pre_tokenizer, released.normalizer
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet))
    trained.add_special_tokens([added.content for added in released.get_added_tokens_decoder().values()])
    return trained


CUTTABLE = ("thinker", "talker", "synthetic")


def words(each: Tokenizer, text: str) -> list[str]:
    normalized = text if each.normalizer is None else each.normalizer.normalize_str(text)
    return [piece for piece, _ in each.pre_tokenizer.pre_tokenize_str(normalized)]


def check_blocks(each: Tokenizer, text: str, size: int) -> None:
    cut = find_cut_pattern(each)
    assert cut is not None
    parts = [*blocks(text, cut, size)]
    assert "".join(parts) == text
    assert all(len(part) >= size for part in parts[:-1]) and all(parts)
    assert [piece for part in parts for piece in words(each, part)] == words(each, text)
    for encode in (TextTokenizer(each).encode, TextTokenizer(each).encode_plain):
        assert [token for part in parts for token in encode(part)] == encode(text)


@pytest.mark.parametrize("name", CUTTABLE)
@given(text=TEXTS, size=st.integers(min_value=1, max_value=20))
def test_blocks_have_the_words_and_ids_of_the_whole_text(name: str, text: str, size: int) -> None:
    check_blocks(tokenizer(name), text, size)


@pytest.mark.parametrize("name", CUTTABLE)
def test_any_two_fragments_are_cut_without_a_trace(name: str) -> None:
    """Cuts at every possible place: after each character of a word, each mark, each kind of space."""
    for first in FRAGMENTS:
        for text in (f"a{first}{second}b{first}" for second in FRAGMENTS):
            check_blocks(tokenizer(name), text, 1)


@pytest.mark.parametrize("name", CUTTABLE)
@given(
    start=st.lists(st.sampled_from([*FRAGMENTS, *WORDS]), min_size=1, max_size=40).map("".join),
    ends=st.lists(TEXTS, min_size=2, max_size=4),
    parse=st.booleans(),
)
def test_texts_with_a_common_beginning_keep_their_ids(
    name: str, start: str, ends: list[str], parse: bool
) -> None:
    each = TextTokenizer(tokenizer(name))
    encoder = each.cached_encoder(100_000, parse_special_tokens=parse)
    start *= 1500 // len(start)
    for end in ends:
        text = start + end
        assert [*encoder(text)] == (each.encode if parse else each.encode_plain)(text)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("thinker", "It's a fine day, isn't it? "), ("thinker", "今天天气很好，我们去公园散步。"),
        ("thinker", "one\ntwo\n"),
        ("talker", "Größe und Maß "), ("talker", "東京タワーは、高い。"), ("synthetic", f"{word(300)} {word(301)}. "),
    ],
)  # fmt: skip
def test_only_the_end_of_a_text_with_a_known_beginning_is_tokenized(name: str, sentence: str) -> None:
    asked: list[str] = []

    class Recorded(TextTokenizer):
        def encode_texts(self, texts: Sequence[str], *, parse_special_tokens: bool) -> list[list[int]]:
            asked.extend(texts)
            return super().encode_texts(texts, parse_special_tokens=parse_special_tokens)

    document = "".join(f"{number} {sentence}" for number in range(1000))
    for parse in (False, True):
        encoder = Recorded(tokenizer(name)).cached_encoder(100_000, parse_special_tokens=parse)
        asked.clear()
        encoder(f"{document} {WORDS[0]}")
        assert "".join(asked) == f"{document} {WORDS[0]}" and max(map(len, asked)) < 600
        asked.clear()
        encoder(f"{document} {WORDS[1]}")
        assert f"{document} {WORDS[1]}".endswith("".join(asked)) and 0 < len("".join(asked)) < 600


def configured(
    pre_tokenizer: pre_tokenizers.PreTokenizer | None, normalizer: normalizers.Normalizer | None = None
) -> Tokenizer:
    each = Tokenizer(models.BPE())
    if pre_tokenizer is not None:
        each.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        each.normalizer = normalizer
    each.train_from_iterator(corpus(), trainers.BpeTrainer(vocab_size=3000))
    return each


def split(pattern: str | Regex, behavior: str = "isolated", **options: bool) -> pre_tokenizers.PreTokenizer:
    levels = pre_tokenizers.ByteLevel(add_prefix_space=options.pop("prefix", False), use_regex=False)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(pattern, behavior, **options), levels])


RELEASED = Regex(
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
NOT_CUTTABLE = {
    "no words": lambda: configured(None),
    "bytes without words": lambda: configured(
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ),
    "GPT-2": lambda: configured(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "marked spaces": lambda: configured(pre_tokenizers.Metaspace(prepend_scheme="always")),
    "lookbehind": lambda: configured(split(Regex(r"(?<=the) |\s+|\S+"))),
    "spaces inside words": lambda: configured(split(Regex(r"[a-z ]+"))),
    "first word marked": lambda: configured(split(RELEASED, prefix=True)),
    "words left out": lambda: configured(split(RELEASED, invert=True)),
    "words joined": lambda: configured(split(RELEASED, "contiguous")),
    "full stop alone": lambda: configured(split(".", "isolated")),
    "full stop before": lambda: configured(split(".", "merged_with_next")),
    "compatibility": lambda: configured(split(RELEASED), normalizers.NFKC()),
    "stripped": lambda: configured(split(RELEASED), normalizers.Strip()),
    "two normalizers": lambda: configured(
        split(RELEASED), normalizers.Sequence([normalizers.NFC(), normalizers.Prepend("_")])
    ),
    "digits": lambda: configured(
        pre_tokenizers.Sequence([pre_tokenizers.Digits(), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ),
}


@pytest.mark.parametrize("name", NOT_CUTTABLE)
def test_a_tokenizer_that_is_not_known_tokenizes_whole_texts(name: str) -> None:
    each = NOT_CUTTABLE[name]()
    assert find_cut_pattern(each) is None
    encoder = TextTokenizer(each).cached_encoder(100_000, parse_special_tokens=False)
    source = random.Random(1)
    start = "".join(source.choices(FRAGMENTS, k=400))
    for _ in range(5):
        text = start + "".join(source.choices(FRAGMENTS, k=5))
        assert [*encoder(text)] == each.encode(text).ids
    assert [*blocks(start, None, 512)] == [start]


def test_the_known_tokenizers_are_those_of_the_checkpoints() -> None:
    assert find_cut_pattern(configured(split(RELEASED))) is not None
    assert find_cut_pattern(configured(split(RELEASED), normalizers.NFC())) is not None
    for file in FILES.values():
        assert find_cut_pattern(Tokenizer.from_file(str(file))) is not None


@pytest.mark.parametrize(
    "added",
    [
        AddedToken("<a b>", normalized=False), AddedToken("你好。", normalized=False),
        AddedToken("<a>", normalized=False, rstrip=True), AddedToken("<a>", normalized=False, lstrip=True),
        AddedToken("a", normalized=False, single_word=True), AddedToken("<a>", normalized=True),
    ],
    ids=["contains a space", "contains a mark", "takes spaces after", "takes spaces before", "word", "normalized"],
)  # fmt: skip
def test_added_tokens_that_may_span_a_cut_leave_texts_whole(added: AddedToken) -> None:
    each = configured(split(RELEASED))
    each.add_tokens([added])
    assert find_cut_pattern(each) is None
    parsing = TextTokenizer(each).cached_encoder(100_000, parse_special_tokens=True)
    text = "one two <a b> 你好。 a <a> " * 60
    for end in ("", "<a b>", "a"):
        assert [*parsing(text + end)] == each.encode(text + end).ids
        plain = TextTokenizer(each).cached_encoder(100_000, parse_special_tokens=False)
        assert [*plain(text + end)] == TextTokenizer(each).encode_plain(text + end)
