"""What was heard of an answer, compared with a slow computation by the rules of the specification and a table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import cast

import numpy as np
import pytest
from preprocess_data import tokenizer

from mingc.prompts.conversation import TextPart, TokensPart
from mingc.prompts.tokenizer import Detokenizer, TextTokenizer
from mingc.prompts.tools import ToolUse, find_tool_tokens, tool_of
from mingc.runtime.request import AudioDelta, Event, SamplingParams, TextDelta, ToolCallDone
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.service.output_processor import ChatOutputProcessor, Timings
from mingc.runtime.service.tool_calls import CallParser
from mingc.server.realtime.heard import Answer, Heard
from mingc.text.spoken import SpokenText

RATE, FIRST, PATCH = 24000, 6000, 7680  # samples of the first patch of a segment, and of the others

TEXTS = [
    "Well, hello there my friend. It is 10:30 already, so we must go now!\nAre you ready? Then come along.",
    "你好，我是一个友好的助手。今天是2024年5月1日，天气很好，我们可以去公园。再见！",
    "See this, and then run the code:\n```\nx = 1\n```\n还有一句话，说的是别的事。 Naïve café 🎉 it is.",
    "One.",
]

Segments = list[tuple[int, list[int]]]  # where the text of each ends, and its patches


def segments_of(text: str) -> Segments:
    spoken = SpokenText(50, "natural")
    pieces = [*spoken.push(text), *spoken.finish()]
    assert all(piece.end is not None for piece in pieces)
    return [
        (piece.end or 0, [FIRST, *[PATCH] * (2 + len(piece.text) // 12)])
        for number, piece in enumerate(pieces)
    ]


def written(answer: Answer, segments: Segments, num_patches: int | None = None) -> None:
    """Add the first patches, by default all."""
    left = math.inf if num_patches is None else num_patches
    for text_end, sizes in segments:
        for index, size in enumerate(sizes):
            if (left := left - 1) < 0:
                return
            patch = AudioDelta(
                samples=np.zeros(0, np.float32),
                is_segment_end=index == len(sizes) - 1,
                segment_text=None if index else "said",
                text_end=None if index else text_end,
            )
            answer.add_sound(size, patch)


def answer_of(text: str) -> tuple[Answer, list[int]]:
    answer, detokenizer, ids = Answer(tokenizer()), Detokenizer(tokenizer()), tokenizer().encode_plain(text)
    for token in ids:
        answer.add_text(TextDelta(text=detokenizer.push(token), token=token))
    return answer, ids


def estimated(part: str, before: Fraction | None) -> Fraction:
    """Samples of a segment whose end is not known. `before`: samples of a character so far."""
    if before is not None:
        return len(part) * before
    wide = len(re.findall("[一-鿿]", part))
    return RATE * (Fraction(wide, 6) + Fraction(len(part) - wide, 15))


def expected_text(text: str, ids: list[int], segments: Segments, patches: int, samples: int) -> str:
    """The rules in the words of the specification, without any care for time."""
    beginnings = [tokenizer().decode(ids[:count]) for count in range(len(ids) + 1)]
    ends = sorted({len(each) for each in beginnings if text.startswith(each)})
    start, place = 0, 0
    for text_end, sizes in segments:
        known = sizes[: max(0, patches)]
        patches -= len(sizes)
        end = max(each for each in ends if each <= text_end)
        after = min([each for each in ends if each > text_end], default=end)
        if end < text_end and not text[text_end:after].strip():
            end = after
        if len(known) == len(sizes) and samples >= place + sum(sizes):
            start, place = end, place + sum(sizes)
            continue
        length = Fraction(sum(sizes))
        if len(known) < len(sizes):
            if not known:
                return text[:start]
            rate = Fraction(place, start) if start else None
            length = max(estimated(text[start:end], rate), Fraction(sum(known) + known[-1]))
        tokens = [each for each in ends if start < each <= end]
        count = math.floor(len(tokens) * Fraction(samples - place) / length)
        return text[: tokens[count - 1]] if count else text[:start]
    return text[:start]


def moments(segments: Segments, patches: int) -> Iterator[int]:
    """Milliseconds at the end of every patch, around it, and between."""
    total = 0
    for size in [size for _, sizes in segments for size in sizes][:patches]:
        for samples in (total, total + size // 3, total + size - 24):
            yield samples * 1000 // RATE
        total += size
    yield total * 1000 // RATE


def check(heard: Heard, text: str, ids: Sequence[int]) -> None:
    """The transcript begins the text, and its ids those that the model wrote; they say the same."""
    assert text.startswith(heard.transcript)
    assert all(isinstance(part, TokensPart) for part in heard.parts)
    found = [token for part in heard.parts if isinstance(part, TokensPart) for token in part.ids]
    assert found == list(ids[: len(found)])
    assert tokenizer().decode(found) == heard.transcript
    assert bool(heard.transcript) == bool(found)


@pytest.mark.parametrize("text", TEXTS)
def test_at_every_moment_of_every_stage_of_an_answer(text: str) -> None:
    segments = segments_of(text)
    total = sum(len(sizes) for _, sizes in segments)
    for patches in range(total + 1):
        answer, ids = answer_of(text)
        written(answer, segments, patches)
        before = ""
        for ms in sorted(moments(segments, patches)):
            heard = answer.heard(ms)
            samples = ms * RATE // 1000 if ms < answer.duration_ms else answer.num_samples
            assert heard.transcript == expected_text(text, ids, segments, patches, samples), (patches, ms)
            check(heard, text, ids)
            assert heard.transcript.startswith(before)
            before = heard.transcript
        assert answer.heard() == answer.heard(10**9) == answer.heard(answer.duration_ms)
    answer.finish()
    assert answer.heard().transcript == text and not answer.heard(0).transcript
    check(answer.heard(), text, ids)


@pytest.mark.parametrize(
    ("ms", "transcript"),
    [
        (0, ""), (249, ""), (250, "One"), (499, "One"), (500, "One two"), (749, "One two"), (750, "One two three"),
        (999, "One two three"), (1000, "One two three four."), (1250, "One two three four."),
        (1500, "One two three four. Five"), (2000, "One two three four. Five six."),
        (9999, "One two three four. Five six."),
    ],
)  # fmt: skip
def test_words_of_one_token_each(ms: int, transcript: str) -> None:
    """Four tokens in a second, then two in another one."""
    answer = Answer(cast(TextTokenizer, Words()))
    for token, word in enumerate(WORDS):
        answer.add_text(TextDelta(text=word, token=token))
    for end, num_patches in ((19, 4), (29, 4)):
        written(answer, [(end, [6000] * num_patches)])
    answer.finish()
    assert answer.heard(ms).transcript == transcript


WORDS = ["One", " two", " three", " four.", " Five", " six."]


class Words:
    """A tokenizer whose tokens are words."""

    def token_bytes(self, token: int) -> bytes:
        return WORDS[token].encode()


def test_a_cut_is_limited_by_what_was_written_and_a_second_one_only_cuts_further() -> None:
    text = TEXTS[0]
    answer, _ = answer_of(text)
    segments = segments_of(text)
    written(answer, segments)
    answer.add_sound(240)  # what a resampler held back
    answer.finish()
    total = sum(size for _, sizes in segments for size in sizes) + 240
    assert answer.num_samples == total and answer.duration_ms == total * 1000 // RATE
    assert answer.truncate(10**9) == answer.duration_ms and answer.heard().transcript == text
    assert answer.truncate(1000) == 1000
    heard = answer.heard()
    assert 0 < len(heard.transcript) < len(text)
    assert answer.truncate(2000) == 1000 and answer.heard() == heard == answer.heard(2000)
    assert answer.heard(500) != heard
    assert answer.truncate(0) == 0 and answer.heard() == Heard(transcript="", parts=())


def test_an_answer_without_sound() -> None:
    text = TEXTS[1]
    written_answer = Answer(tokenizer(), is_spoken=False)
    written_answer.add_text(TextDelta(text=text))
    assert written_answer.heard() == Heard(transcript=text, parts=(TextPart(text=text),)), "also cancelled"
    silent, _ = answer_of("```\nx\n```")
    silent.add_sound(0)
    assert not silent.heard().transcript, "its speech may come"
    silent.finish()
    assert silent.heard().transcript == "```\nx\n```" and silent.truncate(500) == 0
    assert not silent.heard().transcript


def events_of(ids: Sequence[int], *, thinking: bool = False) -> list[Event]:
    tokens, detokenizer = find_tool_tokens(tokenizer()), Detokenizer(tokenizer())
    assert tokens is not None
    use = ToolUse(tools=(tool_of({"type": "function", "function": {"name": "f"}}),))
    run = ChatOutputProcessor(
        detokenizer,
        SamplingParams(),
        prompt_tokens=1,
        speech_stream=None,
        spoken_text=None,
        sample_rate=RATE,
        timings=Timings(),
        calls=CallParser(tokens, use, detokenizer),
        thinking=thinking,
    )
    items = [TokenItem(token=token, finish=None) for token in ids] + [TokenItem(token=None, finish="stop")]
    return [event for item in items for event in run.accept(item)]


@pytest.mark.parametrize(
    ("before", "text", "after"),
    [
        ("", "One moment.", ""),
        ("", "One moment.", "\n"),
        ("", "One moment,\n\nplease.", " \n\n"),
        ("<think>\nThey ask.\n</think>\n\n", "One moment.", "\n"),
        ("", "Well 🎉", ""),
    ],
)
def test_calls_and_thoughts_are_not_in_what_was_heard(before: str, text: str, after: str) -> None:
    """White space around them is in no text, though the model wrote it."""
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    ids = [*tokenizer().encode_plain(before + text + after), *tokenizer().encode(call)]
    answer = Answer(tokenizer(), is_spoken=False)
    events = events_of(ids, thinking=bool(before))
    assert any(isinstance(event, ToolCallDone) for event in events)
    for event in events:
        if isinstance(event, TextDelta):
            answer.add_text(event)
    heard = answer.heard()
    assert heard.transcript == answer.text == text
    (tokens, *rest) = heard.parts
    assert isinstance(tokens, TokensPart) and len(rest) <= 1
    said = tokenizer().decode(tokens.ids)
    assert said + "".join(part.text for part in rest if isinstance(part, TextPart)) == text
    assert len(said) >= len(text) - 1, "only a mark may share a token with what follows"
    places = range(len(ids) - len(tokens.ids))
    assert any(tuple(ids[place : place + len(tokens.ids)]) == tokens.ids for place in places)


def test_text_without_a_token_of_its_own_is_written_as_text_and_special_tokens_are_not_written() -> None:
    answer = Answer(tokenizer(), is_spoken=False)
    (token,) = tokenizer().encode_plain("H")
    for text, each in (("H", token), ("", tokenizer().token_id("<role>")), ("i.", None)):
        answer.add_text(TextDelta(text=text, token=each))
    parts = (TokensPart(ids=(token,)), TextPart(text="i."))
    assert answer.heard() == Heard(transcript="Hi.", parts=parts)


def test_heard_texts_of_parts_of_a_clause_are_in_order() -> None:
    """Ends of segments that are estimated, such as those of a number, may be equal."""
    answer, ids = answer_of("7" * 60)
    segments: Segments = [(0, [FIRST]), (0, [FIRST, PATCH]), (60, [FIRST, PATCH])]
    written(answer, segments)
    found = [answer.heard(ms) for ms in range(0, answer.duration_ms, 40)]
    for heard in found:
        check(heard, "7" * 60, ids)
    assert all(len(one.transcript) <= len(two.transcript) for one, two in pairwise(found))
