"""The recipe of an export: backends and quantization per stage, and choices that are refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from mingc.errors import ConfigError
from mingc.export.compile.backends import find_backend
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
        ({"quantize": ("fp4",)}, "--quantize fp4: not one of fp8"),
        ({"quantize": ("cfm=",)}, "--quantize cfm=: not one of fp8"),
        ({"quantize": ("cfm=int4",)}, "--quantize cfm=int4: not one of fp8"),
        ({"quantize": ("talker=int4",)}, "--quantize talker=int4: not one of fp8"),
        ({"quantize": ("vision_encoder=fp8",)}, "--quantize vision_encoder=fp8: not one of fp8"),
        (
            {"target": "rtx:sm86", "backend": ("aoti",)},
            "--backend aoti: aoti cannot build engines for RTX cards",
        ),
        ({"backend": ("aoti+onnx",)}, r"--backend aoti\+onnx: not one of auto, aoti"),
        ({"backend": ("aoti:",)}, "--backend aoti:: names no stage"),
        ({"model_name": "\udcff"}, "--model-name '.*udcff': contains unprintable characters"),
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
    assert [recipe.backends_of(stage) for stage in ("cfm", "talker")] == [("aoti",), ("eager",)]
    assert make_recipe(backend=("eager:cfm",)).backends_of("cfm") == ("eager",)


@pytest.mark.parametrize(
    ("quantize", "expected"),
    [
        ((), {"thinker": None, "cfm": None, "vision_encoder": None}),
        (("fp8",), {"thinker": "fp8", "cfm": "fp8", "vision_encoder": None}),
        (("thinker=int4",), {"thinker": "int4", "cfm": None, "vision_encoder": None}),
        (("cfm=fp8",), {"cfm": "fp8", "talker": None}),
        (("fp8", "thinker=int4"), {"thinker": "int4", "cfm": "fp8", "vision_encoder": None}),
    ],
)
def test_a_stage_is_quantized_as_asked_if_it_supports_that(
    quantize: tuple[str, ...], expected: dict[str, str | None]
) -> None:
    recipe = make_recipe(quantize=quantize)
    assert {stage: recipe.quantization(stage) for stage in expected} == expected


@pytest.mark.parametrize(
    ("name", "valid", "wrong"),
    [
        ("jobs", 1, 0),
        ("cache_gigabytes", 0, -0.1),
        ("cache_gigabytes", 1e9, math.inf),
        ("cache_gigabytes", 20, math.nan),
        ("batch_sizes", (1,), ()),
        ("batch_sizes", (1, 1024), (1, 1025)),
        ("batch_sizes", (1, 512), (1, 10**20)),
        ("batch_sizes", (1, 2), (0, 2)),
        ("prefill_chunk_size", 16, 15),
        ("max_model_len", 1 << 20, (1 << 20) + 1),
        ("model_name", "mine", " "),
        ("model_name", "模型", "a\tb"),
        ("target", "cuda", "tpu"),
        ("dtype", "bfloat16", "float16"),
        ("world_size", 8, 16),
        ("stages", ("cfm", "talker"), ("cfm", "cfm")),
        ("stages", ("cfm",), ()),
        ("backend", ("aoti",), ()),
        ("backend", ("aoti", "aoti:cfm,talker"), ("aoti:cfm,",)),
        ("backend", ("aoti:cfm", "aoti:talker"), ("aoti:cfm", "aoti:cfm")),
        ("quantize", ("fp8", "thinker=int4"), ("int4",)),
    ],
    ids=str,
)
def test_limits_of_a_choice(name: str, valid: object, wrong: object) -> None:
    assert getattr(make_recipe(**{name: valid}), name) == valid
    with pytest.raises(ConfigError) as caught:
        make_recipe(**{name: wrong})
    option = {"world_size": "--tp", "cache_gigabytes": "--cache-limit"}.get(
        name, f"--{name.replace('_', '-')}"
    )
    assert caught.value.message.startswith(option) and caught.value.where == "mingc export"


@pytest.mark.parametrize(
    ("stages", "length", "chunk", "says"),
    [
        (("thinker",), 128, 128, None),
        (("thinker",), 127, 16, "must be at least 128"),
        (("thinker",), 128, 129, "less than one prefill chunk"),
        (("vision_encoder",), 127, 16, None),  # it has no context
        (None, 127, 16, "must be at least 128"),
    ],
)
def test_the_context_of_stages_that_have_one_holds_a_chunk(
    stages: tuple[str, ...] | None, length: int, chunk: int, says: str | None
) -> None:
    options: dict[str, Any] = {"stages": stages, "max_model_len": length, "prefill_chunk_size": chunk}
    if says is None:
        make_recipe(**options)
        return
    with pytest.raises(ConfigError, match=f"--max-model-len {length}: {says}"):
        make_recipe(**options)


def test_all_problems_of_a_recipe_come_in_one_error() -> None:
    with pytest.raises(ConfigError) as caught:
        make_recipe(jobs=0, world_size=3, quantize=("none",), backend=("none",))
    assert [line.split()[0] for line in caught.value.message.splitlines()] == [
        "--tp",
        "--jobs",
        "--quantize",
        "--backend",
    ]


@pytest.mark.parametrize(
    ("options", "stages", "says"),
    [
        ({"world_size": 2}, ("cfm",), "--tp 2: is for thinker"),
        ({"world_size": 2}, ("cfm", "thinker"), None),
        ({"max_model_len": 1024}, ("cfm",), "--max-model-len 1024: is for"),
        (
            {"prefill_chunk_size": 64},
            ("cfm", "audio_vae"),
            "--prefill-chunk-size 64: is for thinker and talker",
        ),
        ({"prefill_chunk_size": 64, "quantize": ("fp8",)}, ("talker",), None),
        ({"world_size": 1, "max_model_len": 4096}, ("cfm",), None),
        (
            {"quantize": ("fp8",)},
            ("vision_encoder",),
            "--quantize fp8: is for thinker and talker and cfm and audio_vae",
        ),
        ({"quantize": ("fp8",)}, ("cfm",), None),
        ({"quantize": ("thinker=int4",)}, ("cfm",), "--quantize thinker=int4: is for thinker"),
        ({"batch_sizes": (1,)}, ("vision_encoder",), None),
    ],
    ids=str,
)
def test_a_choice_must_concern_a_stage_that_is_built(
    options: dict[str, Any], stages: tuple[str, ...], says: str | None
) -> None:
    recipe, chosen = make_recipe(**options), [find(name) for name in stages]
    if says is None:
        recipe.check_stages(chosen)
        return
    with pytest.raises(ConfigError, match=says):
        recipe.check_stages(chosen)


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the library for RTX cards were installed."""
    monkeypatch.setattr(type(find_backend("tensorrt")), "unsupported_reason", lambda *words: None)
