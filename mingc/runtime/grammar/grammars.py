"""The text of a constraint as a grammar of llguidance."""

from __future__ import annotations

import json
from typing import Any

from llguidance import regex_to_lark

from mingc.errors import RequestError
from mingc.runtime.grammar.json_format import JSON_FORMAT
from mingc.runtime.request import Constraint

MAX_CHARACTERS = 64 * 1024
_THOUGHT = 'start: thought? @answer\nthought: "<think>" inner /\\n*/\ninner[suffix="</think>"]: /(?s:.*)/\n'


def grammar_text(constraint: Constraint) -> str:
    """A grammar of llguidance, which may be invalid. Raises: RequestError for JSON that is none, and for long texts."""
    if len(constraint.text) > MAX_CHARACTERS:
        why = f"has {len(constraint.text)} characters; the limit is {MAX_CHARACTERS}"
        raise unsupported(constraint, why)
    body: dict[str, Any]
    match constraint.kind:
        case "json":
            body = {"json_schema": _schema(constraint)}
        case "regex":
            body = {"lark_grammar": f"start: /{regex_to_lark(constraint.text, 'd')}/"}
        case "choice":
            choices = " | ".join(json.dumps(each, ensure_ascii=False) for each in json.loads(constraint.text))
            # one lexeme: of alternatives of a rule, the parser takes at most 2,000
            body = {"lark_grammar": f"start: CHOICE\nCHOICE: {choices}"}
        case "grammar":
            body = {"lark_grammar": constraint.text}
    grammars = [body]
    if constraint.thinking:
        grammars = [{"lark_grammar": _THOUGHT}, {"name": "answer", **body}]
    return json.dumps({"grammars": grammars})


def unsupported(constraint: Constraint, why: str) -> RequestError:
    """The error of a constraint that cannot be compiled. `why` follows the name of its field."""
    made_of_schemas = constraint.kind == "grammar" and not constraint.param.endswith("grammar")
    kind = "json_schema" if made_of_schemas or constraint.kind == "json" else constraint.kind
    return RequestError(f"'{constraint.param}' {why}", param=constraint.param, code=f"invalid_{kind}")


def _schema(constraint: Constraint) -> dict[str, Any]:
    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not a JSON number")

    try:
        schema = json.loads(constraint.text, parse_constant=refuse)
        json.dumps(schema, allow_nan=False)  # 1e999 is read as infinity
    except RecursionError:
        raise unsupported(constraint, "has a JSON schema that is nested too deeply") from None
    except ValueError as error:
        raise unsupported(constraint, f"is not JSON: {error}") from None
    if isinstance(schema, bool):
        schema = {} if schema else {"enum": []}
    if not isinstance(schema, dict):
        raise unsupported(constraint, "is not a JSON schema, which is an object")
    return {**schema, "x-guidance": JSON_FORMAT}
