"""An artifact whose weights are in several files for each rank: verified, packed, damaged, loaded."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_artifact import record_only
from eager_export import copy_of
from manifest_edit import edit_manifest
from mingc_command import mingc_here
from safetensors.torch import load_file, save_file

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.manifest import read_manifest
from mingc.runtime.engines.stage_loader import load_stage, rank_weight_bytes
from mingc.verify.served import verification as served

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def split(two_rank_artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The artifact of two ranks with each file of weights cut in three, the last one without tensors."""
    artifact = copy_of(two_rank_artifact, tmp_path_factory.mktemp("split"))

    def change(document: dict[str, Any]) -> None:
        for stage in document["stages"].values():
            for files in stage["weights"]:
                [whole] = files
                tensors = load_file(artifact / whole)
                names = sorted(tensors)
                half = len(names) // 2
                files.clear()
                for index, part in enumerate((names[:half], names[half:], ())):
                    path = artifact / f"{whole}.{index}"
                    save_file({name: tensors[name] for name in part}, path)
                    content = path.read_bytes()
                    files.append(f"{whole}.{index}")
                    document["files"][files[-1]] = {
                        "size_bytes": len(content),
                        "sha256": hashlib.sha256(content).hexdigest(),
                    }
                (artifact / whole).unlink()
                del document["files"][whole]

    edit_manifest(artifact, change)
    record_only(artifact, "image", "audio", "spoken chat")
    return artifact


def test_it_is_verified_as_a_folder_and_packed(
    split: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    ways = served.served_options
    monkeypatch.setattr(served, "served_options", lambda *given: dict([*ways(*given).items()][:1]))
    assert mingc_here("bundle", "pack", split, tmp_path / "split.mingc").code == 0
    for path in (split, tmp_path / "split.mingc"):
        done = mingc_here("verify", path)
        assert done.code == 0, done.stderr


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_gets_the_tensors_of_all_its_files(
    rank: int, split: Path, two_rank_artifact: Path
) -> None:
    found, expected = (
        load_stage(open_artifact(path), "thinker", CPU, rank=rank).weights
        for path in (split, two_rank_artifact)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())
    size = rank_weight_bytes(open_artifact(split), "thinker", rank)
    assert size == sum(value.nbytes for value in expected.values())


def test_a_changed_byte_in_any_file_is_found(split: Path, tmp_path: Path) -> None:
    artifact = copy_of(split, tmp_path)
    names = read_manifest(artifact).stages["thinker"].weights_files
    for name in names:
        content = bytearray((artifact / name).read_bytes())
        content[-1] ^= 1
        (artifact / name).write_bytes(content)
    done = mingc_here("verify", artifact, "--no-replay")
    assert done.code == 1 and f"{len(names)} file(s) of the artifact are not as exported" in done.stderr
    assert all(f"- {name}: sha256 differs" in done.stderr for name in names)
