"""Calls of tools in the tokens of an answer: any split of a text gives the same events; a broken call is none."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from preprocess_data import tokenizer

from mingc.prompts.tokenizer import Detokenizer
from mingc.prompts.tools import ToolUse, find_tool_tokens, tool_of
from mingc.runtime.request import (
    Done,
    Event,
    SamplingParams,
    TextDelta,
    TextDone,
    ToolCallDelta,
    ToolCallDone,
    ToolCallFailed,
)
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.service.output_processor import ChatOutputProcessor, Timings
from mingc.runtime.service.tool_calls import CallParser
from mingc.text.tool_calls import CallScanner

TOKENS = find_tool_tokens(tokenizer())
assert TOKENS is not None
OPEN, CLOSE = TOKENS.call_start, TOKENS.call_end


def tool(name: str, parameters: Any = None, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters or {}, **more}}


USE = ToolUse(tools=(tool_of(tool("f")), tool_of(tool("天气"))))


def text_ids(text: str, cuts: Sequence[int] = ()) -> list[int]:
    """Tokens of a text that is tokenized in pieces, or byte by byte."""
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    return [
        token
        for begin, end in itertools.pairwise(places)
        for token in tokenizer().encode_plain(text[begin:end])
    ]


def answer(
    ids: Iterable[int],
    use: ToolUse = USE,
    *,
    stop: Sequence[str] = (),
    finish: Any = "stop",
    thinking: bool = False,
) -> tuple[list[Event], str]:
    """Events of an answer that ends with a stop token, or at its limit; and its finish reason."""
    detokenizer = Detokenizer(tokenizer())
    run = ChatOutputProcessor(
        detokenizer,
        SamplingParams(stop=tuple(stop)),
        prompt_tokens=1,
        speech_stream=None,
        spoken_text=None,
        sample_rate=0,
        timings=Timings(),
        calls=CallParser(TOKENS, use, detokenizer),
        thinking=thinking,
    )
    ids = list(ids)
    events: list[Event] = []
    for index, token in enumerate(ids):
        if not run.is_text_done:
            is_last = finish == "length" and index == len(ids) - 1
            events += run.accept(TokenItem(token=token, finish="length" if is_last else None))
    if not run.is_text_done:
        events += run.accept(TokenItem(token=None, finish="stop"))
    done = events[-1]
    assert run.is_done and isinstance(done, Done)
    assert [each.finish_reason for each in events if isinstance(each, TextDone)] == [done.finish_reason]
    tokens = [each.token for each in events if isinstance(each, TextDelta) and each.token is not None]
    assert tokens == ids[: done.usage.completion_tokens], "one text delta has each token"
    return events, done.finish_reason


def summary(events: Iterable[Event]) -> dict[str, Any]:
    """What a client joins from the deltas, checked against the events of complete calls."""
    found: dict[str, Any] = {"text": "", "thought": "", "call": "", "calls": {}, "failed": []}
    done = {}
    for event in events:
        match event:
            case TextDelta():
                found[event.kind] += event.text
            case ToolCallDelta():
                assert (event.name is None) == (event.index in found["calls"]), (
                    "the name comes first, and once"
                )
                call = found["calls"].setdefault(event.index, [event.name, ""])
                call[1] += event.arguments
            case ToolCallDone():
                done[event.index] = [event.name, event.arguments]
            case ToolCallFailed():
                found["failed"].append((event.index, event.text))
    assert found.pop("call") == ""
    broken = {index for index, _ in found["failed"]}
    assert done == {index: call for index, call in found["calls"].items() if index not in broken}
    return found


ARGUMENTS = [
    "{}",
    '{"city": "Zürich"}',
    '{"a":{"b":[1, 2.50, {"c":"}]"}]}, "e": "\\"\\\\"}',
    '{"html": "</tool_call><tool_call>\\n{\\"name\\""}',
    '{"escaped": "\\u5317\\u4eac \\ud83d\\ude00", "plain": "北京 😀"}',
    '{ "spaced" :\n "x" , "n": -1e5, "t": [true, null] }',
]
CUTS = st.lists(st.integers(0, 120), max_size=30)


@settings(max_examples=150)
@given(st.lists(st.sampled_from(ARGUMENTS), min_size=1, max_size=3), CUTS, st.sampled_from(["", "Ja, 好.\n"]))
def test_every_split_of_a_text_gives_the_same_calls(arguments: list[str], cuts: list[int], text: str) -> None:
    ids = text_ids(text, cuts)
    for each in arguments:
        ids += [OPEN, *text_ids(f'\n{{"name": "天气", "arguments": {each}}}\n', cuts), CLOSE, *text_ids("\n")]
    events, finish = answer(ids)
    assert summary(events) == {
        "text": text.strip(), "thought": "", "calls": {i: ["天气", each] for i, each in enumerate(arguments)},
        "failed": [],
    }  # fmt: skip
    assert finish == "tool_calls"
    assert all(json.loads(each) for each in arguments if each != "{}")


FORMS = [
    '{"name":"f","arguments":{"a":1}}',
    '{"arguments": {"a":1}, "name": "f"}',
    '  {"id": [{"name": "g"}], "name": "f", "arguments": {"a":1}, "type": "function"}  ',
]


@pytest.mark.parametrize("form", FORMS)
def test_order_and_other_keys_of_a_call_do_not_matter(form: str) -> None:
    events, finish = answer([OPEN, *text_ids(form), CLOSE])
    assert (summary(events)["calls"], finish) == ({0: ["f", '{"a":1}']}, "tool_calls")


def test_arguments_are_sent_while_they_are_written() -> None:
    ids = [OPEN, *text_ids('{"name": "f", "arguments": {"city": "Bern, the capital of Switzerland"}}'), CLOSE]
    events, _ = answer(ids)
    deltas = [event for event in events if isinstance(event, ToolCallDelta)]
    assert len(deltas) > 5 and deltas[0].name == "f"
    assert max(len(each.arguments) for each in deltas) < 12


BROKEN = [
    "",
    "f(1)",
    '{"name": "f"}',
    '{"name": "f", "arguments": {"a": 1}',
    '{"name": "f", "arguments": {"a": 1,}}',
    '{"name": "f", "arguments": {"a": NaN}}',
    '{"name": "f", "arguments": "{}"}',
    '{"name": "f", "arguments": [1]}',
    '{"name": "f", "arguments": null}',
    '{"name": "f", "arguments": {}} and more',
    '[{"name": "f", "arguments": {}}]',
    'Sure: {"name": "f", "arguments": {}}',
    '{"name": "f", "name": "天气", "arguments": {}}',
    '{"name": "f", "arguments": {"a": 1}, "arguments": {"a": 2}}',
    '{"name": "unknown", "arguments": {}}',
    '{"name": 1, "arguments": {}}',
    '{"name": "f", "arguments": {"a": "no end}}',
]


@pytest.mark.parametrize("call", BROKEN)
@pytest.mark.parametrize("size", [1, 7])
def test_a_broken_call_is_none_and_its_text_is_kept(call: str, size: int) -> None:
    ids = [OPEN, *text_ids(call, range(0, len(call), size)), CLOSE]
    events, finish = answer([*text_ids("One."), *ids])
    found = summary(events)
    assert (found["text"], finish) == ("One.", "stop")
    is_open_string = "no end" in call
    ((index, text),) = found["failed"]
    assert text == f"<tool_call>{call}</tool_call>"
    assert (index is None) == (not found["calls"])
    assert is_open_string or events[-3] == ToolCallFailed(index=index, text=text)


def test_a_call_that_is_nested_too_deeply_for_a_parser_is_none() -> None:
    scanner = CallScanner({"f"})
    depth = 100_000
    scanner.push('{"name": "f", "arguments": ' + '{"a":' * depth + "1" + "}" * depth + "}")
    assert scanner.name == "f" and scanner.finish() is None


def test_a_broken_call_beside_a_good_one_is_no_reason_to_run_tools() -> None:
    good = text_ids('{"name": "f", "arguments": {}}')
    events, finish = answer([OPEN, *text_ids("{"), OPEN, *good, CLOSE])
    found = summary(events)
    assert (found["failed"], found["calls"], finish) == ([(None, "<tool_call>{")], {0: ["f", "{}"]}, "stop")


@pytest.mark.parametrize(
    ("tail", "finish", "is_call"),
    [("}", "stop", True), ("}", "length", True), ("", "stop", False), ("", "length", False)],
)
def test_a_call_that_ends_with_the_answer_needs_its_json_to_be_complete(
    tail: str, finish: str, is_call: bool
) -> None:
    ids = [OPEN, *text_ids('{"name": "f", "arguments": {}' + tail)]
    events, found = answer(ids, finish=finish)
    assert found == ("tool_calls" if is_call and finish == "stop" else finish)
    assert (summary(events)["failed"] == []) == is_call


def test_tags_that_the_model_writes_in_a_string_are_text() -> None:
    """A tokenizer that recognises special tokens in the text it is trained on puts them into strings."""
    head, tail = text_ids('{"name": "f", "arguments": {"a": "x'), text_ids(' y"}}')
    for token, tag in zip(
        TOKENS, ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"), strict=True
    ):
        events, finish = answer([OPEN, *head, token, *tail, CLOSE])
        assert (summary(events)["calls"], finish) == ({0: ["f", f'{{"a": "x{tag} y"}}']}, "tool_calls")


def test_one_call_ends_an_answer_without_parallel_calls() -> None:
    """Also a broken one."""
    call = [OPEN, *text_ids('{"name": "f", "arguments": {}}'), CLOSE]
    use = ToolUse(tools=USE.tools, is_parallel=False)
    events, finish = answer([*call, *text_ids("\n"), *call], use)
    assert (list(summary(events)["calls"]), finish) == ([0], "tool_calls")
    found = summary(answer([OPEN, *text_ids("{"), CLOSE, *text_ids("And"), *call], use)[0])
    assert (found["failed"], found["calls"], found["text"]) == ([(None, "<tool_call>{</tool_call>")], {}, "")


def test_only_allowed_functions_are_called() -> None:
    call = [OPEN, *text_ids('{"name": "f", "arguments": {}}'), CLOSE]
    for use in (
        ToolUse(tools=USE.tools, allowed=("天气",)),
        ToolUse(),
        ToolUse(tools=USE.tools, choice="none"),
    ):
        events, finish = answer(call, use)
        assert (len(summary(events)["failed"]), finish) == (1, "stop")


def test_stop_strings_end_text_and_no_call() -> None:
    call = [OPEN, *text_ids('\n{"name": "f", "arguments": {"a": "END"}}\n'), CLOSE]
    events, finish = answer([*text_ids("We E"), *call, *text_ids("Now END here")], stop=["END", "\n"])
    found = summary(events)
    assert (found["text"], found["calls"], finish) == ("We ENow", {0: ["f", '{"a": "END"}']}, "tool_calls")
    events, finish = answer([*text_ids("We END"), *call], stop=["END"])
    assert (summary(events)["text"], summary(events)["calls"], finish) == ("We ", {}, "stop")


@given(CUTS)
def test_thought_text_and_call_are_told_apart(cuts: list[int]) -> None:
    call = [OPEN, *text_ids('{"name": "f", "arguments": {}}', cuts), CLOSE]
    ids = [*text_ids("<think>\nHm, 好?\n</think>\n\nOne moment.\n", cuts), *call]
    assert summary(answer(ids, thinking=True)[0]) == {
        "thought": "Hm, 好?", "text": "One moment.", "calls": {0: ["f", "{}"]}, "failed": [],
    }  # fmt: skip
    unfinished = summary(answer([*text_ids("<think>\nHm", cuts), *call], thinking=True)[0])
    assert (unfinished["thought"], unfinished["text"], len(unfinished["calls"])) == ("Hm", "", 1)
