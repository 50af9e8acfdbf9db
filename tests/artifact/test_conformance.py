"""Every row of `python -m conformance` compares: with other reference values all of them fail.

The reference of each compared value is changed, one file at a time in a copy of the golden set, and inputs stay.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from manifest_edit import edit_manifest
from mingc_command import DATA
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from conformance import check
from conformance.check import check_conformance
from conformance.reference_log import ReferenceLog
from mingc.verify.verification import VerifyReport

# Rows of a float32 artifact with all stages on a CPU, by file.
ROWS = {
    "preprocess.safetensors": 115,
    "vision.safetensors": 8,
    "audio.safetensors": 26,
    "thinker.safetensors": 58,
    "talker.safetensors": 56,
    "vae.safetensors": 33,
    "text.json": 90,
}
# The same of an artifact that draws. The picture of e2e_edit is recorded in its final size.
PICTURE_ROWS = {
    "imagegen/imagegen_dit.safetensors": 13,
    "imagegen/imagegen_vae.safetensors": 5,
    "imagegen/imagegen_loop.safetensors": 40,
}
# Keys of the JSON documents whose values are compared.
_EXPECTED = {
    *(
        "input_ids",
        "position_ids",
        "rope_delta",
        "text_roundtrip",
        "audio_placeholder_loc_lens",
        "ids",
        "decoded",
    ),
    *(
        "decoded_skip_special",
        "timestamps_per_temporal_patch",
        "eos_token_id",
        "image_processor",
        "fetch_image",
    ),
    *("pipeline", "talker_tn", "fragments"),
}
# Rows that depend on no changed value: one run of the engines against another, and values that are inputs as well.
_UNCHANGED = {
    *(f"thinker: decode steps (batch of {size} vs batch 1)" for size in (2, 3, 4, 7, 8)),
    *(f"audio: {case}.audio_feats" for case in ("second_alone", "single", "two_clips")),
    *(f"talker: voice.{voice}.spk_emb_raw" for voice in ("DB30", "lingguang")),
    "talker: loop.clone.first_history",
    *(f"vae: dec.sliding.wav {figure} (streamed in patches)" for figure in ("sample rate", "duration")),
    "vae: dec.stream = dec.offline",
    *(f"vae: dec.stream_{kind} samples" for kind in ("full", "sliding", "sliding_uneven")),
    *(f"vae: dec.stream_{kind}.chunk0.wav" for kind in ("sliding", "sliding_uneven")),  # it has no samples
}
# The reference records a fault or a variant there.
_DIFFERENT = {
    "audio: two_clips.audio_embeds",
    "vae: dec.full.wav",
    *(f"vae: dec.stream_full.chunk{index}.wav" for index in (1, 2, 3)),
    *(f"vae: enc.full_exact.{name}" for name in ("latent", "std")),
}


@pytest.fixture(scope="module")
def logs() -> Iterator[list[ReferenceLog]]:
    """Comparison logs of all files, in the order of their making; what an artifact proves of itself is left out."""
    made: list[ReferenceLog] = []

    class Kept(ReferenceLog):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            made.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "ReferenceLog", Kept)
        patch.setattr(check, "replay_recorded", lambda *_: [])
        yield made


@pytest.fixture(scope="module")
def right(eager_artifact: Path, logs: list[ReferenceLog]) -> VerifyReport:
    return check_conformance(eager_artifact, DATA)


def test_every_recorded_value_is_compared(right: VerifyReport) -> None:
    assert right.passed and {row.file: row.checked for row in right.files if row.checked} == ROWS
    assert {row.name for row in right.comparisons if row.outcome == "expected difference"} == _DIFFERENT


def test_a_batch_larger_than_the_engines_is_not_checked(
    eager_artifact: Path, logs: list[ReferenceLog], tmp_path: Path
) -> None:
    """As after `--batch-sizes 1`: the recorded pair of requests is named, and the requests alone are compared."""
    artifact, reference = tmp_path / "artifact", tmp_path / "reference"
    shutil.copytree(eager_artifact, artifact)
    reference.mkdir()
    tensors = load_file(DATA / "thinker.safetensors")
    kept = {name: value for name, value in tensors.items() if name.startswith(("text.", "batch_left."))}
    save_file(kept, reference / "thinker.safetensors")

    def change(document: dict[str, Any]) -> None:
        for graph in document["stages"]["thinker"]["graphs"].values():
            for dim in graph["spec"]["dims"]:
                if dim["name"] == "B":
                    dim |= {"buckets": [1], "maximum": 1}

    edit_manifest(artifact, change)
    report = check_conformance(artifact, reference)
    assert report.passed and report.checked == 9, "those of the text alone"
    (row,) = [row for row in report.comparisons if row.outcome == "not checked"]
    assert row.name == "thinker: batch_left"
    assert row.note == "records 2 requests in one step; the engines take 1 (--batch-sizes)"


@pytest.mark.exhaustive
def test_a_row_fails_when_its_reference_is_another(
    right: VerifyReport, eager_artifact: Path, logs: list[ReferenceLog], tmp_path: Path
) -> None:
    for log in logs[: len(ROWS)]:
        if log.file.endswith(".safetensors"):
            tensors = dict(load_file(DATA / log.file))
            for name in (log._compared - log._inputs) & tensors.keys():
                tensors[name] = _other(tensors[name])
            save_file(tensors, tmp_path / log.file)
    for document in DATA.glob("*.json"):
        content = _changed(json.loads(document.read_text(encoding="utf-8")), is_expected=False)
        (tmp_path / document.name).write_text(json.dumps(content), encoding="utf-8")
    report = check_conformance(eager_artifact, tmp_path)
    passed = {row.name for row in report.comparisons if row.outcome == "pass"}
    assert passed == _UNCHANGED
    assert {row.name for row in report.comparisons if row.outcome == "expected difference"} <= _DIFFERENT
    assert not report.passed and report.failed > 300


def test_pictures_match_and_a_row_fails_when_its_reference_is_another(
    image_artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forwards, loops as a server runs them, VAE; captions: test_image_condition.py."""
    monkeypatch.setattr(check, "replay_recorded", lambda *_: [])
    files = tuple(file for file in check.GOLDEN_FILES if file.name in PICTURE_ROWS)
    monkeypatch.setattr(check, "GOLDEN_FILES", files)
    right = check_conformance(image_artifact, DATA)
    assert right.passed and {row.file: row.checked for row in right.files} == PICTURE_ROWS
    assert max(row.worst_error for row in right.files) < 1e-5  # times near 1: see test_image_dit.py
    shutil.copytree(DATA / "imagegen", tmp_path / "imagegen", ignore=shutil.ignore_patterns("tiny-ming"))
    outputs = {"out", "image", "noise", "sigmas", "latents", "final_latent", "decoded"}
    for file in PICTURE_ROWS:
        names = outputs | ({"latent"} if file.endswith("vae.safetensors") else set())
        changed = {
            name: _other(value) if name.rpartition(".")[2] in names else value
            for name, value in load_file(DATA / file).items()
        }
        save_file(changed, tmp_path / file)
    wrong = check_conformance(image_artifact, tmp_path)
    assert {row.name for row in wrong.comparisons if row.outcome == "pass"} == set()


def _other(value: NDArray[np.generic]) -> NDArray[np.generic]:
    if value.dtype.kind == "f":
        noise = np.random.default_rng(0).standard_normal(value.shape)
        return np.ascontiguousarray(1.3 * value + 0.2 * np.abs(value).max(initial=1.0) * noise).astype(
            value.dtype
        )
    return np.ascontiguousarray(~value if value.dtype == bool else value + np.ones((), value.dtype))


def _changed(value: Any, *, is_expected: bool) -> Any:
    """`value` with other numbers and texts below the keys of `_EXPECTED`."""
    if isinstance(value, dict):
        return {
            key: _changed(
                each, is_expected=is_expected or key in _EXPECTED or (key == "text" and "stream" in value)
            )
            for key, each in value.items()
        }
    if isinstance(value, list):
        return [_changed(each, is_expected=is_expected) for each in value] or (["x"] if is_expected else [])
    if not is_expected or isinstance(value, bool) or value is None:
        return value
    return f"{value}x" if isinstance(value, str) else value + 1
