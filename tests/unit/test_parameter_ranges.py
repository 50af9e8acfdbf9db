"""Parameters of a manifest that cannot be: not finite, of the wrong sign, out of order."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fake_talker import FLOW, TALKER, VAE
from manifest_edit import edit_manifest
from preprocess_data import audio_parameters, thinker_parameters, vision_parameters

from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import read_manifest
from mingc.artifacts.parameters import (
    TalkerParameters,
    VisionParameters,
)
from mingc.errors import ArtifactError, ManifestError


@dataclass(frozen=True)
class Denoiser:
    """Parameters of a stage from outside the package; no range rules apply to them."""

    strength: int
    bands: tuple[int, ...]


THINKER, VISION, AUDIO = thinker_parameters(), vision_parameters(), audio_parameters()


def write_parameters(root: Path, stage: str, parameters: object, **changed: object) -> None:
    def write(document: dict[str, Any]) -> None:
        if stage not in document["stages"]:
            document["stages"][stage] = document["stages"]["audio_encoder"]
            document["graph"]["nodes"].append({"name": stage, "policy": "once"})
        document["parameters"][stage] = {**encode(parameters), **changed}

    edit_manifest(root, write)


@pytest.mark.parametrize(
    "stage, parameters, changed, says",
    [
        ("talker", TALKER, {"stop_threshold": float("nan")}, "expected a finite number, found nan"),
        ("talker", TALKER, {"stop_threshold": 1.5}, r"talker.stop_threshold is 1.5, expected a probability"),
        ("talker", TALKER, {"hidden_size": -64}, r"talker.hidden_size is -64, expected more than 0"),
        ("talker", TALKER, {"min_stop_step": 10**6}, "min_stop_step is 1000000, more than max_steps"),
        ("cfm", FLOW, {"guidance": float("inf")}, "expected a finite number, found inf"),
        ("cfm", FLOW, {"temperature": -1}, "temperature is -1.0, expected 0 or more"),
        ("cfm", FLOW, {"num_steps": 0}, "num_steps is 0, expected more than 0"),
        ("thinker", THINKER, {"image_patch_token": 10**6}, "beyond a vocabulary of"),
        ("thinker", THINKER, {"stop_token_ids": [1, -2]}, "stop_token_ids is -2, expected 0 or more"),
        (
            "thinker",
            THINKER,
            {"thinking_suffix": "{mode}"},
            "thinking_suffix has other placeholders than {state}",
        ),
        (
            "thinker",
            THINKER,
            {"thinking_suffix": "{state:9999999999}"},
            "thinking_suffix has other placeholders than {state}",
        ),
        ("thinker", THINKER, {"thinking_suffix": "{state"}, "thinking_suffix is not a format string"),
        (
            "audio_encoder",
            AUDIO,
            {"hop_samples": -1},
            "audio_encoder.hop_samples is -1, expected more than 0",
        ),
        ("audio_vae", VAE, {"tail_samples": -1}, "audio_vae.tail_samples is -1, expected 0 or more"),
        ("vision_encoder", VISION, {"image_std": [1.0, 0.0, 1.0]}, "image_std is 0.0, expected more than 0"),
        ("vision_encoder", VISION, {"min_pixels": 10**9}, "min_pixels is 1000000000, more than max_pixels"),
    ],
)
def test_parameters_that_cannot_be_are_refused(
    stage: str, parameters: object, changed: dict[str, object], says: str, artifact_path: Path
) -> None:
    write_parameters(artifact_path, stage, parameters)
    assert read_manifest(artifact_path).parameters_of(stage, type(parameters)) == parameters
    write_parameters(artifact_path, stage, parameters, **changed)
    with pytest.raises(ManifestError) as caught:
        read_manifest(artifact_path)
    assert says in str(caught.value)


@pytest.mark.parametrize("name", ["stop_token_ids", "image_patch_token", "audio_end_token"])
def test_a_token_is_below_the_size_of_the_vocabulary(name: str, artifact_path: Path) -> None:
    for token, fits in ((THINKER.vocab_size - 1, True), (THINKER.vocab_size, False)):
        value = [token] if name == "stop_token_ids" else token
        write_parameters(artifact_path, "thinker", THINKER, **{name: value})
        if fits:
            read_manifest(artifact_path)
        else:
            with pytest.raises(ManifestError, match=f"{name} is {token}, beyond a vocabulary of {token}"):
                read_manifest(artifact_path)


@pytest.mark.parametrize("values", [[0.5, 0.5], [0.5, 0.5, 0.5, 0.5]])
def test_a_mean_has_one_value_a_channel(values: list[float], artifact_path: Path) -> None:
    write_parameters(artifact_path, "vision_encoder", VISION, image_mean=values)
    with pytest.raises(ManifestError, match=f"expected 3 items, found {len(values)}"):
        read_manifest(artifact_path)


def test_all_parameters_that_cannot_be_are_reported_together(artifact_path: Path) -> None:
    write_parameters(artifact_path, "talker", TALKER, hidden_size=0, vocab_size=-1)
    with pytest.raises(ManifestError, match=r"hidden_size is 0(?s:.*)vocab_size is -1"):
        read_manifest(artifact_path)


def test_parameters_of_another_stage_are_kept_as_data(artifact_path: Path) -> None:
    write_parameters(artifact_path, "denoiser", {"strength": -3, "bands": [1, 2]})
    manifest = read_manifest(artifact_path)
    assert manifest.parameters["denoiser"] == {"strength": -3, "bands": [1, 2]}
    assert manifest.parameters_of("denoiser", Denoiser) == Denoiser(strength=-3, bands=(1, 2))
    assert manifest.find_parameters("talker", TalkerParameters) is None
    with pytest.raises(ArtifactError, match="no parameters of talker"):
        manifest.parameters_of("talker", TalkerParameters)
    write_parameters(artifact_path, "denoiser", {"bands": [1.0, float("nan")]})
    with pytest.raises(ManifestError, match="expected a finite number, found nan") as caught:
        read_manifest(artifact_path)
    assert str(caught.value.where).endswith(": $.parameters.denoiser.bands[1]")


def test_constants_that_no_checkpoint_carries_are_those_of_the_specification() -> None:
    """docs/model: vision.md §1 for the size of images, talker.md §5 for the cap of a segment by its text."""
    defaults = {
        (kind, field.name): field.default
        for kind in (VisionParameters, TalkerParameters)
        for field in dataclasses.fields(kind)
        if field.default is not dataclasses.MISSING
    }
    assert defaults == {
        (VisionParameters, "load_factor"): 32,
        (VisionParameters, "load_min_pixels"): 4096,
        (VisionParameters, "load_max_pixels"): 16_777_216,
        (TalkerParameters, "cap_seconds_per_character"): 0.363625,
        (TalkerParameters, "cap_min_seconds"): 2.0,
    }
