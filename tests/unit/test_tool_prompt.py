"""Prompts with tools, calls, results and thoughts, compared with the checkpoint's chat template as Jinja renders it."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest
from preprocess_data import config, document, thinker_parameters, tokenizer
from tokenizers import Tokenizer

from mingc.errors import RequestError
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.conversation import Message, Part, Role, TextPart, ThoughtPart, ToolCall
from mingc.prompts.tokenizer import TextTokenizer
from mingc.prompts.tools import tool_of

CASES = document("preprocess")["tokenizer_jinja_template"]


def render(**values: Any) -> str:
    """Render the template as `transformers` does: its `tojson` keeps the order of keys and escapes nothing."""
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(config("tokenizer_config.json")["chat_template"]).render(**values)


@pytest.mark.parametrize("case", CASES)
def test_the_template_renders_the_recorded_prompts(case: str) -> None:
    recorded = CASES[case]
    assert render(**recorded) == recorded["prompt"]
    assert tokenizer().encode(recorded["prompt"]) == recorded["input_ids"]


def test_later_system_messages_stand_where_the_template_writes_them() -> None:
    roles: list[Role] = ["system", "user", "assistant", "system", "user", "user", "system"]
    messages = [{"role": role, "content": f"Text {index}."} for index, role in enumerate(roles)]
    processor = ChatProcessor(tokenizer(), thinker_parameters(), vision=None, audio=None)
    prompt, _ = processor.prepare(
        [Message(role=role, parts=parts(each)) for role, each in zip(roles, messages, strict=True)]
    )
    text = render(messages=messages, add_generation_prompt=True, enable_thinking=False)
    assert prompt.input_ids.tolist() == tokenizer().encode(text)


def parts(message: dict[str, Any]) -> tuple[Part, ...]:
    calls = (call["function"] for call in message.get("tool_calls", ()))
    return (
        *([ThoughtPart(text=message["reasoning_content"])] if "reasoning_content" in message else ()),
        *([TextPart(text=message["content"])] if message["content"] else ()),
        *(
            ToolCall(
                name=call["name"],
                arguments=call["arguments"]
                if isinstance(call["arguments"], str)
                else json.dumps(call["arguments"], ensure_ascii=False),
            )
            for call in calls
        ),
    )


# The tokenizer's template has no persona, so a conversation needs a system message for the two to agree.
@pytest.mark.parametrize(
    "case", [name for name, case in CASES.items() if "tools" in name and case["add_generation_prompt"]]
)
def test_prompts_equal_the_template(case: str) -> None:
    recorded = CASES[case]
    messages = [Message(role=each["role"], parts=parts(each)) for each in recorded["messages"]]
    processor = ChatProcessor(tokenizer(), thinker_parameters(), vision=None, audio=None)
    prompt = processor.prepare(
        messages,
        tools=[tool_of(tool) for tool in recorded["tools"]],
        thinking=recorded.get("enable_thinking", False),
    ).tokens
    assert tokenizer().decode(prompt.input_ids.tolist(), skip_special_tokens=False) == recorded["prompt"]
    assert prompt.input_ids.tolist() == recorded["input_ids"]


@pytest.mark.parametrize("tag", ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"])
def test_client_text_never_becomes_a_tag(tag: str) -> None:
    processor = ChatProcessor(tokenizer(), thinker_parameters(), vision=None, audio=None)

    def count(text: str) -> int:
        tool = tool_of({"type": "function", "function": {"name": text, "description": text}})
        messages = [
            Message(role="user", parts=(TextPart(text=text),)),
            Message(role="assistant", parts=(ThoughtPart(text=text), ToolCall(name=text, arguments=text))),
            Message(role="tool", parts=(TextPart(text=text),)),
        ]
        ids = processor.prepare(messages, tools=[tool]).tokens.input_ids.tolist()
        return ids.count(tokenizer().token_id(tag))

    assert count(f"a{tag}b") == count("ab") > 0


def test_a_tokenizer_without_the_tokens_of_calls_refuses_tools_by_name() -> None:
    lacking = dict(config("tokenizer.json"))
    lacking["added_tokens"] = [each for each in lacking["added_tokens"] if each["content"] != "</tool_call>"]
    processor = ChatProcessor(
        TextTokenizer(Tokenizer.from_str(json.dumps(lacking))), thinker_parameters(), vision=None, audio=None
    )
    hello = Message(role="user", parts=(TextPart(text="Hello"),))
    processor.prepare([hello])
    called = Message(role="assistant", parts=(ToolCall(name="f", arguments="{}"),))
    for messages, tools, param in (
        ([hello], [tool_of({"type": "function", "function": {"name": "f"}})], "tools"),
        ([hello, called], [], "messages"),
    ):
        with pytest.raises(RequestError, match="no tokens for calls of tools") as caught:
            processor.prepare(messages, tools=tools)
        assert caught.value.param == param
