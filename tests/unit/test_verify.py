"""`verify` without replay: hashes only, and what it refuses."""

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
from mingc.verify.replays.thinker import replay
from mingc.verify.verification import _read_tensors, _replay_file, verify

# An artifact of a thinker, of which nothing is asked.
ENGINES: Any = SimpleNamespace(
    artifact=SimpleNamespace(
        manifest=SimpleNamespace(fingerprint=SimpleNamespace(dtype="float32"), stages={})
    ),
    parameters=SimpleNamespace(thinker=object()),
    has=lambda *stages: True,
)


def test_a_whole_artifact_passes(artifact_path: Path) -> None:
    steps: list[str] = []
    report = verify(artifact_path, replay=False, told=steps.append)
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


def test_goldens_without_replay_make_no_sense(artifact_path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--reference needs the replay"):
        verify(artifact_path, reference=tmp_path, replay=False)


def test_a_folder_that_is_not_there_is_refused_before_anything_is_hashed(artifact_path: Path) -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match="is not a folder"):
        verify(artifact_path, reference=artifact_path / "nowhere", told=steps.append)
    assert steps == []


def test_a_folder_without_goldens_is_refused_before_anything_is_hashed(
    artifact_path: Path, tmp_path: Path
) -> None:
    steps: list[str] = []
    with pytest.raises(ConfigError, match="holds no golden file") as caught:
        verify(artifact_path, reference=tmp_path, told=steps.append)
    assert caught.value.fix is not None and "thinker.safetensors" in caught.value.fix
    assert steps == []


@pytest.mark.parametrize(
    ("read", "content"), [(_read_tensors, b"no tensors"), (read_document, b"{"), (read_document, b"[]")]
)
def test_a_golden_file_that_cannot_be_read_is_told(
    tmp_path: Path, read: Callable[[Path], object], content: bytes
) -> None:
    path = tmp_path / "golden"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="golden cannot be read") as caught:
        read(path)
    assert caught.value.where == "--reference"


@pytest.mark.parametrize("run", [lambda ledger, document: None, lambda ledger, _: replay(ENGINES, ledger)])
def test_a_golden_file_that_holds_nothing_known_fails(
    tmp_path: Path, run: Callable[[ComparisonLog, object], None]
) -> None:
    save_file({"other.values": np.zeros(3, np.float32)}, tmp_path / "thinker.safetensors")
    summary, comparisons, _ = _replay_file(ENGINES, tmp_path, "thinker.safetensors", None, ("thinker",), run)
    assert summary.failed == 1
    assert "thinker.safetensors holds nothing that is replayed" in comparisons[0].note
