"""Text of a chat answer that is sent to speech."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import cast

from mingc.runtime.preprocess.tokenizer import Detokenizer
from mingc.runtime.request import SamplingParams, TextDelta
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.service.output_processor import ChatOutputProcessor, SpeechStream, Timings


class Words:
    """A detokenizer whose tokens are the indices of these words."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def push(self, token: int) -> str:
        return self._words[token]

    def flush(self) -> str:
        return ""


class FakeSpeechStream:
    """A speech stream that records the texts it is given."""

    is_finished = False

    def __init__(self) -> None:
        self.texts: list[str] = []

    def enqueue(self, texts: Iterable[str]) -> None:
        self.texts += texts


def test_thoughts_are_in_the_text_but_not_in_the_speech() -> None:
    words = ["<th", "ink>", "They greet me.", " I shall greet them.", "</thi", "nk>", "\n\nGood ", "morning."]
    speech_stream = FakeSpeechStream()
    run = ChatOutputProcessor(
        cast(Detokenizer, Words(words)),
        SamplingParams(),
        prompt_tokens=1,
        speech_stream=cast(SpeechStream, speech_stream),
        is_reproducible=True,
        max_segment_length=50,
        sample_rate=44100,
        timings=Timings(),
    )
    events = []
    for index in range(len(words)):
        finish = "stop" if index == len(words) - 1 else None
        events += run.accept(TokenItem(token=index, finish=finish))
    assert "".join(event.text for event in events if isinstance(event, TextDelta)) == "".join(words)
    assert "".join(speech_stream.texts).strip(" .") == "Good morning"
