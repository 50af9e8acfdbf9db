"""Tokenizer for random weights: every id has a text of its own, and random ids are cut into spoken segments."""

from __future__ import annotations

import random

from tokenizers import Tokenizer, pre_tokenizers

from mingc.export.assets.byte_tokenizer import byte_tokenizer, word
from mingc.text.reference.live import LiveSegmenter

VOCABULARY = 157_184  # of the released thinker
SPECIAL = ("<role>", "</role>", "<|role_end|>")


def test_every_id_has_a_text_that_is_its_token() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(VOCABULARY, SPECIAL))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert len({word(number) for number in range(VOCABULARY)}) == VOCABULARY
    ids = random.Random(0).sample(range(259, VOCABULARY), 2000)
    text = "".join(f" {word(each)}" for each in ids)
    assert tokenizer.encode(text).ids == ids and tokenizer.decode(ids) == text


def test_splitting_texts_at_full_stops_changes_no_token() -> None:
    split, whole = (Tokenizer.from_str(byte_tokenizer(5000, SPECIAL)) for _ in range(2))
    whole.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    source = random.Random(2)
    for _ in range(200):
        pieces = [f" {word(source.randrange(259, 5000))}" for _ in range(10)]
        text = "".join(source.choices([*pieces, ".", "..", " ", ",", "<role>", "世界。", "ba", "\n"], k=40))
        assert split.encode(text).ids == whole.encode(text).ids


def test_a_random_answer_is_spoken_sentence_by_sentence() -> None:
    segmenter, source = LiveSegmenter(), random.Random(1)
    segments = []
    for _ in range(600):
        segments += segmenter.push(f" {word(source.randrange(259, VOCABULARY))}")
    lengths = [len(each.text.split()) for each in segments]
    assert len(lengths) > 15 and min(lengths[1:]) >= 8 and sum(lengths) / len(lengths) < 28
