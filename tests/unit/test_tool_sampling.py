"""What may be sampled of an answer with tools: grammars, as llguidance reads them, and banned tokens."""

from __future__ import annotations

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer
from preprocess_data import CHECKPOINT, tokenizer

from mingc.prompts.tools import Tool, ToolUse, find_tool_tokens, tool_of
from mingc.runtime.grammar.grammars import grammar_text
from mingc.runtime.request import Constraint, SamplingParams
from mingc.runtime.service.tool_calls import tool_sampling

TOKENS = find_tool_tokens(tokenizer())
assert TOKENS is not None
PLAIN = SamplingParams()
END = tokenizer().token_id("<|role_end|>")
GUIDE = LLTokenizer((CHECKPOINT / "tokenizer.json").read_text(), n_vocab=576, eos_token=[END])


def tool(name: str, parameters: Any = None, **more: Any) -> Tool:
    return tool_of({"type": "function", "function": {"name": name, "parameters": parameters, **more}})


CITY = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"City": {"enum": ["Zürich", "北京"]}},
}
LOOSE = {"properties": {"n": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}
QUOTED = 'get "天气" \\n'
STRICT, FREE = tool(QUOTED, CITY, strict=True), tool("free", LOOSE)


def sampling(use: ToolUse, given: SamplingParams = PLAIN, *, thinking: bool = False) -> SamplingParams:
    return tool_sampling(given, use, TOKENS, thinking=thinking)


def allows(constraint: Constraint | None, text: str) -> bool:
    """Whether an answer may be exactly this text, in which tags of calls are tokens."""
    assert constraint is not None and constraint.kind == "grammar"
    matcher = LLMatcher(GUIDE, grammar_text(constraint), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    ids = tokenizer().encode(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def call(name: str, arguments: str) -> str:
    written = json.dumps(name, ensure_ascii=False)
    return f'<tool_call>\n{{"name": {written}, "arguments": {arguments}}}\n</tool_call>'


GOOD = call(QUOTED, '{"city": "北京", "days": 2}')


def test_a_free_choice_of_free_functions_is_not_constrained() -> None:
    assert sampling(ToolUse(tools=(FREE,))) == PLAIN


def test_no_choice_bans_the_token_of_a_call_beside_other_banned_tokens() -> None:
    use = ToolUse(tools=(STRICT,), choice="none")
    assert sampling(use, SamplingParams(banned_tokens=(5,))) == SamplingParams(banned_tokens=(5, 521))


def test_a_required_call_begins_the_answer_and_matches_its_schema() -> None:
    found = sampling(ToolUse(tools=(STRICT, FREE), choice="required")).constraint
    assert found is not None and (found.param, found.after) == ("tool_choice", None)
    assert allows(found, GOOD) and allows(found, f"{GOOD}\n{GOOD}")
    assert allows(found, call("free", '{"n": [1, 1]}')), (
        "what cannot be expressed of a free function is left out"
    )
    for wrong in (
        f"Hm. {GOOD}", "Hm.", call(QUOTED, "{}"), call(QUOTED, '{"city": "Rom"}'), call(QUOTED, '"a"'),
        call(QUOTED, '{"city": "北京", "x": 1}'), call("free", "[]"), call("other", "{}"), GOOD[:-1],
    ):  # fmt: skip
        assert not allows(found, wrong), wrong


def test_one_call_and_allowed_functions() -> None:
    one = sampling(ToolUse(tools=(STRICT, FREE), choice="required", is_parallel=False)).constraint
    assert allows(one, GOOD) and not allows(one, f"{GOOD}\n{GOOD}")
    named = sampling(ToolUse(tools=(STRICT, FREE), choice="required", allowed=("free",))).constraint
    assert allows(named, call("free", "{}")) and not allows(named, GOOD)


@pytest.mark.parametrize(
    ("use", "is_free_allowed"),
    [
        (ToolUse(tools=(STRICT, FREE)), True),
        (ToolUse(tools=(STRICT, FREE), allowed=(QUOTED,)), False),
        (ToolUse(tools=(tool("other"), FREE), allowed=("free",)), True),
    ],
)
def test_strict_and_allowed_functions_constrain_a_call_from_its_token_on(
    use: ToolUse, is_free_allowed: bool
) -> None:
    found = sampling(use).constraint
    assert found is not None and (found.param, found.after) == ("tools", TOKENS.call_start)
    inner = GOOD.removeprefix("<tool_call>")
    assert allows(found, inner) == (STRICT in use.callable_tools)
    assert allows(found, call("free", "{}").removeprefix("<tool_call>")) == is_free_allowed
    assert not allows(found, inner.replace("北京", "Rom"))


def test_a_thought_may_come_before_a_required_call() -> None:
    use = ToolUse(tools=(STRICT,), choice="required")
    found = sampling(use, thinking=True).constraint
    for thought in ("", "<think>\nHm </thin 好\n</think>\n\n"):
        assert allows(found, thought + GOOD)
    assert not allows(found, f"<think>Hm</think>So: {GOOD}")
    assert not allows(sampling(use).constraint, f"<think></think>{GOOD}")


def test_a_response_format_applies_to_answers_without_calls() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    answer = Constraint(kind="json", text=json.dumps(schema), param="response_format")
    found = sampling(ToolUse(tools=(STRICT,)), SamplingParams(constraint=answer)).constraint
    assert allows(found, '{"a": 1}') and allows(found, GOOD)
    assert not allows(found, "Hm.") and not allows(found, '{"a": "b"}')
    assert found is not None and found.param == "response_format"
    required = sampling(
        ToolUse(tools=(STRICT,), choice="required"), SamplingParams(constraint=answer)
    ).constraint
    assert not allows(required, '{"a": 1}')
    regex = SamplingParams(constraint=Constraint(kind="regex", text="a*", param="structured_outputs"))
    assert sampling(ToolUse(tools=(STRICT,)), regex) == regex, "it says what the whole answer is"
    none = ToolUse(tools=(STRICT,), choice="none")
    assert sampling(none, regex).constraint == regex.constraint


def test_a_schema_that_cannot_be_expressed_is_an_error_of_a_strict_function_only() -> None:
    for is_strict in (False, True):
        use = ToolUse(tools=(tool("f", LOOSE, strict=is_strict),), choice="required")
        found = sampling(use).constraint
        assert found is not None
        assert LLMatcher(GUIDE, found.text, log_level=0).is_error() == is_strict
