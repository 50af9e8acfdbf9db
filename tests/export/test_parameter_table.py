"""Every stage parameter has the value written down in docs/model/parameters.md, and the value its source has."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from image_checkpoint import IMAGE_DATA
from parameter_table import ParameterRow, read_rows, tiny_parameters

from mingc.artifacts.codec import encode
from mingc.artifacts.parameters import BUILT_IN
from mingc.export.checkpoint import Checkpoint
from mingc.export.stage import StageOptions
from mingc.export.stages import discover

TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
ROWS = read_rows()
CONFIG_KEY = re.compile(r"`[^`]+`")


def label(row: ParameterRow) -> str:
    return f"{row.stage}.{row.name}"


def types(value: Any) -> Any:
    return [types(item) for item in value] if isinstance(value, list) else type(value)


@pytest.mark.parametrize("stage", BUILT_IN)
def test_a_stage_has_the_parameters_of_its_table(stage: str, checkpoint: Checkpoint) -> None:
    found = discover()[stage]
    parameters = encode(found.parameters(found.config(checkpoint), StageOptions()))
    table = tiny_parameters()[stage]
    changed = {
        name: (parameters.get(name), table.get(name))
        for name in {*parameters, *table}
        if parameters.get(name) != table.get(name) or types(parameters.get(name)) != types(table.get(name))
    }
    assert changed == {}, "exported, and in docs/model/parameters.md"


def test_there_is_a_row_for_every_parameter_and_no_other() -> None:
    fields = {stage: [field.name for field in dataclasses.fields(kind)] for stage, kind in BUILT_IN.items()}
    assert {stage: list(values) for stage, values in tiny_parameters().items()} == fields


def config_value(source: str) -> Any:
    """The value of the tiny checkpoint's file that a source such as `config.json: llm_config.vocab_size` names."""
    file, _, key = source.partition(": ")
    root = TINY if (TINY / file).exists() else IMAGE_DATA / "tiny-ming"
    document = json.loads((root / file).read_text(encoding="utf-8"))
    if file == "tokenizer.json":
        (token,) = (token["id"] for token in document["added_tokens"] if token["content"] == key)
        return token
    for part in key.split("."):
        document = document[part]
    return document


@pytest.mark.parametrize("row", [row for row in ROWS if CONFIG_KEY.fullmatch(row.source)], ids=label)
def test_a_value_taken_from_a_config_is_the_config_s(row: ParameterRow) -> None:
    assert config_value(row.source.strip("`")) == row.tiny


def test_a_value_derived_from_a_config_follows_its_rule() -> None:
    positions = config_value("config.json: vision_config.num_position_embeddings")
    decoder = config_value("config.json: llm_config")
    added = json.loads((IMAGE_DATA / "imagegen.json").read_text(encoding="utf-8"))["byt5_tokenizer"]["added"]
    golden = sorted(added, key=added.get)
    assert {
        label(row): row.tiny for row in ROWS if "`" in row.source and not CONFIG_KEY.fullmatch(row.source)
    } == {
        "vision_encoder.position_grid_size": round(positions**0.5),
        "audio_encoder.max_frames": 2
        * config_value("config.json: audio_config.whisper_encoder_config.n_ctx"),
        "thinker.stop_token_ids": [decoder["eos_token_id"], decoder["pad_token_id"]],
        "image_condition.num_queries": [
            scale**2 for scale in config_value("mlp/config.json: img_gen_scales")
        ],
        "glyph.added_tokens": [*golden],  # by their ids
        "image_dit.patch_size": config_value("transformer/config.json: all_patch_size")[0],
        "image_dit.feed_forward_size": config_value("transformer/config.json: dim") * 8 // 3,
    }


@pytest.mark.parametrize("row", [row for row in ROWS if "`" not in row.source], ids=label)
def test_constants_of_the_reference_are_the_same_for_every_checkpoint(row: ParameterRow) -> None:
    assert row.tiny == row.released
    assert row.source.startswith("mingc: ") or re.search(r"\[\w+\.md §[\d.]+\]\(\w+\.md\)$", row.source)
