"""LangChain: three turns with a picture, a clip and spoken answers; then the same history as a stream."""

from __future__ import annotations

from client_inputs import Inputs, run
from langchain_core.messages import AIMessageChunk, BaseMessage, HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI


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


if __name__ == "__main__":
    run(main)
