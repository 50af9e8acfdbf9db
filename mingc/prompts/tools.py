"""Tools that an answer may call: how a request names them, their tokens, and their block in the prompt."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from mingc.prompts.tokenizer import TextTokenizer

# The block of the released chat template, cut where tokens and definitions stand.
_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
_AFTER = "</tools>\n\nFor each function call, return a json object with function name and arguments within "
_TAGS = " XML tags:\n"
_EXAMPLE = '\n{"name": <function-name>, "arguments": <args-json-object>}\n'


@dataclass(frozen=True, kw_only=True, slots=True)
class Tool:
    """A function that answers may call.

    Attributes:
        definition: JSON in OpenAI's nested form, as the prompt has it; `tool_of` makes it.
        is_strict: whether arguments must match the schema of its parameters.
    """

    name: str
    definition: str
    is_strict: bool = False

    @property
    def parameters(self) -> Mapping[str, Any]:
        """The JSON schema of its arguments."""
        schema: Mapping[str, Any] | None = json.loads(self.definition)["function"].get("parameters")
        return schema or {"type": "object", "properties": {}, "additionalProperties": False}


def tool_of(definition: Mapping[str, Any]) -> Tool:
    """A tool of OpenAI's nested definition, `{"type": "function", "function": {"name": …}}`, in its order of keys."""
    function = definition["function"]
    return Tool(
        name=function["name"],
        definition=json.dumps(definition, ensure_ascii=False),
        is_strict=bool(function.get("strict")),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolUse:
    """The tools of a request, and which of them its answer calls.

    Attributes:
        tools: all of them are in the prompt, whatever the answer may call, so that the prefix cache serves it.
        choice: whether the answer calls none, decides itself, or calls at least one.
        allowed: names of the tools that it may call; None: all.
        is_parallel: whether it may have more than one call.
    """

    tools: tuple[Tool, ...] = ()
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call."""
        if self.choice == "none":
            return ()
        return tuple(tool for tool in self.tools if self.allowed is None or tool.name in self.allowed)


class ToolTokens(NamedTuple):
    """Special tokens around calls and results."""

    call_start: int
    call_end: int
    response_start: int
    response_end: int


TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def find_tool_tokens(tokenizer: TextTokenizer) -> ToolTokens | None:
    """The tokens of a tokenizer; None if it lacks one."""
    found = [token for tag in TOOL_TAGS if (token := tokenizer.find_token(tag)) is not None]
    return ToolTokens(*found) if len(found) == len(TOOL_TAGS) else None


def tool_block(tools: Collection[Tool], tokens: ToolTokens) -> Iterator[str | int]:
    """Texts and tokens of the block of tools, without line breaks around it."""
    yield _BEFORE + "".join(f"{tool.definition}\n" for tool in tools) + _AFTER
    yield tokens.call_start
    yield tokens.call_end
    yield _TAGS
    yield tokens.call_start
    yield _EXAMPLE
    yield tokens.call_end
