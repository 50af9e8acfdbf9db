"""Two talkers on the engines of a whole artifact: the speech of a request is the same, whichever of them speaks it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_omni import chat, collect, speech_request
from held_resources import wait_until_equal
from mingc_command import ENVIRONMENT

from mingc.artifacts.artifact import open_artifact
from mingc.errors import ConfigError
from mingc.numerics.relative_error import relative_error
from mingc.runtime.request import AudioDelta, Event, SpeechParams, SpeechRequest
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.verify.comparison_log import ComparisonLog
from mingc.verify.served.cases import read_goldens
from mingc.verify.served.replay import ServedReplay

# GEMMs of another batch size sum in another order, so float32 rounds differently.
TOLERANCE = 2e-4
TWO = EngineOptions(talker_devices=("cpu", "cpu"))
REQUESTS = [
    speech_request(
        f"This is sentence number {seed}, it is not long. Here is another one.", seed=seed, max_steps=4 + seed
    )
    for seed in range(8)
]


@contextmanager
def opened(artifact: Path, options: EngineOptions) -> Iterator[tuple[OmniService, Counter[int]]]:
    """A service, and the number of streams that each of its talkers has been given."""
    service = open_service(artifact, options)
    placed: Counter[int] = Counter()
    for index, loop in enumerate(service.talkers):

        def record(*arguments: Any, index: int = index, opened: Any = loop.open, **options: Any) -> int:
            placed[index] += 1
            stream: int = opened(*arguments, **options)
            return stream

        loop.open = record  # type: ignore[method-assign]
    try:
        yield service, placed
    finally:
        asyncio.run(service.close(shutdown_timeout_s=1.0))


def waves(answers: Sequence[Sequence[Event]]) -> list[np.ndarray]:
    return [
        np.concatenate([event.samples for event in events if isinstance(event, AudioDelta)])
        for events in answers
    ]


async def one_by_one(service: OmniService, requests: Sequence[SpeechRequest]) -> list[list[Event]]:
    return [await collect(service.speech(each)) for each in requests]


async def together(service: OmniService, requests: Sequence[SpeechRequest]) -> list[list[Event]]:
    return list(await asyncio.gather(*(collect(service.speech(each)) for each in requests)))


def test_eight_requests_at_once_sound_as_alone(eager_artifact: Path) -> None:
    with opened(eager_artifact, EngineOptions()) as (service, placed):
        alone = waves(asyncio.run(one_by_one(service, REQUESTS)))
        assert placed == {0: 8}
    with opened(eager_artifact, TWO) as (service, placed):
        before = service.held
        found = waves(asyncio.run(together(service, REQUESTS)))
        assert placed == {0: 4, 1: 4}
        # A talker's thread frees the last one after its audio was sent.
        wait_until_equal(before, lambda: service.held)
    assert len({wave.tobytes() for wave in alone}) == 8
    for wave, reference in zip(found, alone, strict=True):
        assert wave.shape == reference.shape and np.abs(reference).max() > 1e-3
        assert relative_error(wave, reference) <= TOLERANCE


def test_recorded_requests_are_answered_as_recorded(eager_artifact: Path) -> None:
    """The reference's text and speech, of requests alone and together."""
    artifact = open_artifact(eager_artifact)
    assert artifact.manifest.served_goldens is not None
    goldens = read_goldens(artifact.path(artifact.manifest.served_goldens))
    goldens = replace(goldens, cases=tuple(case for case in goldens.cases if case.speech is not None))
    log = ComparisonLog("served", goldens.tensors, tolerance=1e-4, is_exact=True)
    with opened(eager_artifact, TWO) as (service, placed):
        asyncio.run(ServedReplay(service, goldens, log).run())
    outcomes = Counter(each.outcome for each in log.comparisons)
    assert outcomes["FAIL"] == 0 and sum(outcomes.values()) > len(goldens.cases)
    assert min(placed[0], placed[1]) > 0, "both have spoken"


def test_memory_is_that_of_the_tensors(eager_artifact: Path) -> None:
    manifest = open_artifact(eager_artifact).manifest
    with opened(eager_artifact, EngineOptions()) as (service, _):
        one = {use.owner: use.num_bytes for use in service.load.memory}
    with opened(eager_artifact, TWO) as (service, _):
        two = {use.owner: use.num_bytes for use in service.load.memory}
    talkers = ("talker_weights", "cfm_weights", "audio_vae_weights", "talker_slots")
    assert {owner for owner in one if owner.endswith("_weights")} == {
        f"{name}_weights" for name in manifest.stages
    }
    for stage, record in manifest.stages.items():
        files = sum(manifest.files[name].size_bytes for name in record.weights_files)
        # A file of weights is its tensors behind a header.
        assert 0.8 * files < one[f"{stage}_weights"] < files, stage
    assert two == {owner: count * (2 if owner in talkers else 1) for owner, count in one.items()}


def test_ranks_of_the_thinker_and_talkers_share_a_service(
    eager_artifact: Path, two_rank_artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The KV heads of two ranks are those of one, so their pages take as much together."""
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])  # of rank 1
    request = chat("Hello", SpeechParams(seed=5, max_steps=6), temperature=0.0, max_tokens=24)
    spoken, memory = [], []
    for artifact, options in ((eager_artifact, EngineOptions()), (two_rank_artifact, TWO)):
        with opened(artifact, replace(options, max_total_tokens=2000)) as (service, _):
            spoken += waves([asyncio.run(collect(service.chat(request)))])
            memory.append({use.owner: use.num_bytes for use in service.load.memory})
            assert service.info.max_total_tokens == 2000
    assert spoken[0].shape == spoken[1].shape and relative_error(spoken[1], spoken[0]) <= TOLERANCE
    one, two = memory
    assert one["kv_pages"] == two["kv_pages"]
    assert one["thinker_weights"] < two["thinker_weights"] < 2 * one["thinker_weights"]


def test_a_gpu_is_no_device_of_an_artifact_for_cpus(eager_artifact: Path) -> None:
    with pytest.raises(ConfigError, match="--talker-device cuda:0: the engines of the artifact run on cpu"):
        open_service(eager_artifact, EngineOptions(talker_devices=("cuda:0",)))
