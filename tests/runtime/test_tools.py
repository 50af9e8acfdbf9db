"""Tools over HTTP with the official `openai` client: a scripted model calls them, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI, pydantic_function_tool
from openai.lib.streaming.chat import FunctionToolCallArgumentsDeltaEvent, FunctionToolCallArgumentsDoneEvent
from pydantic import BaseModel
from scripted_model import ANSWER, scripted_service, two_tools
from server_thread import run_server

MODEL: Any = "fake"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "Weather of a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {
        "type": "function",
        "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}},
    },
]
HELLO: Any = [{"role": "user", "content": "What is the weather in Zürich, and what time is it?"}]
WEATHER, TIME = '{"city": "Zürich"}', '{"zone": "欧洲\\u002fZürich"}'


def serve(answer: Callable[[str], str] = two_tools) -> Any:
    return run_server(lambda: scripted_service(answer)[0])


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


@pytest.fixture(scope="module")
def openai() -> Iterator[OpenAI]:
    with serve() as url, client(url) as made:
        yield made


def calls_of(message: Any) -> list[tuple[str, str, str]]:
    assert all(re.fullmatch("call_[0-9a-f]{24}", call.id) for call in message.tool_calls)
    assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)
    return [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls]


BOTH = [("function", "get_weather", WEATHER), ("function", "get_time", TIME)]


def test_a_conversation_with_two_tools(openai: OpenAI) -> None:
    messages = [{"role": "system", "content": "Use tools."}, *HELLO]
    first = openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    assert (first.finish_reason, first.message.content) == ("tool_calls", "One moment.")
    assert calls_of(first.message) == BOTH
    messages.append(first.message)
    for call in first.message.tool_calls or ():
        messages.append({"role": "tool", "tool_call_id": call.id, "content": "18 °C"})
    second = openai.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS).choices[0]
    assert (second.finish_reason, second.message.content) == ("stop", ANSWER)
    assert second.message.tool_calls is None


def test_the_next_prompt_has_calls_and_results_in_the_form_of_the_template() -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return two_tools(prompt)

    with serve(answer) as url, client(url) as openai:
        first = openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS).choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": call.function.name}
            for call in first.tool_calls or ()
        ]
        openai.chat.completions.create(model=MODEL, messages=[*HELLO, first, *results], tools=TOOLS)
    before, after = prompts
    assert after == before + (
        f'One moment.\n<tool_call>\n{{"name": "get_weather", "arguments": {WEATHER}}}\n</tool_call>\n'
        f'<tool_call>\n{{"name": "get_time", "arguments": {TIME}}}\n</tool_call><|role_end|>'
        "<role>OBSERVATION</role>\n<tool_response>\nget_weather\n</tool_response>"
        "\n<tool_response>\nget_time\n</tool_response><|role_end|><role>ASSISTANT</role>"
    )
    assert all(json.dumps(tool) in before for tool in TOOLS)


def test_streamed_calls_have_id_type_and_name_once(openai: OpenAI) -> None:
    chunks = list(openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "One moment."
    parts = [part for delta in deltas for part in delta.tool_calls or ()]
    firsts = [part for part in parts if part.id is not None]
    assert [(part.index, part.type, part.function.name, part.function.arguments) for part in firsts] == [
        (0, "function", "get_weather", ""),
        (1, "function", "get_time", ""),
    ]
    others = [part for part in parts if part.id is None]
    assert all(part.type is None and part.function.name is None for part in others) and len(others) > 10
    for index, arguments in enumerate((WEATHER, TIME)):
        assert "".join(part.function.arguments for part in others if part.index == index) == arguments
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "tool_calls"
    ]


class Weather(BaseModel):
    city: str


def test_the_stream_and_parse_helpers_read_calls() -> None:
    call = '<tool_call>\n{"name": "Weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    arguments: Any = {"model": MODEL, "messages": HELLO, "tools": [pydantic_function_tool(Weather)]}
    with serve(lambda prompt: call) as url, client(url) as openai:
        message = openai.chat.completions.parse(**arguments).choices[0].message
        with openai.chat.completions.stream(**arguments) as stream:
            events = list(stream)
            streamed = stream.get_final_completion().choices[0].message
    for each in (message, streamed):
        assert each.content is None and each.tool_calls
        assert each.tool_calls[0].function.parsed_arguments == Weather(city="Zürich")
    deltas = [event for event in events if isinstance(event, FunctionToolCallArgumentsDeltaEvent)]
    (done,) = (event for event in events if isinstance(event, FunctionToolCallArgumentsDoneEvent))
    assert "".join(each.arguments_delta for each in deltas) == done.arguments == WEATHER


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_is_not_spoken_and_the_text_before_it_is(openai: OpenAI, stream: bool) -> None:
    arguments: Any = {"model": MODEL, "messages": HELLO, "modalities": ["text", "audio"],
                      "audio": {"voice": "amy", "format": "wav"}}  # fmt: skip

    def patches(**more: Any) -> int:
        if not stream:
            answer = openai.chat.completions.create(**arguments, **more)
            audio = answer.choices[0].message.audio
            assert audio is not None and audio.transcript == answer.choices[0].message.content
            return int(answer.usage.audio_patches)  # type: ignore[union-attr]
        options = {"include_usage": True}
        chunks = list(
            openai.chat.completions.create(**arguments, **more, stream=True, stream_options=options)
        )
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks[:-1]]
        text = "".join(delta["content"] or "" for delta in deltas)
        audio = [delta["audio"] for delta in deltas if delta.get("audio")]
        (transcript,) = [part["transcript"] for part in audio if part.get("transcript") is not None]
        assert transcript == text
        return int(chunks[-1].usage.audio_patches)

    with serve(lambda prompt: "One moment.") as url, client(url) as plain:
        spoken = plain.chat.completions.create(**arguments)
    assert patches(tools=TOOLS) == spoken.usage.audio_patches > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_of_calls_alone_has_no_audio_and_no_error(stream: bool) -> None:
    call = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
    body = {"messages": HELLO, "tools": TOOLS, "modalities": ["text", "audio"], "stream": stream}
    with serve(lambda prompt: call) as url:
        text = httpx.post(f"{url}/v1/chat/completions", json=body).text
    assert "tool_calls" in text and "audio-" not in text and "speech_error" not in text


BROKEN = '<tool_call>\n{"name": "get_time", "arguments": {"zone": </tool_call>'
UNKNOWN = '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize("broken", [BROKEN, UNKNOWN])
def test_a_broken_call_is_content(broken: str) -> None:
    with serve(lambda prompt: f"Hm. {broken}") as url, client(url) as openai:
        whole = openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS).choices[0]
        chunks = list(openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, stream=True))
        aloud: Any = {"modalities": ["text", "audio"], "audio": {"voice": "amy", "format": "wav"}}
        spoken = openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, **aloud)
    assert (whole.finish_reason, whole.message.content, whole.message.tool_calls) == (
        "stop",
        f"Hm.{broken}",
        None,
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.message.content
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert spoken.choices[0].message.audio.transcript == "Hm."  # type: ignore[union-attr]


def test_thoughts_are_reasoning_content() -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return f"<think>\nTwo tools, 好.\n</think>\n\n{two_tools(prompt)}"

    with serve(answer) as url, client(url) as openai:
        arguments: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "reasoning_effort": "high"}
        whole = openai.chat.completions.create(**arguments).choices[0].message
        chunks = list(openai.chat.completions.create(**arguments, stream=True))
        off = (
            openai.chat.completions.create(**{**arguments, "reasoning_effort": "minimal"}).choices[0].message
        )
        assert whole.reasoning_content == "Two tools, 好." and whole.content == "One moment."  # type: ignore[attr-defined]
        deltas = [chunk.choices[0].delta.model_dump() for chunk in chunks]
        assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == whole.reasoning_content  # type: ignore[attr-defined]
        assert "".join(delta["content"] or "" for delta in deltas) == whole.content
        assert off.content is not None and off.content.startswith("<think>")
        results: Any = [
            {"role": "tool", "tool_call_id": call.id, "content": "1"} for call in whole.tool_calls or ()
        ]
        openai.chat.completions.create(**{**arguments, "messages": [*HELLO, whole, *results]})
    assert prompts[0].count("detailed thinking on") == 1 and prompts[2].count("detailed thinking off") == 1
    assert (
        "<role>ASSISTANT</role>\n<think>\nTwo tools, 好.\n</think>\n\nOne moment.\n<tool_call>" in prompts[3]
    )


def test_history_without_tools_makes_a_call_no_text_to_speak() -> None:
    call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    history: Any = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "1"},
    ]
    with serve(lambda prompt: UNKNOWN) as url, client(url) as openai:
        answer = openai.chat.completions.create(model=MODEL, messages=history)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (UNKNOWN, "stop")


def sampling_of(**fields: Any) -> Any:
    """What may be sampled of the answer to a request with these fields."""
    service, thinker = scripted_service()
    with run_server(lambda: service) as url, client(url) as openai:
        openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, **fields)
    return thinker.sampling[0]


def test_tool_choice_none_keeps_the_block_and_bans_the_token_of_a_call() -> None:
    prompts: list[str] = []

    def answer(prompt: str) -> str:
        prompts.append(prompt)
        return ANSWER

    with serve(answer) as url, client(url) as openai:
        for choice in ("none", "auto"):
            openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, tool_choice=choice)  # type: ignore[call-overload]
    assert prompts[0] == prompts[1]
    assert sampling_of(tool_choice="none").banned_tokens == (521,)
    assert sampling_of(tool_choice="auto").banned_tokens == ()


def test_one_call_without_parallel_calls(openai: OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": HELLO, "tools": TOOLS, "parallel_tool_calls": False}
    choice = openai.chat.completions.create(**arguments).choices[0]
    assert (choice.finish_reason, calls_of(choice.message)) == ("tool_calls", BOTH[:1])


def test_every_answer_has_calls_of_its_own(openai: OpenAI) -> None:
    choices = openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS, n=2).choices
    assert [calls_of(choice.message) for choice in choices] == [BOTH, BOTH]
    ids = {call.id for choice in choices for call in choice.message.tool_calls or ()}
    assert len(ids) == 4


def test_tokens_of_a_prompt_with_tools_can_be_counted(openai: OpenAI) -> None:
    answer = openai.chat.completions.create(model=MODEL, messages=HELLO, tools=TOOLS)
    url = str(openai.base_url).removesuffix("v1/") + "tokenize"
    counts = [
        httpx.post(url, json={"messages": HELLO, "tools": tools}).json()["count"] for tools in (TOOLS, [])
    ]
    assert answer.usage is not None and counts[0] == answer.usage.prompt_tokens > counts[1] + 200
