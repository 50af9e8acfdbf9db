"""`verify` without replay, refused references, and the silence rule."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mingc.errors import ConfigError, IncompatibleError, IntegrityError
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.golden_documents import read_document
from mingc.verify.replays.thinker.replay import replay
from mingc.verify.verification import _read_tensors, _replay_file, verify

# A thinker artifact without stages.
ENGINES: Any = SimpleNamespace(
    artifact=SimpleNamespace(
        manifest=SimpleNamespace(fingerprint=SimpleNamespace(dtype="float32"), stages={})
    ),
    parameters_of=lambda stage, kind: object(),
    has=lambda *stages: True,
)


def test_an_intact_artifact_passes(artifact_path: Path) -> None:
    steps: list[str] = []
    report = verify(artifact_path, replay=False, progress=steps.append)
    assert report.passed
    assert report.files_hashed == 4
    assert steps == ["hashes"]


def test_a_changed_byte_is_found(artifact_path: Path) -> None:
    path = artifact_path / "weights/audio.bin"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match=r"weights/audio\.bin: sha256 differs"):
        verify(artifact_path, replay=False)


def test_another_torch_is_refused_before_anything_is_loaded(
    artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.__version__", "2.12.0")
    with pytest.raises(IncompatibleError, match=r"torch: built with 2\.13\.0, here 2\.12\.0"):
        verify(artifact_path)


def test_a_reference_without_replay_is_refused(artifact_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reference requires a replay"):
        verify(artifact_path, reference=tmp_path, replay=False)


def test_a_missing_reference_folder_is_refused_before_hashing(artifact_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match="is not a folder"):
        verify(artifact_path, reference=artifact_path / "nowhere", progress=steps.append)
    assert steps == []


def test_a_reference_folder_without_goldens_is_refused_before_hashing(
    artifact_path: Path, tmp_path: Path
) -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match="holds no golden file") as caught:
        verify(artifact_path, reference=tmp_path, progress=steps.append)
    assert caught.value.fix is not None and "thinker.safetensors" in caught.value.fix
    assert steps == []


@pytest.mark.parametrize(
    ("read", "content"), [(_read_tensors, b"no tensors"), (read_document, b"{"), (read_document, b"[]")]
)
def test_an_unreadable_golden_file_is_reported(
    tmp_path: Path, read: Callable[[Path], object], content: bytes
) -> None:
    path = tmp_path / "golden"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="golden cannot be read") as caught:
        read(path)
    assert caught.value.where == "--reference"


@pytest.mark.parametrize("run", [lambda log, document: None, lambda log, _: replay(ENGINES, log)])
def test_a_golden_file_without_known_values_fails(
    tmp_path: Path, run: Callable[[ComparisonLog, object], None]
) -> None:
    save_file({"other.values": np.zeros(3, np.float32)}, tmp_path / "thinker.safetensors")
    summary, comparisons, _ = _replay_file(ENGINES, tmp_path, "thinker.safetensors", None, ("thinker",), run)
    assert summary.failed == 1
    assert "thinker.safetensors holds no value that verify can replay" in comparisons[0].note
