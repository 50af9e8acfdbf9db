"""Preflight: an artifact that cannot fit is refused before anything is written."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from preprocess_data import CHECKPOINT
from safetensors import safe_open

from mingc.errors import ConfigError
from mingc.export.checkpoint import open_checkpoint
from mingc.export.checks.preflight import check_space
from mingc.export.pipeline import export_artifact
from mingc.export.recipe import ExportRecipe
from mingc.export.stages import find

MIB = 1 << 20


def needed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: int, **options: object) -> None:
    """Check the audio encoder's export, without engines, on a disk with `free` bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free))
    recipe = ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path / "a" / "out", **options)  # type: ignore[arg-type]
    checkpoint, stage = open_checkpoint(CHECKPOINT), find("audio_encoder")
    check_space(recipe, checkpoint, [stage], {stage.name: stage.config(checkpoint)}, 0)


def stored_values() -> int:
    """Values of the audio encoder in the checkpoint's own files."""
    count = 0
    for file in CHECKPOINT.glob("*.safetensors"):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                if name.startswith(("audio.", "linear_proj_audio.")):
                    size = 1
                    for length in tensors.get_slice(name).get_shape():
                        size *= length
                    count += size
    return count


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_space_for_all_weights_is_needed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dtype: str, size: int
) -> None:
    exact = size * stored_values()
    assert exact > 0
    needed(monkeypatch, tmp_path, exact, dtype=dtype)
    with pytest.raises(ConfigError, match=r"needs at least \d+ MiB, .* has \d+ MiB free") as caught:
        needed(monkeypatch, tmp_path, exact - 1, dtype=dtype)
    assert caught.value.where == "--output"


def test_random_weights_need_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    needed(monkeypatch, tmp_path, 0, synthetic=True)


def test_an_export_onto_a_full_disk_ends_before_its_first_step(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=MIB))
    steps: list[object] = []
    recipe = ExportRecipe(checkpoint=CHECKPOINT, output=tmp_path / "out")
    with pytest.raises(ConfigError, match="1 MiB free"):
        export_artifact(recipe, None, steps.append)  # type: ignore[arg-type]
    assert not steps and not list(tmp_path.iterdir())
