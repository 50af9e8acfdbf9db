"""The parameters that a stage writes agree with the signatures of its graphs, and a wrong one does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from image_checkpoint import lay_image_checkpoint

from mingc.artifacts.parameters import BUILT_IN
from mingc.artifacts.signature_problems import signature_problems
from mingc.artifacts.spec import GraphSpec
from mingc.export.checkpoint import open_checkpoint
from mingc.export.stage import Shard, StageOptions
from mingc.export.stages import find

CPU = StageOptions()
CUDA = StageOptions(dtype=torch.bfloat16, device="cuda", static_buckets=True, batch_sizes=(1, 4, 32))
SHORT = StageOptions(max_model_len=256, prefill_chunk_size=64)


@cache
def exported(
    options: StageOptions, world_size: int
) -> tuple[Mapping[str, Any], Mapping[str, Mapping[str, GraphSpec]]]:
    parameters, graphs = {}, {}
    with TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(lay_image_checkpoint(Path(folder) / "tiny"))
        for name in BUILT_IN:
            stage = find(name)
            config = stage.config(checkpoint)
            shard = Shard(rank=0, world_size=world_size if stage.is_sharded else 1)
            parameters[name] = stage.parameters(config, options)
            graphs[name] = {each.spec.name: each.spec for each in stage.graphs(config, shard, options)}
    return parameters, graphs


@pytest.mark.parametrize(
    ("options", "world_size"), [(CPU, 1), (SHORT, 1), (CUDA, 1), (CPU, 2), (CUDA, 2), (CUDA, 4)]
)
def test_an_export_writes_parameters_that_agree_with_its_graphs(
    options: StageOptions, world_size: int
) -> None:
    assert not [*signature_problems(*exported(options, world_size), world_size)]


WRONG = {
    "vision_encoder": ("patch_size", "temporal_patch_size", "merge_size", "in_channels", "hidden_size"),
    "audio_encoder": ("num_mels", "frames_per_token", "hidden_size", "max_frames"),
    "thinker": ("vocab_size", "hidden_size", "num_layers", "page_size"),
    "talker": ("hidden_size", "num_layers", "slot_tokens"),
    "cfm": ("num_steps", "latents_per_patch", "history_latents", "latent_dim", "speaker_dim"),
    "image_condition": ("width",),
    "glyph": ("max_length", "width"),
    "image_dit": ("latent_channels", "patch_size", "caption_width", "hidden_size"),
    "image_vae": ("latent_channels",),
    "audio_vae": (*("hop_samples", "frames_per_latent", "latent_dim", "samples_per_latent", "tail_samples"),),
}


@pytest.mark.parametrize("change", [1, -1])
@pytest.mark.parametrize(
    ("stage", "name"),
    [
        *((stage, name) for stage, names in WRONG.items() for name in names),
        ("vision_encoder", "max_patches"),
    ],
)
def test_a_number_that_does_not_fit_the_graphs_is_named(stage: str, name: str, change: int) -> None:
    parameters, graphs = exported(CPU, 1)
    value = getattr(parameters[stage], name) + change
    changed = {**parameters, stage: replace(parameters[stage], **{name: value})}
    problems = [*signature_problems(changed, graphs, 1)]
    if change < 0 and name in ("max_patches", "max_frames"):
        assert not problems, "a smaller limit is allowed"
    else:
        assert any(name in each for each in problems)


@pytest.mark.parametrize("name", ["prefill_attention", "decode_attention"])
def test_a_graph_with_fewer_layers_than_the_model_is_named(name: str) -> None:
    parameters, graphs = exported(CPU, 1)
    spec = graphs["thinker"][name]
    shorter = replace(spec, layer_instances=spec.layer_instances[:-1])
    changed = {**graphs, "thinker": {**graphs["thinker"], name: shorter}}
    (problem,) = signature_problems(parameters, changed, 1)
    assert "num_layers" in problem and f"thinker.{name} runs for {len(spec.layer_instances) - 1}" in problem


def test_a_stage_alone_is_not_compared_with_others() -> None:
    parameters, graphs = exported(CPU, 1)
    for name in BUILT_IN:
        assert not [*signature_problems({name: parameters[name]}, {name: graphs[name]}, 1)]
    assert not [*signature_problems(parameters, {}, 1)]
