"""Replay of recorded prompts with an artifact that lacks encoders: prompts it cannot build are skipped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from preprocess_data import audio_parameters, document, thinker_parameters, tokenizer, vision_parameters

from conformance.preprocess import _without_suppressed, replay_preprocessing
from conformance.reference_log import ReferenceLog


def outcomes(**encoders: Any) -> dict[str, str]:
    parameters = {"thinker": thinker_parameters(), **encoders}
    engines: Any = SimpleNamespace(
        find_parameters=lambda stage, kind: parameters.get(stage),
        tokenizer=lambda stage: tokenizer(),
    )
    log = ReferenceLog("preprocess.safetensors", {}, tolerance=1e-4, is_exact=True)
    replay_preprocessing(engines, log, document("preprocess"))
    return {each.name.partition(": ")[2]: each.outcome for each in log.comparisons}


@pytest.mark.parametrize("missing", ["vision_encoder", "audio_encoder"])
def test_a_prompt_without_its_encoder_is_not_checked(missing: str) -> None:
    encoders = {"vision_encoder": vision_parameters(), "audio_encoder": audio_parameters()}
    del encoders[missing]
    found = outcomes(**encoders)
    kind = {"vision_encoder": "image", "audio_encoder": "audio"}[missing]
    skipped = {name for name, outcome in found.items() if outcome == "not checked"}
    assert any(name.startswith(f"processor_template.{kind}") for name in skipped)
    assert "FAIL" not in found.values()
    assert found["processor_template.text.input_ids"] == "pass"


def test_a_typed_tag_suppresses_one_item_of_its_kind() -> None:
    images: list[dict[str, Any]] = [{"type": "image", "image": name} for name in ("a", "b", "c")]
    audio = {"type": "audio", "audio": "d"}
    text = {"type": "text", "text": "Compare <image> with the others."}
    turn = {"role": "HUMAN", "content": [*images, audio, text]}
    assert list(_without_suppressed(turn)) == [*images[1:], audio, text]
    twice = {"type": "text", "text": "<image> and <image>"}
    assert list(_without_suppressed({**turn, "content": [*images, twice]})) == [images[2], twice]
