"""What an export leaves behind, that it proves itself, and how bad checkpoints and artifacts are refused."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from eager_export import copy_of
from golden_checks import SERVED, check_goldens
from manifest_edit import edit_manifest, read_document
from mingc_command import CHECKPOINT, PARTLY, mingc, mingc_here
from parameter_table import tiny_parameters
from safetensors.torch import load_file, save_file

STAGES = {"vision_encoder", "audio_encoder", "thinker", "talker", "cfm", "audio_vae"}


def test_the_artifact_holds_every_stage_with_its_goldens(compiled_artifact: Path) -> None:
    manifest = json.loads((compiled_artifact / "manifest.json").read_text(encoding="utf-8"))
    assert set(manifest["stages"]) == STAGES
    assert manifest["parameters"] == {name: tiny_parameters()[name] for name in STAGES}
    graphs = [graph for stage in manifest["stages"].values() for graph in stage["graphs"].values()]
    assert all((compiled_artifact / graph["golden"]).is_file() for graph in graphs)
    assert all(graph["parity"]["compiled"] < 1e-4 for graph in graphs)
    files = {
        path.relative_to(compiled_artifact).as_posix()
        for path in compiled_artifact.rglob("*")
        if path.is_file()
    }
    assert files == set(manifest["files"]) | {"manifest.json"}
    assert {voice["name"] for voice in manifest["voices"]} == {"DB30", "lingguang"}


def test_every_golden_is_met(compiled_artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PARTLY))
    check_goldens(compiled_artifact, ways=SERVED[:1])


def _cut_shard(root: Path) -> None:
    shard = root / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])


def _remove_shard(root: Path) -> None:
    (root / "model-00003-of-00003.safetensors").unlink()


def _misshape_and_add(root: Path) -> None:
    path = root / "talker" / "model.safetensors"
    tensors = load_file(path)
    tensors["stop_head.bias"] = tensors["stop_head.bias"].repeat(2)
    tensors["surplus.weight"] = tensors.pop("spk_head.bias")
    save_file(tensors, path)


def _no_talker_config(root: Path) -> None:
    (root / "talker" / "llm" / "config.json").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_cut_shard, ["model-00002-of-00003.safetensors", "truncated"]),
        (_remove_shard, ["model-00003-of-00003.safetensors", "missing"]),
        (
            _misshape_and_add,
            ["misshaped: talker: stop_head.bias", "missing: talker: spk_head.bias", "surplus.weight"],
        ),
        (_no_talker_config, ["config.json", "talker"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_bad_checkpoint_is_refused_with_everything_that_is_wrong(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    root = tmp_path / "checkpoint"
    shutil.copytree(CHECKPOINT, root)
    damage(root)
    done = mingc_here("export", root, "--output", tmp_path / "out")
    assert done.code == 1
    assert all(word in done.stderr for word in words), done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [root], "nothing is left behind"


def test_a_missing_checkpoint_is_named(tmp_path: Path) -> None:
    done = mingc_here("export", tmp_path / "nowhere", "--output", tmp_path / "out", "--json")
    assert done.code == 1
    assert "nowhere" in done.document["error"]["message"]


def _change_one_byte(root: Path) -> str:
    path = next((root / "weights" / "cfm").iterdir())
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    return "sha256"


def _other_torch(root: Path) -> str:
    edit_manifest(root, lambda manifest: manifest["fingerprint"].update(torch="2.10.0", capability="AVX9"))
    return "2.10.0"


def _other_guidance(root: Path) -> str:
    document = read_document(root)
    document["parameters"]["cfm"]["guidance"] = 1.0
    (root / "manifest.json").write_text(json.dumps(document), encoding="utf-8")
    return "manifest.json is not as exported"


def _other_schema(root: Path) -> str:
    edit_manifest(root, lambda manifest: manifest.update(schema=99))
    return "schema 99"


@pytest.mark.parametrize(
    ("command", "damage"),
    [
        ("serve", _change_one_byte),
        *(("verify", each) for each in (_change_one_byte, _other_torch, _other_guidance, _other_schema)),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_bad_artifact_is_refused(
    eager_artifact: Path, tmp_path: Path, damage: Callable[[Path], str], command: str
) -> None:
    root = copy_of(eager_artifact, tmp_path)
    word = damage(root)
    done = mingc("serve", root, "--port", 0) if command == "serve" else mingc_here("verify", root)
    assert done.code in (1, 3)
    assert word in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


def test_all_differences_of_a_fingerprint_are_reported_together(eager_artifact: Path, tmp_path: Path) -> None:
    root = copy_of(eager_artifact, tmp_path)
    _other_torch(root)
    done = mingc_here("verify", root)
    assert "2.10.0" in done.stderr and "AVX9" in done.stderr


def test_a_port_in_use_is_reported_before_anything_is_loaded(eager_artifact: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = mingc_here("serve", eager_artifact, "--port", taken.getsockname()[1])
    assert done.code == 2
    assert "in use" in done.stderr and "--port" in done.stderr


def test_an_artifact_is_not_overwritten_unasked(eager_artifact: Path, tmp_path: Path) -> None:
    done = mingc_here("export", CHECKPOINT, "--output", copy_of(eager_artifact, tmp_path))
    assert done.code == 2
    assert "--force" in done.stderr
