"""LiteLLM: three turns with a picture, a clip and spoken answers, whole and streamed; a completion; tools."""

from __future__ import annotations

import json
from typing import Any

import litellm
from client_inputs import ANSWER, Inputs, run


def main(given: Inputs) -> None:
    common: dict[str, Any] = {
        "model": f"openai/{given.model}",
        "api_base": given.url,
        "api_key": given.key,
        "max_tokens": 12,
    }
    messages: list[Any] = [{"role": "system", "content": [{"type": "text", "text": "Answer briefly."}]}]
    turns: list[list[dict[str, Any]]] = [
        [
            {"type": "text", "text": "What is in this picture?", "cache_control": {"type": "ephemeral"}},
            {
                "type": "image_url",
                "image_url": {"url": f"data:image/png;base64,{given.image}", "detail": "auto"},
            },
        ],
        [
            {"type": "text", "text": "And what does the voice say?"},
            {"type": "input_audio", "input_audio": {"data": given.clip, "format": "wav"}},
        ],
        [{"type": "text", "text": "Thank you."}],
    ]
    for content in turns:
        messages.append({"role": "user", "content": content})
        answer = litellm.completion(
            messages=messages,
            modalities=["text", "audio"],
            audio={"voice": given.voice, "format": "wav"},
            **common,
        )
        message = answer.choices[0].message
        given.check_wav(message.audio.data)
        messages.append(message)  # LiteLLM writes its own fields into it
    messages.append({"role": "user", "content": "Once more."})
    chunks = list(litellm.completion(messages=messages, stream=True, **common))
    rebuilt = litellm.stream_chunk_builder(chunks, messages=messages)
    assert rebuilt is not None and rebuilt.choices[0].finish_reason in ("length", "stop")
    messages += [rebuilt.choices[0].message.model_dump(), {"role": "user", "content": "And again."}]
    assert litellm.completion(messages=messages, **common).usage.completion_tokens > 0
    answers = litellm.completion(messages=messages, n=2, logprobs=True, top_logprobs=2, **common).choices
    assert [each.index for each in answers] == [0, 1]
    assert all(len(each.logprobs.content[0].top_logprobs) == 2 for each in answers)
    continued = {**common, "model": f"text-completion-openai/{given.model}", "prompt": "Once upon a time"}
    whole = litellm.text_completion(**continued, logprobs=1)
    assert whole.choices[0].logprobs.tokens and whole.usage.completion_tokens > 0
    chunks = list(litellm.text_completion(**continued, stream=True))
    assert "".join(chunk.choices[0].text or "" for chunk in chunks) == whole.choices[0].text
    for is_streamed in (False, True):
        call_tools(given, is_streamed=is_streamed)


def call_tools(given: Inputs, *, is_streamed: bool) -> None:
    results = {"get_weather": lambda city: f"18 °C in {city}", "get_time": lambda zone: f"noon in {zone}"}
    tools = [
        {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in results
    ]
    messages: list[Any] = [{"role": "user", "content": "What is the weather in Zürich, and what time is it?"}]
    for finish in ("tool_calls", "stop"):
        answer = litellm.completion(
            model="openai/fake", api_base=given.tools_url, api_key="none", messages=messages, tools=tools,
            stream=is_streamed,
        )  # fmt: skip
        if is_streamed:
            answer = litellm.stream_chunk_builder([*answer], messages=messages)
        choice = answer.choices[0]
        assert choice.finish_reason == finish, choice
        messages.append(choice.message)
        for call in choice.message.tool_calls or ():
            result = results[call.function.name](**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})
    assert [message["content"] for message in messages[2:4]] == ["18 °C in Zürich", "noon in 欧洲/Zürich"]
    assert messages[-1].content == ANSWER


if __name__ == "__main__":
    run(main)
