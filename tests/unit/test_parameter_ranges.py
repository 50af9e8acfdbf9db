"""Parameters of a manifest that cannot be: not finite, of the wrong sign, out of order."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from preprocess_data import thinker_parameters, vision_parameters

from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import FILE_NAME, read_manifest
from mingc.artifacts.parameters import CfmParameters, TalkerParameters
from mingc.errors import ArtifactError, ManifestError


@dataclass(frozen=True)
class Denoiser:
    """Parameters of a stage from outside the package; no range rules apply to them."""

    strength: int
    bands: tuple[int, ...]


THINKER, VISION = thinker_parameters(), vision_parameters()
TALKER = TalkerParameters(
    hidden_size=64,
    num_layers=2,
    vocab_size=512,
    slot_tokens=2048,
    min_stop_step=10,
    max_steps=1000,
    stop_threshold=0.5,
    default_voice=None,
    max_segment_length=50,
)
FLOW = CfmParameters(
    num_steps=10,
    latents_per_patch=4,
    history_latents=32,
    latent_dim=64,
    speaker_dim=192,
    guidance=2.0,
    sigma=0.25,
    temperature=0.0,
)


def write_parameters(root: Path, stage: str, parameters: object, **changed: object) -> None:
    path = root / FILE_NAME
    document = json.loads(path.read_text(encoding="utf-8"))
    document["parameters"][stage] = {**encode(parameters), **changed}
    path.write_text(json.dumps(document), encoding="utf-8")


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
            "thinking_suffix has other placeholders than {state}: KeyError",
        ),
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
    assert caught.value.where == "$.parameters.denoiser.bands[1]"
