"""LangChain: three turns with a picture, a clip and spoken answers; the same history as a stream; a loop of tools."""

from __future__ import annotations

from typing import Literal

from client_inputs import ANSWER, Inputs, run
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


def main(given: Inputs) -> None:
    spoken = {"modalities": ["text", "audio"], "audio": {"voice": given.voice, "format": "wav"}}
    model = ChatOpenAI(
        base_url=given.url,
        api_key=given.key,
        model=given.model,
        temperature=0,
        max_tokens=12,
        model_kwargs=spoken,
    )
    history: list[BaseMessage] = [SystemMessage("Answer briefly.", name="operator")]
    turns: list[list[str | dict[str, object]]] = [
        [
            {"type": "text", "text": "What is in this picture?"},
            {"type": "image", "base64": given.image, "mime_type": "image/png"},
        ],
        [
            {"type": "text", "text": "And what does the voice say?"},
            {"type": "audio", "base64": given.clip, "mime_type": "audio/x-wav"},
        ],
        [{"type": "text", "text": "Thank you."}],
    ]
    for content in turns:
        history.append(HumanMessage(content, name="guest"))
        answer = model.invoke(history)
        given.check_wav(answer.additional_kwargs["audio"]["data"])
        history.append(answer)  # as received: with its audio, identifiers and metadata
    whole: BaseMessage | None = None
    for chunk in ChatOpenAI(
        base_url=given.url, api_key=given.key, model=given.model, max_tokens=12, stream_usage=True
    ).stream([*history, HumanMessage("Once more.")]):
        assert isinstance(chunk, AIMessageChunk)
        whole = chunk if whole is None else whole + chunk
    assert (
        isinstance(whole, AIMessageChunk)
        and whole.usage_metadata
        and whole.usage_metadata["output_tokens"] > 0
    )
    for is_streamed in (False, True):
        call_tools(given, is_streamed=is_streamed)
    for method in ("json_schema", "function_calling"):
        plain = ChatOpenAI(base_url=given.url, api_key=given.key, model=given.model, max_tokens=60)
        weather = plain.with_structured_output(Weather, method=method, strict=True).invoke(
            "It rains in Zürich."
        )
        assert isinstance(weather, Weather), weather


class Weather(BaseModel):
    """Weather of a city."""

    city: Literal["Genève", "Zürich"]
    is_wet: bool


@tool
def get_weather(city: str) -> str:
    """Weather of a city."""
    return f"18 °C in {city}"


@tool
def get_time(zone: str) -> str:
    """Time in a zone."""
    return f"noon in {zone}"


def call_tools(given: Inputs, *, is_streamed: bool) -> None:
    tools = {each.name: each for each in (get_weather, get_time)}
    model = ChatOpenAI(base_url=given.tools_url, api_key="none", model="fake").bind_tools([*tools.values()])
    history: list[BaseMessage] = [HumanMessage("What is the weather in Zürich, and what time is it?")]
    for _ in range(2):
        if is_streamed:
            first, *others = model.stream(history)
            answer = sum(others, first)
            assert isinstance(answer, AIMessageChunk) and not answer.invalid_tool_calls
        else:
            answer = model.invoke(history)
        history.append(answer)
        history += [tools[call["name"]].invoke(call) for call in answer.tool_calls]
    results = [message.content for message in history[2:4]]
    assert results == ["18 °C in Zürich", "noon in 欧洲/Zürich"], results
    assert [message.text for message in history[1::3]] == ["One moment.", ANSWER]


if __name__ == "__main__":
    run(main)
