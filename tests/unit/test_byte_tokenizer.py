"""Tokenizer for random weights: every id has a text of its own, and random ids are cut into spoken segments."""

from __future__ import annotations

import random

from tokenizers import Tokenizer

from mingc.export.assets.byte_tokenizer import byte_tokenizer, word
from mingc.runtime.text.live import LiveSegmenter

VOCABULARY = 157_184  # of the released thinker


def test_every_id_has_a_text_that_is_its_token() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(VOCABULARY))
    assert tokenizer.get_vocab_size() == VOCABULARY
    assert len({word(number) for number in range(VOCABULARY)}) == VOCABULARY
    ids = random.Random(0).sample(range(259, VOCABULARY), 2000)
    text = "".join(f" {word(each)}" for each in ids)
    assert tokenizer.encode(text).ids == ids and tokenizer.decode(ids) == text


def test_template_tokens_are_not_written_by_text() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(1000))
    for name in ("<role>", "</role>", "<|role_end|>"):
        assert tokenizer.token_to_id(name) not in tokenizer.encode(f"a {name}").ids
        assert len(tokenizer.encode(name).ids) == len(name)


def test_a_random_answer_is_spoken_sentence_by_sentence() -> None:
    segmenter, source = LiveSegmenter(clock=lambda: 0.0), random.Random(1)
    segments = []
    for _ in range(600):
        segments += segmenter.push(f" {word(source.randrange(259, VOCABULARY))}")
    lengths = [len(each.text.split()) for each in segments]
    assert len(lengths) > 15 and min(lengths) >= 8 and sum(lengths) / len(lengths) < 28
