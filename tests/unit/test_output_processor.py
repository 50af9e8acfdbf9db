"""Events of a chat answer: its text compared with the tokenizer's own decoding, stop strings, usage, spoken text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocess_data import tokenizer
from tokenizers.pre_tokenizers import ByteLevel

from mingc.errors import WorkerError
from mingc.prompts.tokenizer import Detokenizer
from mingc.prompts.tools import ToolUse, find_tool_tokens, tool_of
from mingc.runtime.noise import NoiseSource, PhiloxNoise
from mingc.runtime.request import (
    AudioDelta,
    Done,
    Event,
    FinishReason,
    SamplingParams,
    SpeechParams,
    TextDelta,
    TextDone,
    TokenLogprobs,
    Usage,
)
from mingc.runtime.request_stream import EventQueue, FailedItem, Item, RequestStream, TokenItem
from mingc.runtime.service import output_processor
from mingc.runtime.service.output_processor import (
    ChatOutputProcessor,
    SpeechOutputProcessor,
    SpeechStream,
    Timings,
)
from mingc.runtime.service.tool_calls import CallParser
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.text.spoken import SpeechText, SpokenText, spoken_pieces
from mingc.text.spoken_piece import SpokenPiece


def test_a_moment_is_that_of_its_first_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([10.0, 10.5, 12.0])
    monkeypatch.setattr(output_processor.time, "perf_counter", lambda: next(now))
    timings = Timings()
    timings.mark("first_token")
    timings.mark("first_token")
    timings.mark_at("first_audio", None)
    assert timings.to_dict() == {"first_token": 500.0}


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
    num_samples = 0

    def __init__(self) -> None:
        self.texts: list[str] = []

    def enqueue(self, pieces: Iterable[SpokenPiece]) -> None:
        self.texts += [piece.text for piece in pieces]

    @property
    def num_patches(self) -> int:
        return len(self.texts)


def make_processor(
    detokenizer: object,
    sampling: SamplingParams | None = None,
    *,
    speech: FakeSpeechStream | None = None,
    prompt_tokens: int = 1,
    rules: SpeechText = "natural",
    **more: Any,
) -> ChatOutputProcessor:
    return ChatOutputProcessor(
        cast(Detokenizer, detokenizer),
        sampling or SamplingParams(),
        prompt_tokens=prompt_tokens,
        speech_stream=cast(SpeechStream, speech) if speech else None,
        spoken_text=SpokenText(50, rules) if speech else None,
        sample_rate=44100,
        timings=Timings(),
        **more,
    )


@pytest.mark.parametrize("thinking", [False, True])
def test_thoughts_are_not_in_the_speech_and_with_thinking_not_in_the_text(thinking: bool) -> None:
    words = ["<th", "ink>", "They greet me.", " I shall greet them.", "</thi", "nk>", "\n\nGood ", "morning."]
    speech_stream = FakeSpeechStream()
    run = make_processor(Words(words), speech=speech_stream, thinking=thinking)
    events = []
    for index in range(len(words)):
        finish = "stop" if index == len(words) - 1 else None
        events += run.accept(TokenItem(token=index, finish=finish))
    kinds = {"text": "", "thought": ""}
    for event in events:
        if isinstance(event, TextDelta):
            kinds[event.kind] += event.text
    thought, text = "They greet me. I shall greet them.", "Good morning."
    assert kinds == (
        {"text": text, "thought": thought} if thinking else {"text": "".join(words), "thought": ""}
    )
    assert "".join(speech_stream.texts).strip(" .") == "Good morning"


def test_what_is_said_before_a_call_is_spoken_while_the_call_is_written() -> None:
    tokens = find_tool_tokens(tokenizer())
    assert tokens is not None
    speech_stream, detokenizer = FakeSpeechStream(), Detokenizer(tokenizer())
    calls = CallParser(tokens, ToolUse(tools=(tool_of(TOOL),)), detokenizer)
    run = make_processor(detokenizer, speech=speech_stream, calls=calls)

    def write(*ids: int) -> str:
        for token in ids:
            run.accept(TokenItem(token=token, finish=None))
        return " ".join(text.strip(" .") for text in speech_stream.texts)

    assert write(*encode("One moment")) == ""
    assert write(tokens.call_start, *encode('{"name": "f", ')) == "One moment"
    assert write(*encode('"arguments": {"text": "Say it. Now. At once."}}'), tokens.call_end) == "One moment"
    run.accept(TokenItem(token=encode("\nWait")[-1], finish="stop"))
    assert len(speech_stream.texts) == 2


TOOL = {"type": "function", "function": {"name": "f"}}


def answer(
    ids: Sequence[int],
    *,
    finish: FinishReason = "length",
    stop: Sequence[str] = (),
    has_stop_token: bool = False,
    speech: FakeSpeechStream | None = None,
) -> tuple[str, Done, list[Event]]:
    """The text, the last event and all events of an answer of these tokens; some more tokens arrive after a stop."""
    sampling = SamplingParams(stop=tuple(stop))
    run = make_processor(Detokenizer(tokenizer()), sampling, speech=speech, prompt_tokens=5)
    is_last = [False] * len(ids)
    if ids and not has_stop_token:
        is_last[-1] = True
    items = [
        TokenItem(token=token, finish=finish if last else None)
        for token, last in zip(ids, is_last, strict=True)
    ]
    if has_stop_token:
        items.append(TokenItem(token=None, finish="stop"))
    events: list[Event] = []
    for item in items:
        events += run.accept(item)
    if speech is not None:
        assert not run.is_done, "the speech has not ended"
        speech.is_finished = True
        events += run.accept(None)
    assert run.is_done and isinstance(events[-1], Done)
    assert sum(isinstance(event, TextDone) for event in events) == 1
    return "".join(event.text for event in events if isinstance(event, TextDelta)), events[-1], events


def text_processor() -> ChatOutputProcessor:
    """Of a greedy chat without speech."""
    return make_processor(Detokenizer(tokenizer()), prompt_tokens=5)


def encode(text: str) -> list[int]:
    return tokenizer().encode(text)


def test_text_held_back_for_a_stop_string_is_shown_at_the_end() -> None:
    for has_stop_token in (False, True):
        text, done, _ = answer(
            encode("Wait: EN"), stop=["END", "N!"], finish="stop", has_stop_token=has_stop_token
        )
        assert (text, done.finish_reason) == ("Wait: EN", "stop")


def test_text_held_back_for_a_stop_string_is_spoken_at_the_end() -> None:
    speech = FakeSpeechStream()
    assert answer(encode("We walk to the END"), stop=["END OF"], speech=speech)[0] == "We walk to the END"
    assert "".join(speech.texts).split() == ["We", "walk", "to", "the", "END"]


@pytest.mark.parametrize(
    ("text", "is_silent"), [("Hello there.", False), ("*** 🎉", True), ("```\nx\n```", True)]
)
def test_an_answer_says_that_it_has_nothing_to_speak(text: str, is_silent: bool) -> None:
    _, done, _ = answer(encode(text), speech=FakeSpeechStream())
    assert done.has_nothing_to_speak is is_silent
    assert not answer(encode(text))[1].has_nothing_to_speak, "no speech was requested"


def test_nothing_from_the_stop_string_on_is_shown_spoken_or_counted() -> None:
    ids = encode("One two. STOP three four.")
    speech = FakeSpeechStream()
    text, done, events = answer(ids, stop=["STOP"], finish="length", speech=speech)
    assert (text, done.finish_reason) == ("One two. ", "stop")
    used = next(count for count in range(len(ids)) if "STOP" in tokenizer().decode(ids[:count]))
    assert used < len(ids), "tokens arrive after it"
    assert done.usage.completion_tokens == used
    assert "".join(speech.texts).strip(" .").split() == ["One", "two"]
    assert [event.finish_reason for event in events if isinstance(event, TextDone)] == ["stop"]


def test_a_stop_string_completed_by_the_last_token_ends_the_answer_as_a_stop() -> None:
    text, done, _ = answer(encode("One END"), stop=["END"], finish="length")
    assert (text, done.finish_reason) == ("One ", "stop")


def test_a_stop_token_is_not_counted_and_every_other_token_is() -> None:
    ids = encode("Hello, how are you today?")
    for finish, has_stop_token in (("length", False), ("stop", True)):
        text, done, events = answer(ids, finish=finish, has_stop_token=has_stop_token)  # type: ignore[arg-type]
        assert (text, done.finish_reason) == ("Hello, how are you today?", finish)
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (5, len(ids))
        assert sum(isinstance(event, TextDelta) for event in events) == len(ids), "one delta per token"


def test_an_answer_of_a_stop_token_alone_is_empty() -> None:
    text, done, events = answer([], has_stop_token=True)
    assert (text, done.finish_reason, done.usage.completion_tokens) == ("", "stop", 0)
    assert [type(event) for event in events] == [TextDone, Done]


@pytest.mark.parametrize("has_stop_token", [False, True])
@pytest.mark.parametrize("text", ["好", "ok 😀", "né", "世界"])
def test_an_answer_cut_inside_a_character_ends_as_python_decodes_it(text: str, has_stop_token: bool) -> None:
    ids = encode(text)[:-1]
    raw = token_bytes(ids)
    assert raw.decode(errors="ignore") != raw.decode(errors="replace"), "a character is cut"
    for stop in ((), ("END",)):
        shown, done, _ = answer(ids, stop=stop, has_stop_token=has_stop_token)
        assert shown == raw.decode(errors="replace")
        assert done.usage.completion_tokens == len(ids)


def token_bytes(ids: Iterable[int]) -> bytes:
    """Bytes of byte-level tokens, by GPT-2's table: printable bytes stand for themselves, the others follow U+00FF."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}
    assert sorted(table) == sorted(ByteLevel.alphabet())
    tokens = [tokenizer()._tokenizer.id_to_token(each) for each in ids]
    return bytes(table[character] for token in tokens for character in token)


BYTE_TOKENS = [
    token
    for token in range(tokenizer().vocab_size)
    if set(tokenizer()._tokenizer.id_to_token(token) or "<>") <= set(ByteLevel.alphabet())
    and token not in tokenizer()._tokenizer.get_added_tokens_decoder()
]
ANSWERS = st.lists(st.sampled_from(BYTE_TOKENS), min_size=1, max_size=40) | st.text(
    min_size=1, max_size=30
).map(encode)


@settings(max_examples=40)
@given(ANSWERS, st.booleans())
def test_streamed_text_is_what_python_decodes_from_the_bytes(ids: list[int], has_stop_token: bool) -> None:
    text, done, _ = answer(ids, has_stop_token=has_stop_token)
    assert text == token_bytes(ids).decode(errors="replace")
    assert done.usage.completion_tokens == len(ids)


@settings(max_examples=60)
@given(
    ANSWERS,
    st.lists(st.sampled_from(["e", " t", "a ", "he", "你好", "好吗"]), min_size=1, max_size=2),
    st.booleans(),
)
def test_a_stopped_answer_is_the_decoded_text_up_to_its_stop_string(
    ids: list[int], stops: list[str], has_stop_token: bool
) -> None:
    """OpenAI: "The returned text will not contain the stop sequence"."""
    whole = token_bytes(ids).decode(errors="replace")
    text, done, _ = answer(ids, stop=stops, has_stop_token=has_stop_token)
    if any(stop in whole for stop in stops):
        assert done.finish_reason == "stop" and not any(stop in text for stop in stops)
        assert any(whole.startswith(text + stop) for stop in stops)
        used = ids[: done.usage.completion_tokens]
        assert any(stop in token_bytes(used).decode(errors="replace") for stop in stops)
        assert not any(stop in token_bytes(used[:-1]).decode(errors="ignore") for stop in stops)
    else:
        assert (text, done.finish_reason) == (whole, "stop" if has_stop_token else "length")


def test_the_error_of_a_failed_request_is_raised() -> None:
    run = text_processor()
    with pytest.raises(WorkerError, match="rank 1"):
        run.accept(FailedItem(error=WorkerError("rank 1 ended")))


def answer_of_words(words: Sequence[str], sampling: SamplingParams) -> tuple[str, bool]:
    """The text of an answer of these tokens, and whether a stop string ended it."""
    run = make_processor(Words(words), sampling)
    events = []
    for index in range(len(words)):
        if run.is_text_done:
            break
        finish = "length" if index == len(words) - 1 else None
        events += run.accept(TokenItem(token=index, finish=finish))
    ends = [event.finish_reason for event in events if isinstance(event, TextDone)]
    return "".join(event.text for event in events if isinstance(event, TextDelta)), ends == ["stop"]


def test_text_of_the_stopping_token_is_shown_up_to_the_stop_string() -> None:
    words = ["One", " two ST", "OP three", " four"]
    assert answer_of_words(words, SamplingParams(stop=("STOP",))) == ("One two ", True)
    assert answer_of_words(["One STOP two STOP three"], SamplingParams(stop=("STOP",))) == ("One ", True)


def test_stop_strings_are_not_searched_in_the_first_min_tokens() -> None:
    """As in vLLM."""
    words = ["a", " stop", " b", " st", "op", " c", " stop", " d"]
    assert answer_of_words(words, SamplingParams(stop=(" stop",))) == ("a", True)
    assert answer_of_words(words, SamplingParams(stop=(" stop",), min_tokens=1)) == ("a", True)
    assert answer_of_words(words, SamplingParams(stop=(" stop",), min_tokens=2)) == ("a stop b", True)
    assert answer_of_words(words, SamplingParams(stop=(" stop",), min_tokens=5)) == ("a stop b stop c", True)
    assert answer_of_words(words, SamplingParams(stop=(" stop",), min_tokens=8)) == ("".join(words), False)


def test_numbers_behind_a_cut_are_read_in_the_language_of_the_whole_text() -> None:
    text = (
        "今天天气很好我们一起去公园散步看到很多漂亮的花和树还有小鸟在唱歌大家都很高兴然后"
        "我们坐下来休息，about 25 cats and 17 dogs came home."
    )
    speech = FakeSpeechStream()
    answer(encode(text), speech=speech)
    assert len(speech.texts) == 2, "the first clause is too long for one segment"
    assert speech.texts == list(spoken_pieces(text, 50, "natural"))
    assert "twenty-five cats" in speech.texts[1]


def test_the_first_clause_is_spoken_while_the_answer_goes_on() -> None:
    words, speech = ["Well, ", "my dear old friend, ", "it is"], FakeSpeechStream()
    run = make_processor(Words(words), speech=speech)
    for token in range(len(words)):
        run.accept(TokenItem(token=token, finish=None))
    assert speech.texts == ["Well, my dear old friend,"]
    run.accept(TokenItem(token=None, finish="stop"))
    assert speech.texts == ["Well, my dear old friend,", "it is"]


class FakeTalker:
    """A talker loop that records what a speech stream asks of it."""

    def __init__(self) -> None:
        self.is_behind: Callable[[], bool] = lambda: False
        self.num_wakes = 0
        self.cancelled: list[int] = []
        self.added: list[tuple[int, SimpleNamespace]] = []
        self.playing: list[int] = []

    def open(
        self,
        emit: Callable[[Item], None],
        is_behind: Callable[[], bool],
        *,
        is_live: bool,
        lead: int | None,
        priority: int,
        recorder: None,
    ) -> int:
        self.emit, self.is_behind, self.is_live = emit, is_behind, is_live
        return 7

    def begin_playback(self, stream: int) -> None:
        self.playing.append(stream)

    def add(self, stream: int, segment: SimpleNamespace, *, wakes: bool = True) -> None:
        self.added.append((stream, segment))

    def wake(self) -> None:
        self.num_wakes += 1

    def cancel(self, stream: int) -> None:
        self.cancelled.append(stream)


class FakePlanner:
    """Segments of three prompt tokens."""

    def segment(self, text: str, index: int, params: SpeechParams, noise: NoiseSource) -> SimpleNamespace:
        return SimpleNamespace(text=text, index=index, noise=noise, input_ids=[1, 2, 3])


def speech_stream(
    texts: Sequence[str], *, max_pending_patches: int = 3
) -> tuple[SpeechStream, RequestStream, FakeTalker]:
    """A speech stream with these segments. Items that its talker emits are in the request's stream at once."""
    event_queue = SimpleNamespace(
        put=lambda stream, item: stream.accept(item), unread_bytes=0, max_unread_bytes=1000
    )
    items = RequestStream(cast(EventQueue, event_queue))
    talker = FakeTalker()
    stream = SpeechStream(
        cast(SpeechPlanner, FakePlanner()),
        cast(TalkerLoop, talker),
        SpeechParams(),
        items,
        noise=PhiloxNoise(4),
        max_pending_patches=max_pending_patches,
    )
    stream.enqueue(map(SpokenPiece, texts))
    return stream, items, talker


def patch(*, is_segment_end: bool = False, is_capped: bool = False) -> AudioDelta:
    return AudioDelta(samples=np.zeros(10, np.float32), is_segment_end=is_segment_end, is_capped=is_capped)


def test_speech_pauses_at_the_limit_of_unread_patches_and_resumes_when_one_is_read() -> None:
    stream, items, talker = speech_stream(["One."], max_pending_patches=3)
    are_behind = []
    for _ in range(3):
        assert talker.playing == []
        talker.emit(patch())
        are_behind.append(talker.is_behind())
    assert are_behind == [False, False, True]

    async def read() -> None:
        for num_wakes in (1, 1, 1):  # woken once, by the read that makes room
            item = await asyncio.wait_for(items.get(), 10)
            assert isinstance(item, AudioDelta)
            stream.consume(item, Timings())
            assert talker.num_wakes == num_wakes and not talker.is_behind()
            assert talker.playing == [7], "once: its first audio leaves the server"

    asyncio.run(read())
    assert (stream.num_patches, stream.num_samples) == (3, 30)


def test_the_first_patch_of_a_segment_has_its_text() -> None:
    stream, _, _ = speech_stream(["One.", "Two."])
    ends = [False, True, True, True]
    stream.enqueue([SpokenPiece("Three.", 15)])
    patches = [stream.consume(patch(is_segment_end=is_end), Timings()) for is_end in ends]
    assert [each.segment_text for each in patches] == ["One.", None, "Two.", "Three."]
    assert [each.text_end for each in patches] == [None, None, None, 15]
    assert [each.is_segment_end for each in patches] == ends


def test_the_first_segment_is_timed_once() -> None:
    stream, _, _ = speech_stream(["One."])
    first = stream.first_segment_at
    stream.enqueue([SpokenPiece("Two.")])
    assert stream.first_segment_at == first is not None


def test_a_closed_speech_stream_is_cancelled_in_the_talker() -> None:
    stream, _, talker = speech_stream(["One.", "Two."])
    assert [(name, segment.text, segment.index) for name, segment in talker.added] == [
        (7, "One.", 0),
        (7, "Two.", 1),
    ]
    assert {segment.noise for _, segment in talker.added} == {PhiloxNoise(4)}
    assert stream.prompt_tokens == 6
    stream.close()
    assert talker.cancelled == [7]


@pytest.mark.parametrize(
    ("capped", "reason"), [((), "stop"), ((0,), "length"), ((1,), "length"), ((0, 1), "length")]
)
def test_speech_that_was_cut_anywhere_says_so(capped: Sequence[int], reason: str) -> None:
    stream, _, _ = speech_stream(["One.", "Two."])
    run = SpeechOutputProcessor(stream, sample_rate=5, timings=Timings())
    events: list[Event] = []
    for segment in range(2):
        assert not run.is_done
        events += run.accept(patch())
        events += run.accept(patch(is_segment_end=True, is_capped=segment in capped))
    assert run.is_done and [type(event) for event in events] == [AudioDelta] * 4 + [Done]
    assert isinstance(events[-1], Done) and events[-1].finish_reason == reason
    assert events[-1].usage == Usage(prompt_tokens=6, completion_tokens=0, audio_patches=4, audio_seconds=8.0)


def test_a_token_in_a_speech_request_is_an_error() -> None:
    stream, _, _ = speech_stream(["One."])
    run = SpeechOutputProcessor(stream, sample_rate=5, timings=Timings())
    with pytest.raises(WorkerError, match="TokenItem"):
        run.accept(TokenItem(token=1, finish=None))


LOGPROBS = TokenLogprobs(logprob=-1.0)


def answer_of(ids: Sequence[int], stop: tuple[str, ...] = ()) -> tuple[str, list[int], list[TextDelta]]:
    """Text of an answer, the tokens with log probabilities, and all deltas."""
    run = make_processor(Detokenizer(tokenizer()), SamplingParams(stop=stop, num_logprobs=0))
    deltas: list[TextDelta] = []
    for index, token in enumerate(ids):
        finish = "length" if index == len(ids) - 1 else None
        events = run.accept(TokenItem(token=token, finish=finish, logprobs=LOGPROBS))
        deltas += [event for event in events if isinstance(event, TextDelta)]
        if run.is_text_done:
            break
    return "".join(each.text for each in deltas), [t for each in deltas for t, _ in each.logprobs], deltas


def joined(ids: Iterable[int]) -> str:
    return b"".join(tokenizer().token_bytes(each) or b"" for each in ids).decode(errors="replace")


ANY_TOKENS = st.lists(st.integers(0, tokenizer().vocab_size + 3), min_size=1, max_size=40)
TEXTS = st.text(st.sampled_from("ab <né你😀\n"), min_size=1, max_size=20)


@given(ids=ANY_TOKENS | TEXTS.map(tokenizer().encode_plain))
def test_bytes_of_the_tokens_with_logprobs_are_the_text(ids: list[int]) -> None:
    text, found, deltas = answer_of(ids)
    assert found == ids
    assert joined(found) == text == tokenizer().decode(ids)
    shown, tokens = "", []
    for delta in deltas:  # a token comes with the delta that has its text
        shown, tokens = shown + delta.text, [*tokens, *(token for token, _ in delta.logprobs)]
        assert joined(tokens).rstrip("\ufffd") == shown.rstrip("\ufffd")


@given(text=TEXTS, stop=TEXTS)
def test_tokens_after_the_start_of_a_stop_string_have_no_logprobs(text: str, stop: str) -> None:
    ids = tokenizer().encode_plain(text)
    shown, found, _ = answer_of(ids, (stop,))
    assert shown == text.partition(stop)[0]
    assert found == ids[: len(found)] and joined(found).startswith(shown) and bool(found) == bool(shown)
    pieces = [joined(ids[: index + 1]) for index in range(len(found))]
    assert not any(piece.startswith(shown) and "\ufffd" not in piece for piece in pieces[:-1])


def test_answers_without_logprobs_have_none() -> None:
    run = make_processor(Detokenizer(tokenizer()))
    (delta, *_) = run.accept(TokenItem(token=70, finish="length", logprobs=LOGPROBS))
    assert isinstance(delta, TextDelta) and delta.logprobs == ()
