"""What a request wants its answer to match: OpenAI's `response_format` and the fields of vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import msgspec

from mingc.runtime.request import Constraint
from mingc.server.http.field_errors import invalid, missing
from mingc.server.http.request_schemas import (
    ChatBody,
    JsonObjectFormat,
    JsonSchemaFormat,
    StructuredOutputs,
    TextBody,
)

_Kind = Literal["json", "regex", "choice", "grammar"]
_ANY_OBJECT = {"type": "object"}


def parse_constraint(body: TextBody, *, thinking: bool) -> Constraint | None:
    """Read the constraint of an answer; None if it is free. Raises: RequestError, also if there are several."""
    found = list(_constraints(body))
    if not found:
        return None
    kind, value, param = found[0]
    if len(found) > 1:
        raise invalid(found[1][2], f"is given beside '{param}'; send one of them")
    if body.ignore_eos:
        raise invalid("ignore_eos", f"contradicts '{param}', which says where the answer ends")
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    return Constraint(kind=kind, text=text, param=param, thinking=thinking)


def _constraints(body: TextBody) -> Iterator[tuple[_Kind, object, str]]:
    """Kind, value and path of each that is given."""
    if isinstance(body, ChatBody):
        if isinstance(body.response_format, JsonObjectFormat):
            yield "json", _ANY_OBJECT, "response_format"
        elif isinstance(body.response_format, JsonSchemaFormat):
            if (schema := body.response_format.json_schema.schema) is None:
                raise missing("response_format.json_schema.schema")
            yield "json", schema, "response_format"
    guided = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    for prefix, given in (("structured_outputs.", body.structured_outputs), ("guided_", guided)):
        if given is None:
            continue
        if given.json is not None:
            yield "json", given.json, f"{prefix}json"
        if given.json_object:
            yield "json", _ANY_OBJECT, f"{prefix}json_object"
        if given.regex is not None:
            yield "regex", given.regex, f"{prefix}regex"
        if given.choice == []:
            raise invalid(f"{prefix}choice", "is empty: there is nothing to choose from")
        if given.choice is not None:
            yield "choice", given.choice, f"{prefix}choice"
        if given.grammar is not None:
            yield "grammar", given.grammar, f"{prefix}grammar"
