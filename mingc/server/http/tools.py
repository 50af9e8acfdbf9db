"""`tools`, `tool_choice` and `parallel_tool_calls` of a chat body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

from mingc.errors import RequestError
from mingc.prompts.tools import Tool, ToolUse, tool_of
from mingc.runtime.request import ServiceInfo
from mingc.server.http.field_errors import invalid, shorten, validation_error
from mingc.server.http.request_schemas import AllowedToolsChoice, ChatBody, NamedTool, ToolsBody

_MAX_DEPTH = 100


def parse_tools(body: ChatBody, info: ServiceInfo) -> ToolUse:
    """The tools of a chat body, and which of them the answer calls. Raises: RequestError."""
    tools = _tools(body)
    if tools and not info.has_tools:
        raise RequestError(
            f"Model '{info.model}' cannot call tools: its tokenizer has no tokens for calls.",
            param="tools",
            code="unsupported_parameter",
        )
    choice: Literal["none", "auto", "required"] = "auto"
    allowed: tuple[str, ...] | None = None
    match body.tool_choice:
        case NamedTool() as named:
            choice, allowed = "required", _names([named], "tool_choice", tools)
        case AllowedToolsChoice(allowed_tools=some):
            choice, allowed = some.mode, _names(some.tools, "tool_choice.allowed_tools.tools", tools)
            if not allowed:
                raise invalid("tool_choice.allowed_tools.tools", "is empty; to call no tool, send 'none'")
        case str() as word:
            choice = word
    if choice == "required" and not tools:
        raise invalid("tool_choice", "asks for a call, but 'tools' has no function")
    if choice == "required" and body.ignore_eos:
        raise invalid("ignore_eos", "contradicts 'tool_choice': an answer of calls ends with them")
    return ToolUse(
        tools=tools, choice=choice, allowed=allowed, is_parallel=body.parallel_tool_calls is not False
    )


def _tools(body: ChatBody) -> tuple[Tool, ...]:
    try:
        checked = msgspec.convert({"tools": body.tools or []}, ToolsBody)
    except msgspec.ValidationError as error:
        raise validation_error(str(error), ToolsBody) from error
    _check_depth(body.tools, _MAX_DEPTH)
    names: set[str] = set()
    for index, tool in enumerate(checked.tools):
        param = f"tools[{index}].function"
        if not tool.function.name:
            raise invalid(f"{param}.name", "is empty")
        if tool.function.name in names:
            raise invalid(f"{param}.name", f"is {shorten(tool.function.name)}, as that of an earlier tool")
        names.add(tool.function.name)
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise invalid(
                f"{param}.parameters", f"must be a JSON schema of the type 'object', not {shorten(kind)}"
            )
    return tuple(tool_of(tool) for tool in body.tools or ())


def _check_depth(value: object, left: int) -> None:
    """Refuse what recursive code cannot handle later."""
    if not left:
        raise invalid("tools", f"is nested more than {_MAX_DEPTH} levels deep")
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for child in children:
        _check_depth(child, left - 1)


def _names(chosen: Sequence[NamedTool], param: str, tools: Sequence[Tool]) -> tuple[str, ...]:
    known = [tool.name for tool in tools]
    for tool in chosen:
        if tool.function.name not in known:
            raise invalid(
                param, f"names {shorten(tool.function.name)}, which 'tools' lacks; it has: {', '.join(known)}"
            )
    return tuple(tool.function.name for tool in chosen)
