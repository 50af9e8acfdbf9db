"""The recipe of an export: backends and quantization per stage, and choices that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mingc.errors import ConfigError
from mingc.export.recipe import ExportRecipe
from mingc.export.stages import find

NOWHERE = Path("nowhere")


def make_recipe(**options: Any) -> ExportRecipe:
    return ExportRecipe(checkpoint=NOWHERE, output=NOWHERE, **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"backend": ("aoti:cfm", "aoti:talker,cfm")}, "names a backend for stage cfm twice"),
        ({"backend": ("aoti", "aoti")}, "names a backend for all stages twice"),
        ({"backend": ("aoti:painter",)}, "--backend: unknown stage painter"),
        ({"quantize": ("fp8", "fp8")}, "--quantize fp8,fp8: names a stage twice"),
        ({"quantize": ("thinker=fp8", "thinker=int4")}, "names a stage twice"),
        ({"quantize": ("talker=int4",)}, "--quantize talker=int4: not one of fp8"),
        ({"quantize": ("vision_encoder=fp8",)}, "--quantize vision_encoder=fp8: not one of fp8"),
        ({"world_size": 3}, "--tp 3"),
        ({"batch_sizes": (4, 1)}, "--batch-sizes 4,1: must be ascending"),
        ({"batch_sizes": (1, 4, 4)}, "--batch-sizes 1,4,4: must be ascending"),
        (
            {"max_model_len": 4096, "prefill_chunk_size": 8192},
            "--max-model-len 4096: less than one prefill chunk",
        ),
    ],
)
def test_a_choice_that_is_ambiguous_or_unknown_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_recipe(**options)


def test_a_backend_for_a_stage_that_is_not_exported_is_refused() -> None:
    recipe = make_recipe(backend=("aoti", "aoti:cfm"))
    recipe.check_stages([find("cfm"), find("talker")])
    with pytest.raises(ConfigError, match="--backend aoti:cfm: is for cfm"):
        recipe.check_stages([find("talker")])


def test_a_backend_for_a_stage_overrides_the_one_for_all() -> None:
    recipe = make_recipe(backend=("eager", "aoti:cfm"))
    assert [recipe.backend_of(stage) for stage in ("cfm", "talker")] == ["aoti", "eager"]
    assert make_recipe(backend=("eager:cfm",)).backend_of("cfm") == "eager"


@pytest.mark.parametrize(
    ("quantize", "expected"),
    [
        ((), {"thinker": None, "cfm": None, "vision_encoder": None}),
        (("fp8",), {"thinker": "fp8", "cfm": "fp8", "vision_encoder": None}),
        (("thinker=int4",), {"thinker": "int4", "cfm": None, "vision_encoder": None}),
        (("fp8", "thinker=int4"), {"thinker": "int4", "cfm": "fp8", "vision_encoder": None}),
    ],
)
def test_a_stage_is_quantized_as_asked_if_it_supports_that(
    quantize: tuple[str, ...], expected: dict[str, str | None]
) -> None:
    recipe = make_recipe(quantize=quantize)
    assert {stage: recipe.quantization(stage) for stage in expected} == expected
