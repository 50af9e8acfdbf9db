"""Matchers of constraints: random tokens out of their masks, with the tiny tokenizer and no model."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from mingc_command import CHECKPOINT
from random_schemas import TEXTS, random_schema

from mingc.errors import CapacityError, RequestError, WorkerError
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.grammar.compiler import GrammarCompiler
from mingc.runtime.grammar.matcher import GrammarMatcher
from mingc.runtime.request import Constraint

TOKENIZER = TextTokenizer.from_file(CHECKPOINT)
VOCAB = 576  # more than the tokenizer has, as in the released model
STOP = tuple(map(TOKENIZER.token_id, ("<|role_end|>", "<|endoftext|>")))
CALL, CALL_END = map(TOKENIZER.token_id, ("<tool_call>", "</tool_call>"))
# Each is small, and would take minutes, gigabytes or the stack.
HOSTILE = {
    "time or memory": ("json", {"type": "integer", "multipleOf": 9999991}, "more than"),
    "memory": ("json", {"allOf": [{"type": "string", "pattern": f"w{i}"} for i in range(100)]}, "more than"),
    "depth": ("json", '{"items":' * 5000 + "{}" + "}" * 5000, "nested too deeply"),
    "parentheses": ("regex", "(" * 10000 + "a" + ")" * 10000, "invalid regex"),
    "stars": ("regex", "(a*)*" * 10000, "more than"),
    "length": ("regex", "a" * 70000, "the limit is 65536"),
    "references": ("json", {"allOf": [{"$ref": "#"}]}, "allows no answer"),
    "product": (
        "json",
        {"allOf": [{"anyOf": [{"required": [f"{i}{j}"]} for j in range(9)]} for i in range(9)]},
        "too large",
    ),
    "false": ("json", False, "Unsatisfiable"),
    "rules": ("grammar", "start: a\na: a", "allows no answer"),
    "nothing": ("grammar", "start: A\nA: /a/ & /b/", "allows no answer"),
}


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TOKENIZER, VOCAB, STOP)
    yield made
    made.close()


def constraint(kind: str, text: object, **more: object) -> Constraint:
    given = text if isinstance(text, str) else json.dumps(text)
    return Constraint(kind=kind, text=given, param="field", **more)  # type: ignore[arg-type]


def allowed(matcher: GrammarMatcher) -> list[int]:
    words = np.full(VOCAB // 32, -1, np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


def draw(matcher: GrammarMatcher, seed: int, most: int = 300) -> list[int] | None:
    """Random tokens up to the end; None if there is none within `most` tokens."""
    rng, tokens = random.Random(seed), list[int]()
    while len(tokens) < most:
        token = rng.choice(allowed(matcher))
        if token in STOP:
            return tokens
        matcher.accept(token)
        tokens.append(token)
        if matcher.is_stopped:
            return tokens
    return None


def feed(matcher: GrammarMatcher, tokens: list[int]) -> None:
    for token in tokens:
        assert not matcher.is_active or token in allowed(matcher), TOKENIZER.decode([token])
        matcher.accept(token)


def texts(compiler: GrammarCompiler, given: Constraint, count: int = 12) -> set[str]:
    drawn = [draw(matcher, seed) for seed, matcher in enumerate(compiler.compile(given, count))]
    return {TOKENIZER.decode(tokens, skip_special_tokens=False) for tokens in drawn if tokens is not None}


@pytest.mark.parametrize(
    "regex",
    [
        "[a-z]{3}", r"\d{4}-\d{2}-\d{2}", "(yes|no)!?", "a/b[/]+c{2}", "x\ny", r"\[\{\\\}\]", "(?i)straße",
        "日本[語人]", ".{1,4}", "(?s:.){1,4}", r"[^\n]{2}", "^ab?$", "(a|ab)(c|bcd)", r"\w\s\w", "", "\"'#//",
    ],
)  # fmt: skip
def test_answers_match_a_regex(compiler: GrammarCompiler, regex: str) -> None:
    found = texts(compiler, constraint("regex", regex))
    assert found and all(re.fullmatch(regex, text) for text in found), found


def test_choices_are_text_whatever_they_look_like(compiler: GrammarCompiler) -> None:
    given = constraint("choice", TEXTS)
    assert texts(compiler, given, 60) <= set(TEXTS)
    for text in TEXTS:
        assert texts(compiler, constraint("choice", [text]), 2) == {text}
        found = texts(compiler, constraint("json", {"const": text}), 2)
        assert {json.loads(each) for each in found} == {text}


def test_thousands_of_choices(compiler: GrammarCompiler) -> None:
    choices = [f"item {number}" for number in range(0, 40000, 10)]
    assert {*choices} >= texts(compiler, constraint("choice", choices)) != set()


def test_masks_allow_only_what_continues_a_choice(compiler: GrammarCompiler) -> None:
    choices = ["a", "ab", "abba 🐱", "日", "this is", "think"]
    wanted = [choice.encode() for choice in choices]
    matchers = compiler.compile(constraint("choice", choices), 30)
    for seed, matcher in enumerate(matchers):
        rng, begun, is_end = random.Random(seed), b"", False
        while not is_end:
            for token in (tokens := allowed(matcher)):
                if token in STOP:
                    assert begun in wanted
                else:
                    piece = TOKENIZER.token_bytes(token)
                    assert piece and any(each.startswith(begun + piece) for each in wanted)
            token = rng.choice(tokens)
            is_end = token in STOP
            if not is_end:
                matcher.accept(token)
                begun += TOKENIZER.token_bytes(token) or b""
                is_end = matcher.is_stopped
        assert begun in wanted


def test_answers_match_random_schemas(compiler: GrammarCompiler) -> None:
    finished = 0
    for seed in range(60):
        schema = random_schema(seed)
        [matcher] = compiler.compile(constraint("json", schema))
        if (tokens := draw(matcher, seed)) is not None:
            finished += 1
            checker = Draft202012Validator.FORMAT_CHECKER
            Draft202012Validator(schema, format_checker=checker).validate(
                json.loads(TOKENIZER.decode(tokens))
            )
    assert finished > 45


def test_json_has_no_free_white_space(compiler: GrammarCompiler) -> None:
    schema = {"const": {"a": [1, {"b": None}], "c": "d  e"}, "x-guidance": {"whitespace_flexible": True}}
    assert texts(compiler, constraint("json", schema), 2) == {'{"a": [1, {"b": null}], "c": "d  e"}'}


@pytest.mark.parametrize("kind", ["json", "regex", "grammar"])
def test_a_thought_may_come_first(compiler: GrammarCompiler, kind: str) -> None:
    text = {"json": {"const": {"a": 1}}, "regex": r'\{"a": 1\}', "grammar": 'start: x\nx: "{\\"a\\": 1}"'}[
        kind
    ]
    for begin in ("", "<think></think>", "<think>\nWhy {1}?</thin> <tool_call>\n</think>\n\n"):
        [matcher] = compiler.compile(constraint(kind, text, thinking=True))
        feed(matcher, TOKENIZER.encode_plain(f'{begin}{{"a": 1}}'))
        assert matcher.is_stopped
    [matcher] = compiler.compile(constraint(kind, text, thinking=True))
    feed(matcher, TOKENIZER.encode_plain("<think>a</think>"))
    assert not set(TOKENIZER.encode_plain("xb9")) & set(allowed(matcher))


def test_a_constraint_begins_again_after_its_token(compiler: GrammarCompiler) -> None:
    grammar = 'start: "\\n" %json {"const": {"a": 1}, "x-guidance": {"whitespace_flexible": false}} "\\n" </tool_call>'
    matchers = compiler.compile(constraint("grammar", grammar, after=CALL), 2)
    for matcher in matchers:
        for _ in range(2):
            assert not matcher.is_active and not matcher.is_stopped
            feed(matcher, [*TOKENIZER.encode_plain('anything {"'), CALL])
            assert matcher.is_active
            feed(matcher, [*TOKENIZER.encode_plain('\n{"a":1}\n'), CALL_END])
    feed(matchers[0], [CALL])
    assert matchers[0].is_active and not matchers[1].is_active


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_constraints_are_refused(compiler: GrammarCompiler, name: str) -> None:
    kind, text, why = HOSTILE[name]
    with pytest.raises(RequestError, match=why) as refused:
        compiler.compile(constraint(kind, text))
    assert refused.value.param == "field" and (refused.value.code or "").startswith("invalid_")
    assert texts(compiler, constraint("regex", "still"), 1) == {"still"}


def test_what_was_refused_is_never_compiled_by_the_server(compiler: GrammarCompiler) -> None:
    """Sent again, it keeps the process busy again."""
    kind, text, why = HOSTILE["stars"]
    for _ in range(2):
        with pytest.raises(RequestError, match=why):
            compiler.compile(constraint(kind, text))


def test_a_long_answer_may_take_its_time(compiler: GrammarCompiler) -> None:
    """What a token takes is limited, not what all of them take."""
    [matcher] = compiler.compile(constraint("regex", "a*"))
    (token,), words = TOKENIZER.encode_plain("a"), np.zeros(VOCAB // 32, np.int32)
    begin = time.thread_time()
    while time.thread_time() - begin < 1.0:  # of this thread alone, whatever else the machine does
        matcher.fill(words)
        matcher.accept(token)


def test_an_answer_whose_next_token_takes_too_long_fails(compiler: GrammarCompiler) -> None:
    [matcher] = compiler.compile(constraint("grammar", "start: x x x x\nx: x x | /[a-z]/"))
    with pytest.raises(RequestError, match="'field'") as failed:
        for _ in range(3000):
            matcher.accept(next(token for token in allowed(matcher) if token not in STOP))
    assert failed.value.code == "constraint_too_complex"


def test_a_long_text_that_is_forced_costs_little(compiler: GrammarCompiler) -> None:
    """Each mask would otherwise tokenize all that follows: seconds on the thinker's thread."""
    text = "".join(random.Random(1).choices("abc é語<", k=20000))
    [matcher] = compiler.compile(constraint("json", {"const": text}))
    tokens = []
    for _ in range(200):
        tokens += allowed(matcher)
        matcher.accept(tokens[-1])
    assert len(tokens) == 200 and f'"{text}'.startswith(TOKENIZER.decode(tokens).rstrip("\ufffd"))


def test_a_process_that_was_killed_is_replaced_and_ends_with_the_compiler() -> None:
    made = GrammarCompiler(TOKENIZER, VOCAB, STOP)
    assert made.pid is None
    made.compile(constraint("regex", "a"))
    process = made._process
    assert process is not None
    process.kill()
    with pytest.raises(WorkerError, match="killed"):
        made.compile(constraint("regex", "b"))
    made.compile(constraint("regex", "b"))
    process = made._process
    made.close()
    assert process is not None and process.returncode is not None
    with pytest.raises(CapacityError):
        made.compile(constraint("regex", "c"))


KEYWORDS = (
    "type", "properties", "items", "required", "enum", "const", "anyOf", "allOf", "oneOf", "not", "$ref", "$defs",
    "pattern", "minLength", "maxItems", "minimum", "multipleOf", "format", "additionalProperties", "prefixItems",
    "patternProperties", "$id", "$schema", "x-guidance",
)  # fmt: skip
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sampled_from(
        ("object", "array", "string", "integer", "number", "date", "#", "#/$defs/a", "^a*$", "(", "http://a/b")
    ),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(KEYWORDS) | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@settings(max_examples=150, deadline=None)
@given(VALUES)
def test_any_json_is_compiled_or_refused(value: object) -> None:
    shared = _shared()
    try:
        [matcher] = shared.compile(constraint("json", value))
        draw(matcher, 0, 20)
    except RequestError as error:
        assert error.param == "field"


_made: list[GrammarCompiler] = []


def _shared() -> GrammarCompiler:
    """hypothesis runs without fixtures of a module."""
    if not _made:
        _made.append(GrammarCompiler(TOKENIZER, VOCAB, STOP))
    return _made[0]


@pytest.fixture(scope="module", autouse=True)
def _close() -> Iterator[None]:
    yield
    for made in _made:
        made.close()
