"""Calls that the tiny random model cannot but make, over HTTP: grammar, sampler, parser and responses together."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI
from server_thread import run_server

from mingc.runtime.service.builder import open_service

CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Zürich", "北京"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}},
    {"type": "function", "function": {"name": "time"}},
]
CALL = {"521": 100}  # `logit_bias` for the token that begins a call


@pytest.fixture(scope="module")
def openai(eager_artifact: Path) -> Iterator[OpenAI]:
    with (
        run_server(lambda: open_service(eager_artifact)) as url,
        OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client,
    ):
        yield client


def arguments(seed: int = 1, **fields: Any) -> Any:
    return {
        "model": "ming-omni", "messages": [{"role": "user", "content": "Hello"}], "tools": TOOLS, "temperature": 1.0,
        "seed": seed, "max_tokens": 200, "parallel_tool_calls": False, **fields,
    }  # fmt: skip


def check_call(choice: Any) -> None:
    (call,) = choice.message.tool_calls
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    given = json.loads(call.function.arguments)
    if call.function.name == "weather":
        assert set(given) == {"city", "days"}
        assert given["city"] in ("Zürich", "北京") and given["days"] in range(1, 10)
    else:
        assert (call.function.name, given) == ("time", {})


ALLOWED = {"mode": "required", "tools": [{"type": "function", "function": {"name": "weather"}}]}


@pytest.mark.parametrize(
    "fields",
    [
        {"tool_choice": "required"},
        {"tool_choice": {"type": "function", "function": {"name": "time"}}},
        {"tool_choice": {"type": "allowed_tools", "allowed_tools": ALLOWED}},
        {"logit_bias": CALL},
    ],
    ids=["required", "named", "allowed", "strict"],
)
def test_a_random_model_makes_the_call_that_it_has_to(openai: OpenAI, fields: dict[str, Any]) -> None:
    choices = [openai.chat.completions.create(**arguments(seed, **fields)).choices[0] for seed in range(3)]
    for choice in choices:
        check_call(choice)
    with openai.chat.completions.stream(**arguments(2, **fields)) as stream:
        streamed = stream.get_final_completion().choices[0]
    check_call(streamed)
    assert streamed.message.tool_calls and choices[2].message.tool_calls
    assert (
        streamed.message.tool_calls[0].function.arguments
        == choices[2].message.tool_calls[0].function.arguments
    )


def test_no_call_is_made_against_the_bias_when_none_is_chosen(openai: OpenAI) -> None:
    fields = {"tool_choice": "none", "logit_bias": CALL, "max_tokens": 20}
    choice = openai.chat.completions.create(**arguments(**fields)).choices[0]
    assert choice.message.tool_calls is None and choice.finish_reason in ("stop", "length")


def test_no_call_is_made_against_the_bias_when_only_the_history_has_one(openai: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    fields: dict[str, Any] = {"messages": messages, "logit_bias": CALL, "max_tokens": 20}
    given = arguments(**fields)
    for name in ("tools", "parallel_tool_calls"):
        del given[name]
    message = openai.chat.completions.create(**given).choices[0].message
    assert message.tool_calls is None and "<tool_call>" not in str(message.content)


def test_several_calls_and_log_probabilities_of_their_tokens(openai: OpenAI) -> None:
    fields = {"tool_choice": "required", "parallel_tool_calls": True, "logprobs": True, "max_tokens": 140}
    answer = openai.chat.completions.create(**arguments(**fields))
    choice = answer.choices[0]
    assert choice.message.tool_calls and choice.logprobs and choice.logprobs.content and answer.usage
    assert len(choice.logprobs.content) == answer.usage.completion_tokens
    assert [each.token for each in choice.logprobs.content[:2]] == ["<tool_call>", "\n"]
    chunks = list(openai.chat.completions.create(**arguments(**fields), stream=True))
    found = [chunk.choices[0].logprobs for chunk in chunks]
    assert [e.token for each in found if each for e in each.content or ()] == [
        each.token for each in choice.logprobs.content
    ]


def test_a_thought_may_come_before_a_call_that_must_come(openai: OpenAI) -> None:
    fields = {"tool_choice": "required", "reasoning_effort": "low", "max_tokens": 60}
    message = openai.chat.completions.create(**arguments(**fields)).choices[0].message
    assert (
        message.tool_calls or getattr(message, "reasoning_content", None) or "<think>" in str(message.content)
    )


def test_a_schema_that_cannot_be_enforced_is_refused_for_strict_functions(openai: OpenAI) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "array", "uniqueItems": True}}}
    loose = {"type": "function", "function": {"name": "f", "parameters": schema}}
    strict = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}
    openai.chat.completions.create(**arguments(tools=[loose], tool_choice="required", max_tokens=5))
    with pytest.raises(BadRequestError, match="uniqueItems") as caught:
        openai.chat.completions.create(**arguments(tools=[strict]))
    assert caught.value.param == "tools"
