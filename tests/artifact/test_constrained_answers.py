"""Constrained answers of the tiny checkpoint, whose weights are random, over HTTP: what is finished matches."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import openai_checks as checks
import pytest
import requests
from held_resources import check_all_is_free
from jsonschema import Draft202012Validator
from mingc_command import CHECKPOINT
from openai import BadRequestError
from pydantic import BaseModel
from random_schemas import UNSUPPORTED, random_schema
from server_thread import run_server

from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def base_url(eager_artifact: Path) -> Iterator[str]:
    services: list[OmniService] = []

    def opened() -> OmniService:
        services.append(open_service(eager_artifact))
        return services[0]

    with run_server(opened) as url:
        yield url
        check_all_is_free(services[0])


def ask(url: str, route: str = "chat/completions", **fields: Any) -> requests.Response:
    given = (
        {"prompt": "Say."} if route == "completions" else {"messages": [{"role": "user", "content": "Say."}]}
    )
    body = {**given, "max_tokens": 120, "temperature": 1, "seed": 3, **fields}
    return requests.post(f"{url}/v1/{route}", json=body, timeout=120)


def named(schema: object) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}


def check_random_schemas(url: str, seeds: range, share: float) -> None:
    """Every answer that is finished matches its schema, and most are finished."""

    def is_finished(seed: int) -> bool:
        schema = random_schema(seed)
        response = ask(url, response_format=named(schema), max_tokens=250, seed=seed)
        assert response.ok, (schema, response.text)
        [choice] = response.json()["choices"]
        if choice["finish_reason"] == "length":
            return False
        answer = json.loads(choice["message"]["content"])
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(answer)
        return True

    with ThreadPoolExecutor(8) as clients:
        finished = sum(clients.map(is_finished, seeds))
    assert finished > share * len(seeds), finished


def test_answers_match_random_schemas(base_url: str) -> None:
    check_random_schemas(base_url, range(5000, 5015), 0.5)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
def test_answers_match_a_thousand_random_schemas(base_url: str) -> None:
    check_random_schemas(base_url, range(1000), 0.8)


@pytest.mark.parametrize("schema", UNSUPPORTED, ids=lambda schema: next(reversed(schema)))
def test_unsupported_keywords_are_named(base_url: str, schema: dict[str, Any]) -> None:
    keyword = next(key for key in reversed(schema) if key not in ("then", "type"))
    response = ask(base_url, response_format=named({"type": "object", "properties": {"p": schema}}))
    error = response.json()["error"]
    assert response.status_code == 400 and f'"{keyword}"' in error["message"]
    assert (error["param"], error["code"]) == ("response_format", "invalid_json_schema")


@pytest.mark.parametrize("route", ["chat/completions", "completions"])
@pytest.mark.parametrize(
    ("fields", "regex"),
    [
        ({"structured_outputs": {"regex": r"[a-c]{5}\d"}}, r"[a-c]{5}\d"),
        ({"structured_outputs": {"choice": ["red", "grün 🐱"]}}, "red|grün 🐱"),
        ({"structured_outputs": {"json": SCHEMA}}, r'\{"a": (true|false)\}'),
        ({"structured_outputs": {"grammar": 'start: "(" start ")" | "x"'}}, r"\(*x\)*"),
        ({"guided_regex": "a{0,3}", "min_tokens": 9, "n": 3}, "a{3}"),
        ({"guided_choice": ["yes"], "stop": ["s"]}, "ye"),
        ({"guided_json": json.dumps({"enum": [1, 2]}), "stop_token_ids": [1]}, "[12]"),
        ({"guided_grammar": 'start: "a" | "b"', "logit_bias": {"64": -100}}, "b"),
    ],
)
def test_fields_of_vllm(base_url: str, route: str, fields: dict[str, Any], regex: str) -> None:
    choices = ask(base_url, route, **fields).json()["choices"]
    assert len(choices) == fields.get("n", 1)
    for choice in choices:
        text = choice["text"] if route == "completions" else choice["message"]["content"]
        assert choice["finish_reason"] == "stop" and re.fullmatch(regex, text, re.DOTALL), text


class Answer(BaseModel):
    kind: Literal["cat", "dog"]
    sizes: list[bool]


def test_the_official_client_parses_models(base_url: str) -> None:
    with checks.client(base_url) as openai:
        common: dict[str, Any] = {
            "model": "ming-omni",
            "messages": checks.user(checks.text("Say.")),
            "response_format": Answer,
            "temperature": 1,
            "seed": 1,
            "max_tokens": 200,
        }
        parsed = openai.chat.completions.parse(**common).choices[0].message.parsed
        assert isinstance(parsed, Answer)
        with openai.chat.completions.stream(**common) as stream:
            events = list(stream)
            final = stream.get_final_completion().choices[0]
        assert final.finish_reason == "stop" and final.message.parsed == parsed
        assert next(event for event in events if event.type == "content.done").parsed == parsed
        anything = openai.chat.completions.create(
            **{**common, "response_format": {"type": "json_object"}, "logit_bias": {"90": 1, "92": 90}}
        )
        assert json.loads(anything.choices[0].message.content or "") == {}
        with pytest.raises(BadRequestError, match="cannot be used"):
            openai.chat.completions.create(
                **{**common, "response_format": named({"allOf": [{"const": 1}, {"const": 2}]})}
            )


def test_a_constrained_answer_is_spoken(base_url: str) -> None:
    fields = {"modalities": ["text", "audio"], "guided_choice": ["Good morning."]}
    message = ask(base_url, **fields).json()["choices"][0]["message"]
    assert (
        message["content"] == message["audio"]["transcript"] == "Good morning." and message["audio"]["data"]
    )


def test_a_thought_is_free(base_url: str) -> None:
    for seed in range(3):
        fields = {"thinking": True, "seed": seed, "max_tokens": 30}
        [choice] = ask(base_url, response_format=named({"const": {"b": None}}), **fields).json()["choices"]
        message = choice["message"]
        assert message["content"] == '{"b": null}' or message["reasoning_content"], message


@pytest.mark.parametrize("bias", [60, -60], ids=["a call", "text"])
def test_an_answer_with_tools_matches_or_calls(base_url: str, bias: float) -> None:
    function = {"name": "f", "strict": True, "parameters": SCHEMA}
    token = TextTokenizer.from_file(CHECKPOINT).token_id("<tool_call>")
    fields = {
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
        "logit_bias": {token: bias},
    }
    [choice] = ask(base_url, response_format=named({"enum": [{"t": 1}, 7]}), **fields).json()["choices"]
    if bias < 0:
        assert choice["finish_reason"] == "stop" and json.loads(choice["message"]["content"]) in ({"t": 1}, 7)
    else:
        [call] = choice["message"]["tool_calls"]
        assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "f"
        Draft202012Validator(SCHEMA).validate(json.loads(call["function"]["arguments"]))


def test_answers_without_the_library_are_refused(
    eager_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.startswith("mingc.runtime.grammar")]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with run_server(lambda: open_service(eager_artifact)) as url:
        assert ask(url).ok
        error = ask(url, guided_regex="a").json()["error"]
        assert error["param"] == "guided_regex" and "pip install llguidance" in error["message"]
