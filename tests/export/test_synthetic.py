"""Synthetic checkpoint: every tensor of the released layout, equal on every read."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mingc.errors import CheckpointError, ConfigError
from mingc.export.assets import tokenizers
from mingc.export.checkpoint import Checkpoint, open_checkpoint
from mingc.export.checks.coverage import check_coverage
from mingc.export.stage import Shard, StageOptions, TokenizerSource
from mingc.export.stages import discover, find
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.synthetic.probe import probe_folder, synthetic_recipe
from mingc.export.weights.loading import load_module, write_weights
from mingc.prompts.tokenizer import TextTokenizer


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory, image_checkpoint: Path) -> Path:
    """The tiny checkpoint without its weights."""
    folder = tmp_path_factory.mktemp("synthetic") / "configs"
    shutil.copytree(
        image_checkpoint, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.index.json", "*.pt")
    )
    return folder


@pytest.fixture(scope="module")
def synthetic(configs: Path) -> Checkpoint:
    return open_synthetic(configs)


def test_tensors_have_the_shapes_of_the_checkpoint(synthetic: Checkpoint, image_checkpoint: Path) -> None:
    stages = list(discover().values())
    check_coverage(synthetic, {stage.name: stage.config(synthetic) for stage in stages}, stages)
    real = open_checkpoint(image_checkpoint).parts
    assert set(synthetic.parts) == set(real)
    for name, part in synthetic.parts.items():
        assert bool(part.tensors) == bool(real[name].tensors)
        for tensor, entry in part.tensors.items():
            assert entry.shape == real[name].tensors[tensor].shape, tensor


def test_reads_of_a_tensor_are_equal_and_tensors_differ(configs: Path, synthetic: Checkpoint) -> None:
    talker, again = synthetic.talker, open_synthetic(configs).talker
    assert talker is not None and again is not None
    name = "model.layers.0.mlp.gate_proj.weight"
    value = talker.read(name)
    assert value.dtype == torch.bfloat16 and value.isfinite().all() and value.float().std() > 0
    assert torch.equal(value, again.read(name))
    assert not torch.equal(value, talker.read(name.replace("gate", "up")))


@pytest.mark.parametrize("name", sorted(discover()))
def test_every_graph_loads_where_one_layer_of_each_kind_is_stored(
    name: str, synthetic: Checkpoint, tmp_path: Path
) -> None:
    stage = find(name)
    config = stage.config(synthetic)
    graphs = stage.graphs(config, Shard(), StageOptions(dtype=torch.bfloat16))
    omitted = {each for graph in graphs for each in graph.spec.layer_instances[1:]}
    write_weights(synthetic, stage, config, Shard(), torch.bfloat16, tmp_path / "weights", omitted=omitted)
    for first in {graph.spec.layer_instances[0] for graph in graphs}:
        assert load_module(stage, config, Shard(), tmp_path / "weights", submodule=first).state_dict()


def test_speech_never_stops_by_itself(synthetic: Checkpoint) -> None:
    talker = synthetic.talker
    assert talker is not None
    weight, bias = talker.read("stop_head.weight").float(), talker.read("stop_head.bias").float()
    hidden = torch.randn(7, weight.shape[1], generator=torch.Generator().manual_seed(0))
    assert (torch.softmax(hidden @ weight.T + bias, -1)[:, 1] < 1e-6).all()


def test_an_undeclared_tensor_is_missing(synthetic: Checkpoint) -> None:
    with pytest.raises(CheckpointError, match=r"no\.such\.weight is missing"):
        synthetic.main.read("no.such.weight")


def test_a_synthetic_probe_exports_the_stages_of_its_engines(configs: Path, tmp_path: Path) -> None:
    asked = ("cfm.sample", "talker", "cfm.speaker")
    recipe = synthetic_recipe(configs, tmp_path, asked, (16, 1), jobs=3, cache=None)
    assert recipe.synthetic and recipe.stages == ("cfm", "talker")
    assert recipe.batch_sizes == (1, 16)


def test_a_probe_of_all_engines_omits_stages_that_may_not_fit_on_disk(configs: Path, tmp_path: Path) -> None:
    recipe = synthetic_recipe(configs, tmp_path, None, None, jobs=1, cache=None)
    speech, pictures = ("talker", "cfm", "audio_vae"), ("image_condition", "glyph", "image_dit", "image_vae")
    assert {*recipe.stages} == {"audio_encoder", "vision_encoder", *speech, *pictures}


@pytest.mark.parametrize("engine", ["nope", "cfm.nope", "cfm,nope.sample"])
def test_an_engine_that_is_not_exported_is_refused_with_its_option(
    configs: Path, tmp_path: Path, engine: str
) -> None:
    with pytest.raises(ConfigError, match="nope") as caught:
        synthetic_recipe(configs, tmp_path, engine.split(","), None, jobs=1, cache=None)
    assert caught.value.where == "--engine" and "cfm" in str(caught.value.fix)


def test_a_comparison_without_its_stage_is_refused_before_the_export(configs: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="vision encoder"):
        synthetic_recipe(configs, tmp_path, ("cfm",), None, jobs=1, cache=None, compare="patch-embed")


def test_the_artifact_of_a_probe_replaces_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="exists") as caught, probe_folder(tmp_path):
        pass
    assert "--force" not in str(caught.value.fix)


def test_the_next_probe_removes_files_of_a_killed_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "mingc-probe-0123abcd.partial"
    left.mkdir()
    with probe_folder(None) as folder:
        assert not left.exists() and folder.parent.parent == tmp_path
    assert not list(tmp_path.iterdir())


def test_only_synthetic_checkpoints_need_no_tokenizer(
    synthetic: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = replace(synthetic, root=tmp_path)
    notes: list[str] = []
    stage = find("talker")
    parameters = {"talker": {"vocab_size": 300}}
    written = tokenizers.copy(bare, tmp_path / "out", [stage], parameters, notes, is_synthetic=True)
    assert TextTokenizer.from_file(tmp_path / "out" / written["talker"]).vocab_size == 300
    assert notes == ["no tokenizer of the talker: the artifact has a byte tokenizer"]
    monkeypatch.setattr(type(stage), "tokenizer", TokenizerSource(file="talker/llm/tokenizer.json"))
    assert tokenizers.copy(bare, tmp_path, [stage], parameters, notes, is_synthetic=True) == {}
    assert notes[1:] == ["no tokenizer of the talker: the artifact can be probed, not served"]
    with pytest.raises(CheckpointError, match=r"talker's tokenizer\.json is missing"):
        tokenizers.copy(bare, tmp_path, [stage], {}, notes, is_synthetic=False)


@pytest.mark.parametrize("text", ["[]", "3", '{"vocab_size": null, "hidden_size": 8}'])
def test_a_speech_llm_config_of_another_form_is_reported(configs: Path, tmp_path: Path, text: str) -> None:
    folder = tmp_path / "configs"
    shutil.copytree(configs, folder)
    (folder / "talker" / "llm" / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="config cannot be read"):
        open_synthetic(folder)
