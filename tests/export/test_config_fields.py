"""Fields of the configs that are changed from the release: obeyed, refused by name, or named in a note."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mingc.errors import CheckpointError
from mingc.export.checkpoint import open_checkpoint
from mingc.export.config_fields import field_notes
from mingc.export.plan import plan_export
from mingc.export.recipe import ExportRecipe

_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_MAIN, _TALKER, _LLM = "config.json", "talker/config.json", "talker/llm/config.json"
_VAE, _IMAGES = "talker/vae/config.json", "preprocessor_config.json"


def _changed(root: Path, file: str, path: str, value: Any) -> Path:
    """A copy of the tiny checkpoint whose weights are links, with one field of a config set."""
    shutil.copytree(_TINY, root, copy_function=lambda source, target: Path(target).symlink_to(source))
    document = json.loads((_TINY / file).read_text(encoding="utf-8"))
    *steps, last = path.split(".")
    inner = document
    for step in steps:
        inner = inner[step]
    inner[last] = value
    (root / file).unlink()
    (root / file).write_text(json.dumps(document), encoding="utf-8")
    return root


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        (_MAIN, "llm_config.rope_scaling.factor", 4.0),
        (_MAIN, "llm_config.rope_scaling.mrope_section", [16, 8, 8]),
        (_MAIN, "llm_config.router_type", "topN"),
        (_MAIN, "llm_config.norm_topk_prob", False),
        (_MAIN, "llm_config.use_expert_bias", False),
        (_MAIN, "llm_config.norm_head", True),
        (_MAIN, "llm_config.norm_softmax", True),
        (_MAIN, "llm_config.use_qkv_bias", True),
        (_MAIN, "llm_config.hidden_act", "gelu"),
        (_MAIN, "llm_config.score_function", "softmax"),
        (_MAIN, "llm_config.use_interleaved_frame_timestamp", False),
        (_MAIN, "llm_config.audio_patch_token", 3),
        (_MAIN, "llm_config.tie_word_embeddings", True),
        (_MAIN, "llm_config.quantization_config", {"quant_method": "fp8"}),
        (_MAIN, "vision_config.deepstack_visual_indexes", [0]),
        (_MAIN, "vision_config.deepstack_visual_indexes", [0, 7]),
        (_MAIN, "vision_config.hidden_act", "silu"),
        (_MAIN, "use_deepstack", True),
        (_TALKER, "flowmodel.attn_mask_enabled", True),
        (_TALKER, "aggregator.qk_norm", "rms_norm"),
        (_TALKER, "flowmodel.llm_cond_dim", 65),
        (_LLM, "hidden_act", "gelu"),
        (_LLM, "rope_scaling", {"rope_type": "yarn", "factor": 2}),
        (_VAE, "dec_kwargs.backbone.hidden_act", "gelu"),
        (_IMAGES, "use_interleaved_frame_timestamp", False),
        (_IMAGES, "sampling_rate", 24000),
    ],
)
def test_a_value_that_is_not_implemented_is_refused_by_name(
    file: str, path: str, value: Any, tmp_path: Path
) -> None:
    root = _changed(tmp_path / "checkpoint", file, path, value)
    with pytest.raises(CheckpointError) as caught:
        plan_export(ExportRecipe(checkpoint=root, output=tmp_path / "out"))
    name = "rope scaling" if file == _LLM and path == "rope_scaling" else path.rpartition("_config.")[2]
    named = f"{caught.value.message} {caught.value.where}"
    assert all(word in named for word in name.split(".")), named
    assert Path(file).name in str(caught.value.where) and caught.value.message.strip()


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        (_MAIN, "llm_config.rotary_base_scale", 2),
        (_MAIN, "audio_config.whisper_encoder_config.causal", True),
        (_TALKER, "cfg_strength", 3.0),
        (_VAE, "enc_kwargs.backbone.is_causal", False),
    ],
)
def test_a_field_without_effect_is_named_in_a_note(file: str, path: str, value: Any, tmp_path: Path) -> None:
    plan = plan_export(
        ExportRecipe(checkpoint=_changed(tmp_path / "checkpoint", file, path, value), output=tmp_path / "out")
    )
    (note,) = [note for note in plan.notes if "has no effect" in note]
    assert note.startswith(file) and path.rpartition(".")[2] in note and json.dumps(value) in note


def test_what_changes_nothing_is_not_mentioned(tmp_path: Path) -> None:
    assert field_notes(open_checkpoint(_TINY)) == []
    root = _changed(tmp_path / "checkpoint", _MAIN, "llm_config.some_new_switch", False)
    assert field_notes(open_checkpoint(root)) == []
