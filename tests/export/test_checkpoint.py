"""A checkpoint on disk: what opening it checks, and what its fingerprint depends on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from safetensors.torch import load_file as torch_file
from safetensors.torch import save_file as save_torch

from mingc.errors import CheckpointError
from mingc.export.checkpoint import open_checkpoint, open_configs

_TINY = Path(__file__).parents[1] / "data" / "tiny-ming"
_VAE = Path("talker", "vae")
_INDEX = "model.safetensors.index.json"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return Path(shutil.copytree(_TINY, tmp_path / "tiny"))


def vae_file(root: Path) -> Path:
    (file,) = (root / _VAE).glob("*.safetensors")
    return file


def test_tensors_are_those_of_the_library(root: Path) -> None:
    checkpoint = open_checkpoint(root)
    assert checkpoint.vae is not None and checkpoint.talker is not None and not checkpoint.notes
    recorded = load_file(vae_file(root))
    assert checkpoint.vae.tensors.keys() == recorded.keys()
    for name, value in recorded.items():
        assert checkpoint.vae.tensors[name].shape == value.shape
        assert np.array_equal(checkpoint.vae.read(name).to(torch.float32).numpy(), value.astype(np.float32))
    with pytest.raises(CheckpointError, match="tensor nowhere is missing") as caught:
        checkpoint.vae.read("nowhere")
    assert str(root / _VAE) in str(caught.value.where)


def truncate(root: Path) -> None:
    data = vae_file(root).read_bytes()
    vae_file(root).write_bytes(data[:-1])


def append(root: Path) -> None:
    with vae_file(root).open("ab") as file:
        file.write(b"x")


def cut_header(root: Path) -> None:
    vae_file(root).write_bytes(vae_file(root).read_bytes()[:100])


def empty(root: Path) -> None:
    vae_file(root).write_bytes(b"")


def remove(root: Path) -> None:
    vae_file(root).unlink()


def announce_more(root: Path) -> None:
    index = json.loads((root / _INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["more"] = next(iter(index["weight_map"].values()))
    (root / _INDEX).write_text(json.dumps(index), encoding="utf-8")


def spoil_config(root: Path) -> None:
    (root / "talker" / "config.json").write_text("{", encoding="utf-8")


def list_config(root: Path) -> None:
    (root / "talker" / "config.json").write_text("[]", encoding="utf-8")


def point(root: Path) -> None:
    vae_file(root).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n")


def point_config(root: Path) -> None:
    (root / "talker" / "config.json").write_bytes(
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
    )


def lose_index(root: Path) -> None:
    (root / _INDEX).unlink()


def empty_index(root: Path) -> None:
    (root / _INDEX).write_text('{"metadata": {}}', encoding="utf-8")


def rename_format(root: Path) -> None:
    vae_file(root).rename(root / _VAE / "pytorch_model.bin")


def list_header(root: Path) -> None:
    vae_file(root).write_bytes((2).to_bytes(8, "little") + b"[]")


def lose_config(root: Path) -> None:
    (root / "config.json").unlink()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (truncate, "truncated: "),
        (append, "truncated: "),
        (cut_header, "cut off in its header"),
        (empty, "cut off in its header"),
        (remove, "file is missing"),
        (announce_more, "tensor more of the index is not in the file"),
        (spoil_config, "not readable as JSON"),
        (list_config, "holds list, expected a JSON object"),
        (lose_config, "config.json: file is missing"),
        (point, "is a Git LFS pointer, not the file: run `git lfs pull`"),
        (point_config, "is a Git LFS pointer, not the file: run `git lfs pull`"),
        (
            lose_index,
            "3 shards, such as model-00001-of-00003.safetensors, but no model.safetensors.index.json",
        ),
        (empty_index, "has no `weight_map`"),
        (rename_format, "pytorch_model.bin is not read: pass the checkpoint as safetensors"),
        (list_header, "header is not one of tensors"),
    ],
)
def test_a_broken_file_is_found_when_opened(change: Callable[[Path], None], says: str, root: Path) -> None:
    change(root)
    with pytest.raises(CheckpointError, match="1 problem") as caught:
        open_checkpoint(root)
    assert says in caught.value.message and caught.value.where == str(root)


def test_the_folders_of_image_generation_are_parts(image_checkpoint: Path) -> None:
    """Two shards of diffusers, a config without weights, and a folder that is called `vae` as the one of speech is."""
    parts = open_checkpoint(image_checkpoint).parts
    assert [*parts][3:] == ["mlp", "connector", "byt5", "transformer", "scheduler", "image_vae"]
    folder = image_checkpoint / "transformer"
    shards = {file: torch_file(file) for file in folder.glob("*.safetensors")}
    assert len(shards) == 2
    recorded = {name: (file, value) for file, values in shards.items() for name, value in values.items()}
    assert parts["transformer"].tensors.keys() == recorded.keys()
    for name, (file, value) in recorded.items():
        assert parts["transformer"].tensors[name].file == file
        assert torch.equal(parts["transformer"].read(name), value)
    assert "encoder.conv_in.weight" in parts["image_vae"].tensors and not parts["scheduler"].tensors
    with pytest.raises(CheckpointError, match="shift_terminal is missing") as caught:
        parts["scheduler"].require("shift_terminal")
    assert caught.value.where == str(image_checkpoint / "scheduler" / "scheduler_config.json")


def test_a_lost_shard_or_folder_of_image_generation_is_named(image_checkpoint: Path, tmp_path: Path) -> None:
    root = Path(shutil.copytree(image_checkpoint, tmp_path / "tiny"))
    shutil.rmtree(root / "scheduler")
    checkpoint = open_checkpoint(root)
    assert "scheduler" not in checkpoint.parts and checkpoint.part("connector").tensors
    with pytest.raises(CheckpointError, match="no scheduler/ folder"):
        checkpoint.part("scheduler")
    shard = root / "transformer" / "diffusion_pytorch_model-00002-of-00002.safetensors"
    shard.unlink()
    (root / "connector" / "config.json").unlink()
    with pytest.raises(CheckpointError, match="2 problem") as caught:
        open_checkpoint(root)
    assert f"transformer/{shard.name}: file is missing" in caught.value.message
    assert "connector" in caught.value.message


def test_all_broken_files_are_named_at_once(root: Path) -> None:
    truncate(root)
    spoil_config(root)
    with pytest.raises(CheckpointError, match="2 problem") as caught:
        open_checkpoint(root)
    assert "vae" in caught.value.message and "talker/config.json" in caught.value.message


def test_parts_without_a_folder_are_absent(root: Path) -> None:
    shutil.rmtree(root / _VAE)
    checkpoint = open_checkpoint(root)
    assert checkpoint.talker is not None and checkpoint.vae is None
    shutil.rmtree(root / "talker")
    checkpoint = open_checkpoint(root)
    assert checkpoint.talker is None and any("no speech" in note for note in checkpoint.notes)
    with pytest.raises(CheckpointError, match="is not a folder"):
        open_checkpoint(root / "config.json")


def test_configs_alone_have_no_tensors(root: Path) -> None:
    for file in root.rglob("*.safetensors*"):
        file.unlink()
    checkpoint = open_configs(root)
    assert not checkpoint.main.tensors and checkpoint.main.config == open_configs(_TINY).main.config
    assert checkpoint.main.require("hidden_size", "llm_config") == 64
    with pytest.raises(CheckpointError, match=r"config key llm_config\.nothing is missing"):
        checkpoint.main.require("nothing", "llm_config")


def test_a_fingerprint_depends_on_names_shapes_and_dtypes(root: Path) -> None:
    first = open_checkpoint(root).fingerprint()
    assert open_checkpoint(_TINY).fingerprint() == first, "not on where it lies"
    tensors = load_file(vae_file(root))
    name = next(name for name, value in tensors.items() if value.ndim == 2)
    seen = {first}
    for changed in (
        {**{key: value for key, value in tensors.items() if key != name}, f"{name}_": tensors[name]},
        {**tensors, name: np.ascontiguousarray(tensors[name].T)},
        {**tensors, name: tensors[name].view(np.int32)},
    ):
        save_file(changed, vae_file(root))
        seen.add(open_checkpoint(root).fingerprint())
    assert len(seen) == 4


def replaced_header(file: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """The same bytes under a header that `change` has edited."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


def test_a_fingerprint_depends_on_each_part_and_not_on_the_order_of_keys(root: Path) -> None:
    def fingerprint() -> str:
        return open_checkpoint(root).fingerprint()

    replaced_header(vae_file(root), lambda header: None)  # as the helper spells it
    first = fingerprint()
    for part in (root, root / "talker", root / _VAE):
        path = part / "config.json"
        text = path.read_text(encoding="utf-8")
        config = json.loads(text)
        path.write_text(json.dumps(dict(reversed(config.items()))), encoding="utf-8")
        assert fingerprint() == first
        path.write_text(json.dumps({**config, "another": 1}), encoding="utf-8")
        assert fingerprint() != first
        path.write_text(text, encoding="utf-8")

    def as_integers(header: dict[str, dict[str, object]]) -> None:
        entry = next(each for name, each in sorted(header.items()) if name != "__metadata__")
        names = {"F32": "I32", "BF16": "I16", "F16": "I16"}
        entry["dtype"] = names[str(entry["dtype"])]

    whole = vae_file(root).read_bytes()
    replaced_header(vae_file(root), as_integers)
    assert len(vae_file(root).read_bytes()) == len(whole) and fingerprint() != first
    vae_file(root).write_bytes(whole)
    assert fingerprint() == first
    replaced_header(vae_file(root), lambda header: header.update(__metadata__={"note": "much longer"}))
    assert fingerprint() != first, "the size of a file counts"


def test_a_shard_is_opened_once_until_it_is_closed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors

    opened: list[Path] = []
    real = safetensors.safe_open

    def safe_open(file: Path, *, framework: str) -> object:
        opened.append(file)
        return real(file, framework=framework)

    monkeypatch.setattr(safetensors, "safe_open", safe_open)
    vae = open_checkpoint(root).vae
    assert vae is not None
    first, second, *_ = sorted(vae.tensors)
    kept = vae.read(first)
    vae.read(second), vae.read(first)
    assert opened == [vae_file(root)]
    vae.close()
    assert torch.equal(vae.read(first), kept) and opened == [vae_file(root)] * 2


@pytest.mark.parametrize("holder", [0, 1])
def test_the_index_selects_the_shard_of_a_tensor(root: Path, holder: int) -> None:
    shards = sorted(root.glob("model-*.safetensors"))[:2]
    for number, shard in enumerate(shards):
        tensors = torch_file(shard)
        save_torch({**tensors, "twice": torch.full((2,), float(number))}, shard)
    with pytest.raises(
        CheckpointError, match=f"tensor twice is in {shards[0].name} too, and not in the index"
    ):
        open_checkpoint(root)
    index = json.loads((root / _INDEX).read_text(encoding="utf-8"))
    index["weight_map"]["twice"] = shards[holder].name
    (root / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert open_checkpoint(root).main.read("twice").tolist() == [holder, holder]
