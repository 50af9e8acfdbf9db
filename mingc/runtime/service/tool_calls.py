"""Calls of tools: found in the tokens of an answer, and forced on it by what may be sampled."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

from mingc.prompts.tokenizer import Detokenizer
from mingc.prompts.tools import TOOL_TAGS, Tool, ToolTokens, ToolUse
from mingc.runtime.grammar.json_format import JSON_FORMAT
from mingc.runtime.request import (
    Constraint,
    Event,
    SamplingParams,
    ToolCallDelta,
    ToolCallDone,
    ToolCallFailed,
)
from mingc.text.tool_calls import CallScanner


class CallParser:
    """Finds the calls of one answer by its tokens, so that no text can be mistaken for one.

    A call ends at its token, unless that stands in a string: a model that was trained on text with these tags may
    write their tokens there.

    Args:
        detokenizer: the answer's; this parser uses it while a call is open.
    """

    def __init__(self, tokens: ToolTokens, use: ToolUse, detokenizer: Detokenizer) -> None:
        self._tokens = tokens
        self._tags = dict(zip(tokens, TOOL_TAGS, strict=True))
        self._names = {tool.name for tool in use.callable_tools}
        self._is_parallel = use.is_parallel
        self._detokenizer = detokenizer
        self._scanner: CallScanner | None = None
        self._num_begun = self._num_closed = 0
        self._num_done = self._num_failed = 0

    @property
    def is_open(self) -> bool:
        """Whether the next token belongs to a call."""
        return self._scanner is not None

    @property
    def ends_answer(self) -> bool:
        """Whether nothing may follow the last call."""
        return not self._is_parallel and self._num_closed > 0

    @property
    def is_successful(self) -> bool:
        """Whether the answer has calls, and none is broken."""
        return self._num_done > 0 and not self._num_failed

    def takes(self, token: int) -> bool:
        """Whether a token belongs to a call: then `push` it."""
        return self.is_open or token == self._tokens.call_start

    def push(self, token: int) -> list[Event]:
        """The events that a token of a call causes."""
        if self._scanner is None:
            self._scanner = CallScanner(self._names)
            return []
        if token not in self._tags:
            return self._scan(self._detokenizer.push(token))
        events = self._scan(self._detokenizer.flush())
        if self._scanner.is_in_string or token not in (self._tokens.call_start, self._tokens.call_end):
            return events + self._scan(self._tags[token])
        events += self._close(self._tags[token] if token == self._tokens.call_end else "")
        if token == self._tokens.call_start:
            self._scanner = CallScanner(self._names)
        return events

    def finish(self) -> list[Event]:
        """The events of a call that is open at the end of the answer."""
        return [] if self._scanner is None else self._scan(self._detokenizer.flush()) + self._close("")

    def _scan(self, piece: str) -> list[Event]:
        assert self._scanner is not None, "a call is open"
        is_new = self._scanner.name is None
        arguments = self._scanner.push(piece)
        if not arguments:
            return []
        self._num_begun += is_new
        index = self._num_begun - 1
        part = ToolCallDelta(index=index, arguments=arguments)
        return [ToolCallDelta(index=index, name=self._scanner.name), part] if is_new else [part]

    def _close(self, end_tag: str) -> list[Event]:
        assert self._scanner is not None, "a call is open"
        scanner, self._scanner = self._scanner, None
        self._num_closed += 1
        if (call := scanner.finish()) is not None:
            self._num_done += 1
            return [ToolCallDone(index=self._num_begun - 1, name=call.name, arguments=call.arguments)]
        self._num_failed += 1
        text = f"{self._tags[self._tokens.call_start]}{scanner.text}{end_tag}"
        return [ToolCallFailed(index=None if scanner.name is None else self._num_begun - 1, text=text)]


def tool_sampling(
    sampling: SamplingParams, use: ToolUse, tokens: ToolTokens, *, thinking: bool
) -> SamplingParams:
    """What may be sampled of an answer with these tools.

    A call that must come is constrained from the first token, after a thought if the model may think; other calls are
    constrained from their own first token, if a function is strict or not all may be called. `response_format` applies
    to answers without calls; any other constraint of the request to the whole answer, so that it calls nothing.
    """
    tools = use.callable_tools
    if not tools:
        return replace(sampling, banned_tokens=(*sampling.banned_tokens, tokens.call_start))
    answer = sampling.constraint
    is_free = len(tools) == len(use.tools) and not any(tool.is_strict for tool in tools)
    if use.choice == "required":
        constraint = _grammar("calls", tools, use, "tool_choice", thinking)
    elif answer is not None and answer.param == "response_format":
        schema = json.loads(answer.text)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        text = json.dumps({**schema, "x-guidance": JSON_FORMAT}, ensure_ascii=False)
        constraint = _grammar(f"(answer | calls)\nanswer: %json {text}", tools, use, answer.param, thinking)
    elif answer is not None or is_free:
        return sampling
    else:
        text = f'start: "\\n" call "\\n" {TOOL_TAGS[1]}\n{_call_rules(tools)}'
        constraint = Constraint(kind="grammar", text=text, param="tools", after=tokens.call_start)
    return replace(sampling, constraint=constraint)


def _grammar(start: str, tools: Sequence[Tool], use: ToolUse, param: str, thinking: bool) -> Constraint:
    more = ' ("\\n" tagged)*' if use.is_parallel else ""
    text = (
        f"start: {start}\n"
        f'calls: tagged{more}\ntagged: {TOOL_TAGS[0]} "\\n" call "\\n" {TOOL_TAGS[1]}\n{_call_rules(tools)}'
    )
    return Constraint(kind="grammar", text=text, param=param, thinking=thinking)


def _call_rules(tools: Sequence[Tool]) -> str:
    """Rules of the JSON of one call. Each schema is a root of its own, to which its references are relative."""
    rules = [f"call: {' | '.join(f'call_{index}' for index in range(len(tools)))}\n"]
    for index, tool in enumerate(tools):
        head = json.dumps(f'{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": ')
        # Unless it is strict, what the grammar cannot express of a schema is left to the model.
        schema = {
            "type": "object",
            **tool.parameters,
            "x-guidance": {**JSON_FORMAT, "lenient": not tool.is_strict},
        }
        rules.append(f'call_{index}: {head} arguments_{index} "}}"\n')
        rules.append(f"arguments_{index}: %json {json.dumps(schema, ensure_ascii=False)}\n")
    return "".join(rules)
