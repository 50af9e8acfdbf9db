"""The tokenizer's chat template, which an artifact carries for clients."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from mingc.errors import BundleError
from mingc.verify.comparison_log import ComparisonLog

_WORDS = "Hello, how are you today?"


def render(template: str, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool) -> str:
    """The prompt of a conversation, as transformers renders it. Raises: BundleError when the template cannot."""
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=messages, add_generation_prompt=add_generation_prompt)
    except Exception as error:  # a template may raise anything
        raise BundleError(
            f"the chat template cannot render a conversation: {type(error).__name__}: {error}",
            where="manifest.json, chat_template",
            fix="export again from a tokenizer_config.json whose template works",
        ) from error


def check_template(template: str) -> ComparisonLog:
    """Render a plain conversation; its words must be in the prompt."""
    ledger = ComparisonLog("chat template", {}, tolerance=0.0, is_exact=True)
    with ledger.case("a plain conversation"):
        prompt = render(template, [{"role": "user", "content": _WORDS}], add_generation_prompt=True)
        ledger.claim("a plain conversation", _WORDS in prompt, "is rendered with its words")
    return ledger
