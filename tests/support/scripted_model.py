"""A service whose thinker writes what a test wants; prompt, output, speech and HTTP are the real ones.

`Scripted` alone decides what the model samples, so its answers obey no constraint of the request.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from fake_omni import TINY, make_service
from fake_thinker import thinker_parameters

from mingc.prompts.chat import ChatProcessor
from mingc.prompts.thinker_prompt import ThinkerPrompt
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.grammar.compiler import GrammarCompiler
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import Item, TokenItem
from mingc.runtime.service.omni import OmniService
from mingc.runtime.speech_starts import SpeechStarts

CONTEXT = 1 << 16

CALLS = (
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich"}}\n</tool_call>'
    '\n<tool_call>\n{"name": "get_time", "arguments": {"zone": "欧洲\\u002fZürich"}}\n</tool_call>'
)
ANSWER = "It is 18 °C at noon."


def two_tools(prompt: str) -> str:
    """Calls two tools, with a text before them, then answers; without tools it answers at once."""
    if "# Tools" not in prompt or prompt.endswith("</tool_response><|role_end|><role>ASSISTANT</role>"):
        return ANSWER
    return f"One moment.\n{CALLS}"


class Scripted:
    """Stands for the loop of the thinker: at once, it answers the text of a prompt with what `answer` returns.

    Special tokens in the answer are written as such. `sampling` has the parameters of all requests.
    """

    def __init__(self, tokenizer: TextTokenizer, answer: Callable[[str], str]) -> None:
        self._tokenizer = tokenizer
        self._answer = answer
        self.sampling: list[SamplingParams] = []
        self.is_healthy, self.has_prefix_cache, self.held = True, False, {}
        self.runner = SimpleNamespace(device=torch.device("cpu"))
        self.scheduler, self.speech_starts = self, SpeechStarts()

    def max_new_tokens(self, num_tokens: int, max_tokens: int) -> int:
        return max_tokens

    def page_keys(self, prompt: ThinkerPrompt) -> None:
        return None

    def start(self) -> None:
        pass

    def stop(self, timeout_s: float) -> None:
        pass

    def submit(
        self,
        prompt: ThinkerPrompt,
        sampling: SamplingParams,
        seed: int,
        emit: Callable[[Item], None],
        **others: Any,
    ) -> int:
        self.sampling.append(sampling)
        text = self._tokenizer.decode(prompt.input_ids.tolist(), skip_special_tokens=False)
        ids = self._tokenizer.encode(self._answer(text))
        for count, token in enumerate(ids[: sampling.max_tokens], 1):
            emit(TokenItem(token=token, finish="length" if count == sampling.max_tokens else None))
        if len(ids) < sampling.max_tokens:
            emit(TokenItem(token=None, finish="stop"))
        return 0

    def wake(self) -> None: ...

    def cancel(self, job: int) -> None:
        pass


def scripted_service(answer: Callable[[str], str] = two_tools) -> tuple[OmniService, Scripted]:
    """A service with speech, and what stands for its thinker."""
    tokenizer = TextTokenizer.from_file(TINY / "tokenizer.json")
    parameters = replace(thinker_parameters(tokenizer.token_id), max_positions=CONTEXT)
    thinker = Scripted(tokenizer, answer)
    service = make_service(
        loop=cast(Any, thinker),
        processor=ChatProcessor(tokenizer, parameters, vision=None, audio=None),
        grammars=GrammarCompiler(tokenizer, parameters.vocab_size, parameters.stop_token_ids),
    )
    service.info = replace(service.info, has_tools=True)
    return service, thinker
