"""What `benchmarks/conversations.py` sends: new items, prompts of the right length, a segment for each sentence; and
which cases it runs.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from conversations import Measurement, Writer, make_parser
from tokenizers import Tokenizer

from mingc.bench.load import Clients
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


@pytest.mark.parametrize(
    "wanted", [["text"], ["speech", "long prompt"], ["realtime", "listeners", "speakers beside streams"]]
)
def test_only_the_cases_that_are_wanted_are_run(wanted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is left, so cases that would run are noted instead."""
    models = SimpleNamespace(json=lambda: {"data": [{"id": "tiny"}]})
    monkeypatch.setattr(httpx, "get", lambda *_: models)
    rows = list[dict[str, Any]]()
    given = make_parser().parse_args(["x", "--cases", *wanted, "--concurrency", "1,2", "--long-rounds", "1"])
    clients = Clients(1)
    try:
        Measurement("http://127.0.0.1:9", clients, given, rows.extend, end=0.0).run()
    finally:
        clients.close()
    assert {row["case"] for row in rows} == {*wanted}
    assert not any(row["is_run"] for row in rows)
