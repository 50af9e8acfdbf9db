"""What `benchmarks/conversations.py` sends: new items, prompts of the right length, a segment for each sentence."""

from __future__ import annotations

import json

from conversations import Writer
from tokenizers import Tokenizer

from mingc.export.assets.byte_tokenizer import byte_tokenizer
from mingc.text.spoken import spoken_pieces

_VOCABULARY, _SEGMENT = 157_184, 50  # of the released model


def test_no_item_is_written_twice() -> None:
    writer = Writer(words=5, clip_s=1.0, listener_s=60.0)
    items = [
        *(each for path in ("text", "image", "spoken", "speech-stream", "realtime") for each in writer.write(path, 8)),
        *writer.prompts(5, 8),
        *writer.listeners(8),
    ]  # fmt: skip
    assert len({(json.dumps(each.messages), each.text, each.clip) for each in items}) == len(items)
    assert len({each.id for each in items}) == len(items)


def test_a_prompt_has_as_many_tokens_as_words() -> None:
    tokenizer = Tokenizer.from_str(byte_tokenizer(_VOCABULARY, ["<role>"]))
    (item,) = Writer(words=40, clip_s=1.0, listener_s=60.0).prompts(300, 1)
    (part,) = item.messages[0]["content"]
    assert len(tokenizer.encode(part["text"]).ids) == 300


def test_each_sentence_of_a_listener_is_a_segment() -> None:
    """A segment has at most so many patches, so its speech is as long as asked."""
    writer = Writer(words=40, clip_s=1.0, listener_s=60.0)
    for item in writer.listeners(50):
        assert len([*spoken_pieces(item.text, _SEGMENT, "natural")]) == writer.sentences == 4
