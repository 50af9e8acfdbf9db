"""LlamaIndex: three turns with a picture and a clip, whole and streamed."""

from __future__ import annotations

import base64

from client_inputs import Inputs, run
from llama_index.core.base.llms.types import AudioBlock, ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike


def main(given: Inputs) -> None:
    model = OpenAILike(
        api_base=given.url,
        api_key=given.key,
        model=given.model,
        is_chat_model=True,
        max_tokens=12,
        context_window=4096,
    )
    history = [ChatMessage(role="system", content="Answer briefly.")]
    picture = ImageBlock(image=base64.b64decode(given.image))
    clip = AudioBlock(audio=base64.b64decode(given.clip), format="wav")
    for blocks in (
        [TextBlock(text="What is in this picture?"), picture],
        [TextBlock(text="And what does the voice say?"), clip],
        [TextBlock(text="Thank you.")],
    ):
        history.append(ChatMessage(role="user", blocks=blocks))
        answer = model.chat(history)
        assert answer.raw.usage.completion_tokens > 0
        history.append(answer.message)
    history.append(ChatMessage(role="user", content="Once more."))
    chunks = list(model.stream_chat(history))
    assert chunks[-1].message.content


if __name__ == "__main__":
    run(main)
