"""Sixteen mixed requests through the talker's worker: speech depends only on its own request (on the CPU)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import speech_isolation
import torch
from mingc_command import PARTLY
from speech_isolation import ArrivalPattern, Waves

from mingc.artifacts.artifact import open_artifact
from mingc.export.plan import plan_export
from mingc.export.recipe import ExportRecipe
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker

# GEMMs of another batch size sum in another order, so float32 rounds differently.
TOLERANCE = 2e-4
LARGEST = 8


@pytest.fixture(scope="module")
def segments(compiled_artifact: Path) -> list[SpeechSegment]:
    return speech_isolation.make_segments(open_artifact(compiled_artifact))


@pytest.fixture(scope="module")
def worker(compiled_artifact: Path) -> TalkerWorker:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PARTLY))
        return speech_isolation.open_worker(open_artifact(compiled_artifact), torch.device("cpu"))


@pytest.fixture(scope="module")
def alone(worker: TalkerWorker, segments: list[SpeechSegment]) -> Waves:
    """Each request alone in the largest bucket; the other rows are padding."""
    with speech_isolation.only_bucket(worker, LARGEST):
        return speech_isolation.speak_alone(worker, segments)


def test_an_export_takes_the_configs_of_the_gpu_test(tmp_path: Path) -> None:
    configs = tmp_path / "configs"
    speech_isolation.write_configs(configs)
    recipe = ExportRecipe(
        checkpoint=configs, output=tmp_path / "artifact", stages=speech_isolation.STAGES, synthetic=True
    )
    assert {graph.stage for graph in plan_export(recipe).graphs} == {*speech_isolation.STAGES}


def test_the_requests_differ_and_are_audible(alone: Waves) -> None:
    assert len({wave[0].tobytes() for wave in alone}) == speech_isolation.NUM_REQUESTS == len(alone)
    assert {len(wave) for wave in alone} == {2, 3, 4, 5, 6}
    assert min(np.abs(wave[0]).max() for wave in alone) > 1e-3


@pytest.mark.parametrize("pattern", speech_isolation.arrival_patterns(), ids=lambda each: each.name)
def test_in_one_bucket_speech_is_bit_identical_to_speech_alone(
    worker: TalkerWorker, segments: list[SpeechSegment], alone: Waves, pattern: ArrivalPattern
) -> None:
    with speech_isolation.only_bucket(worker, LARGEST):
        waves = speech_isolation.speak(worker, segments, pattern)
    _first, whole, equal = speech_isolation.compare(waves, alone)
    assert (whole, equal) == (0.0, speech_isolation.NUM_REQUESTS)


@pytest.mark.parametrize("pattern", speech_isolation.arrival_patterns(), ids=lambda each: each.name)
def test_in_fitting_buckets_it_differs_by_rounding_only(
    worker: TalkerWorker, segments: list[SpeechSegment], alone: Waves, pattern: ArrivalPattern
) -> None:
    waves = speech_isolation.speak(worker, segments, pattern)
    assert speech_isolation.compare(waves, alone)[1] <= TOLERANCE
