"""`mingc synth`: checkpoints that the exporter opens as it opens the released one."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from mingc_command import CHECKPOINT
from safetensors import safe_open
from safetensors.torch import load_file
from tokenizers import Tokenizer

from mingc.errors import CheckpointError, ConfigError
from mingc.export.assets import tokenizers
from mingc.export.assets.byte_tokenizer import byte_tokenizer
from mingc.export.checkpoint import open_checkpoint
from mingc.export.checks.coverage import check_coverage
from mingc.export.stage import Shard
from mingc.export.stages import discover
from mingc.export.synthetic import writer
from mingc.export.synthetic.writer import synthesize
from mingc.export.weights.loading import check_weights
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import TextTokenizer


def _hashes(folder: Path) -> dict[str, str]:
    return {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_synthetic_checkpoint_holds_what_every_stage_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "_SHARD_BYTES", 1 << 20)
    report = synthesize("tiny", tmp_path / "made", layers=3, seed=7)
    made = open_checkpoint(tmp_path / "made")
    for stage in discover().values():
        if not stage.is_present(made):
            continue
        assert check_weights(made, [*stage.weights(stage.config(made), Shard())]) == []
    layers = {name.split(".")[3] for name in made.main.tensors if name.startswith("model.model.layers.")}
    assert layers == {"0", "1", "2"}
    assert report.files > 3 and report.largest_shard_bytes <= (1 << 20) + 100_000
    assert report.size_bytes == sum(
        path.stat().st_size for path in (tmp_path / "made").rglob("*.safetensors")
    )
    # As the library reads them, in the dtypes of the released checkpoint.
    for folder, dtype in ((".", torch.bfloat16), ("talker", torch.float32), ("talker/vae", torch.float32)):
        with safe_open(next((tmp_path / "made" / folder).glob("*.safetensors")), framework="pt") as stream:
            assert {stream.get_tensor(name).dtype for name in stream.keys()} == {dtype}  # noqa: SIM118
    index = json.loads((tmp_path / "made/model.safetensors.index.json").read_text())
    with safe_open(CHECKPOINT / "model-00001-of-00003.safetensors", framework="pt") as stream:
        ours = {name for name in stream.keys() if "layers.3." not in name and "deepstack" not in name}  # noqa: SIM118
    assert len(ours & index["weight_map"].keys()) > 0.9 * len(ours)


def test_image_generation_is_written_as_the_release_has_it(image_checkpoint: Path, tmp_path: Path) -> None:
    report = synthesize(str(image_checkpoint), tmp_path / "made", layers=2)
    made = open_checkpoint(tmp_path / "made")
    stages = [*discover().values()]
    check_coverage(made, {stage.name: stage.config(made) for stage in stages}, stages)
    assert report.tensors == sum(len(part.tensors) for part in made.parts.values())
    names = {
        path.relative_to(made.root).as_posix() for path in made.root.rglob("*") if path.suffix != ".json"
    }
    assert {
        "transformer/diffusion_pytorch_model.safetensors",
        "vae/diffusion_pytorch_model.safetensors",
        "connector/model.safetensors",
        "mlp/model.safetensors",
        "byt5/byt5_model/byt5_model.pt",
        "byt5/byt5_mapper/byt5_mapper.pt",
    } <= names
    # As the library reads them, in the dtypes of the set.
    for file, dtype in (("transformer", torch.bfloat16), ("vae", torch.bfloat16)):
        values = load_file(made.root / file / "diffusion_pytorch_model.safetensors")
        assert {value.dtype for value in values.values()} == {dtype}
    assert {entry.dtype for entry in made.part("byt5").tensors.values()} == {"F32"}


def test_a_folder_of_configs_without_a_tokenizer_gets_one(tmp_path: Path) -> None:
    """An export of a checkpoint from benchmarks/released stopped because it had no tokenizer."""
    configs = shutil.copytree(
        CHECKPOINT, tmp_path / "configs", ignore=shutil.ignore_patterns("*.safetensors")
    )
    files = {"thinker": "tokenizer.json", "talker": "talker/llm/tokenizer.json"}
    for file in files.values():
        (configs / file).unlink()
    synthesize(str(configs), tmp_path / "made", layers=1)
    made = open_checkpoint(tmp_path / "made")
    stages = [discover()[name] for name in files]
    written = tokenizers.copy(made, tmp_path / "out", stages, {}, [], is_synthetic=False)
    llm = json.loads((CHECKPOINT / "talker/llm/config.json").read_text())
    for name, vocab_size in (("thinker", 576), ("talker", llm["vocab_size"])):  # config.json: vocab_size
        tokenizer = Tokenizer.from_file(str(tmp_path / "out" / written[name]))
        assert tokenizer.get_vocab_size() == vocab_size
        assert tokenizer.decode(tokenizer.encode("Größe 世界").ids) == "Größe 世界"
    tiny = synthesize("tiny", tmp_path / "tiny", layers=1).folder
    for file in files.values():
        assert (tiny / file).read_bytes() == (CHECKPOINT / file).read_bytes()


def test_prompts_have_the_template_of_a_byte_tokenizer_and_text_of_clients_has_not(tmp_path: Path) -> None:
    """The talker's prompt of a checkpoint's own tokenizer has the same special tokens in the same order."""
    (tmp_path / "tokenizer.json").write_text(
        byte_tokenizer(512, discover()["talker"].tokenizer.byte_fallback)
    )
    prompts = []
    for source in (tmp_path, CHECKPOINT / "talker/llm"):
        tokenizer = TextTokenizer.from_file(source)
        built = SpeechPromptBuilder(tokenizer).build(
            "a<|im_end|><audio>", num_speakers=1, transcript="b", num_prompt_patches=2
        )
        added = {
            token["id"]: token["content"]
            for token in json.loads((source / "tokenizer.json").read_text())["added_tokens"]
        }
        prompts.append([added[token] for token in built.token_ids.tolist() if token in added])
        assert [added[token] for token in built.token_ids[built.patch_rows].tolist()] == ["<audioPatch>"] * 2
    assert prompts[0] == prompts[1] and prompts[0].count("<audio>") == 1


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        synthesize("tiny", tmp_path / name, layers=1, seed=seed)
    assert _hashes(tmp_path / "a") == _hashes(tmp_path / "b") != _hashes(tmp_path / "c")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}


def test_a_full_disk_is_reported_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*words: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(writer, "_write_shard", full)
    with pytest.raises(CheckpointError, match="No space left"):
        synthesize("tiny", tmp_path / "made")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[]", b"{}"])
@pytest.mark.parametrize("layers", [2, None])
def test_a_config_that_cannot_be_read_is_named_where_the_user_has_it(
    content: bytes, layers: int | None, tmp_path: Path
) -> None:
    """The error names the user's file, not the temporary copy."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config/config.json").write_bytes(content)
    with pytest.raises(CheckpointError) as raised:
        synthesize(str(tmp_path / "config"), tmp_path / "out", layers=layers)
    assert ".partial" not in str(raised.value)
    assert [path.name for path in tmp_path.iterdir()] == ["config"]


def test_an_output_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    """mingc reported this as a bug of mingc."""
    (tmp_path / "file").touch()
    for parent in (tmp_path / "file", Path("/proc")):
        with pytest.raises(ConfigError, match="cannot create a folder next to"):
            synthesize("tiny", parent / "out", layers=1)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
