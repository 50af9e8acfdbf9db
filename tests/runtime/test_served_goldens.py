"""Recorded prompts and speech through the loops of a server, alone and together: what the official modules computed.

The engines are those of `eager_artifact`; noise and embeddings are recorded, everything between them is the server's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collector import Collector
from numpy.typing import NDArray
from safetensors.numpy import load_file

from mingc.artifacts.artifact import open_artifact
from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.runtime.engines.stage_loader import load_stage
from mingc.runtime.prompt import AUDIO, VISION, ThinkerPrompt
from mingc.runtime.request import SamplingParams
from mingc.runtime.request_stream import TokenItem
from mingc.runtime.service.builder import EngineOptions, open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.talker.worker import Patch, SpeechSegment, TalkerWorker
from mingc.runtime.thinker.loop import ThinkerLoop
from mingc.runtime.thinker.worker import StepOptions

DATA = Path(__file__).parents[1] / "data"
THINKER = load_file(DATA / "thinker.safetensors")
TALKER = load_file(DATA / "talker.safetensors")
CASES = ("text", "image", "audio", "mixed", "video")
LOOPS = ("plain", "sde", "clone")
CPU = torch.device("cpu")
Floats = NDArray[np.float32]


def thinker_prompt(case: str) -> ThinkerPrompt:
    """The recorded tokens, positions and embeddings of a case."""
    ids = THINKER[f"{case}.input_ids"][0]
    kinds = np.zeros(len(ids), np.int64)
    for name, kind in (("image_mask", VISION), ("audio_mask", AUDIO)):
        if f"{case}.{name}" in THINKER:
            kinds[THINKER[f"{case}.{name}"][0]] = kind
    media = THINKER[f"{case}.inputs_embeds"][0][kinds > 0]
    return ThinkerPrompt(
        input_ids=ids,
        positions=THINKER[f"{case}.position_ids"][:, 0],
        rope_delta=int(THINKER[f"{case}.rope_deltas"][0]),
        embed_kind=kinds,
        media_embeds=torch.from_numpy(media) if len(media) else None,
    )


def submit(loop: ThinkerLoop, case: str, **options: Any) -> Collector:
    collector = Collector()
    count = THINKER[f"{case}.greedy_ids"].shape[1]
    sampling = SamplingParams(max_tokens=count, ignore_eos=True, **options)
    loop.submit(thinker_prompt(case), sampling, 1, collector.put, records_logits=True)
    return collector


def check_answer(case: str, collector: Collector) -> None:
    assert collector.tokens() == THINKER[f"{case}.greedy_ids"][0].tolist(), case
    logits = np.stack([item.logits for item in collector.items if isinstance(item, TokenItem)])
    np.testing.assert_allclose(logits, THINKER[f"{case}.greedy_logits"][0], atol=1e-3, err_msg=case)


STEPS = {
    "host sampling": StepOptions(),
    "device sampling": StepOptions(is_static=True),
    "short chunks": StepOptions(max_chunk=1, max_prompts=4),
    "overlapped chunks": StepOptions(is_static=True, max_chunk=1, two_batch_overlap=True),
}


@pytest.fixture(scope="module", params=STEPS, ids=STEPS.keys())
def service(eager_artifact: Path, request: pytest.FixtureRequest) -> Iterator[OmniService]:
    opened = open_service(eager_artifact, EngineOptions(max_total_tokens=2048, steps=STEPS[request.param]))
    yield opened
    asyncio.run(opened.close(shutdown_timeout_s=1.0))


def thinker_loop(service: OmniService) -> ThinkerLoop:
    assert service._chat is not None
    return service._chat.loop


def test_every_prompt_is_answered_as_recorded(service: OmniService) -> None:
    """One after the other, then all of them twice at once: neighbours and their media have no influence."""
    loop = thinker_loop(service)
    for case in CASES:
        check_answer(case, submit(loop, case))
    together = [(case, submit(loop, case)) for case in (*CASES, *reversed(CASES))]
    for case, collector in together:
        check_answer(case, collector)


def test_a_request_in_a_used_slot_has_its_own_repetition_penalty(service: OmniService) -> None:
    """The tokens of the prompt and of the answer count, those of the slot's earlier requests do not."""
    loop = thinker_loop(service)
    first = submit(loop, "text", repetition_penalty=1.3).tokens()
    expected = penalized_greedy("text", 1.3)
    assert first[: len(expected)] == expected
    submit(loop, "video", repetition_penalty=1.3).tokens()
    assert submit(loop, "text", repetition_penalty=1.3).tokens() == first


def penalized_greedy(case: str, penalty: float) -> list[int]:
    """The answer by the recorded logits, as far as it is the recorded one."""
    seen = set(THINKER[f"{case}.input_ids"][0].tolist())
    tokens: list[int] = []
    for logits, recorded in zip(
        THINKER[f"{case}.greedy_logits"][0], THINKER[f"{case}.greedy_ids"][0], strict=True
    ):
        row = logits.copy()
        for token in seen:
            row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        tokens.append(int(row.argmax()))
        if tokens[-1] != recorded:
            break
        seen.add(tokens[-1])
    return tokens


@dataclass(frozen=True)
class RecordedNoise:
    """The noise of a recorded loop, as of its segment 0."""

    case: str

    def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        assert segment == 0
        noise: Floats = TALKER[f"{self.case}.y0"][patch, 0]
        assert noise.shape == shape
        return noise

    def diffusion(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        assert segment == 0
        noise: Floats = TALKER[f"{self.case}.sde_rnd"][patch, :, 0]
        assert noise.shape == shape
        return noise


def recorded_segment(name: str) -> SpeechSegment:
    """The recorded prompt embeddings and arguments of a loop; a part of the prompt is a prefix."""
    case = f"loop.{name}"
    embeds = TALKER[f"{case}.inputs_embeds"][0]
    guidance, sigma, temperature = map(float, TALKER[f"{case}.sde_args"])
    return SpeechSegment(
        input_ids=np.zeros(len(embeds), np.int64),
        embed_rows=np.arange(len(embeds)),
        embeds=embeds,
        num_prefix=40,
        history=TALKER[f"{case}.first_history"][0],
        noise=RecordedNoise(case),
        index=0,
        max_patches=len(TALKER[f"{case}.y0"]),
        guidance=guidance,
        sigma=sigma,
        temperature=temperature,
    )


@pytest.fixture(scope="module", params=[1, 2], ids=["one patch in flight", "two"])
def worker(eager_artifact: Path, request: pytest.FixtureRequest) -> TalkerWorker:
    artifact = open_artifact(eager_artifact)
    stages = [load_stage(artifact, name, CPU) for name in ("talker", "cfm", "audio_vae")]
    return TalkerWorker(
        *stages,
        parameters=artifact.manifest.parameters_of("talker", TalkerParameters),
        flow=artifact.manifest.parameters_of("cfm", CfmParameters),
        vae=artifact.manifest.parameters_of("audio_vae", VaeParameters),
        num_slots=5,
        device=CPU,
        depth=request.param,
    )


def speak(worker: TalkerWorker, segments: dict[int, SpeechSegment]) -> dict[int, list[Patch]]:
    """All patches of each slot's segment. They start one patch after the other."""
    waiting = list(segments.items())
    patches: dict[int, list[Patch]] = {slot: [] for slot in segments}
    running: list[int] = []
    while waiting or running or worker.num_in_flight:
        if waiting:
            slot, segment = waiting.pop(0)
            worker.add(slot, segment)
            running.append(slot)
        ready = [slot for slot in running if worker.is_launchable(slot)]
        if ready:
            worker.launch(ready)
        if worker.num_in_flight == worker.depth or not ready:
            for slot, patch in worker.collect().items():
                patches[slot].append(patch)
                if patch.is_last:
                    running.remove(slot)
                    worker.remove(slot)
    return patches


def check_speech(name: str, patches: list[Patch], worker: TalkerWorker) -> None:
    case = f"loop.{name}"
    ended = TALKER[f"{case}.ended"]
    count = int(ended.argmax()) + 1 if ended.any() else len(ended)
    assert [patch.is_last for patch in patches] == [False] * (count - 1) + [True], name
    assert patches[-1].is_capped is not bool(ended.any())
    latents = np.stack([patch.latents for patch in patches])
    np.testing.assert_allclose(latents, TALKER[f"{case}.gen_lat"][:count, 0], atol=2e-4, err_msg=name)
    stop = [patch.stop_probability for patch in patches]
    np.testing.assert_allclose(stop, TALKER[f"{case}.stop_prob"][:count, 1], atol=1e-4, err_msg=name)
    assert sum(len(patch.samples) for patch in patches) == count * worker.samples_per_patch


def test_recorded_loops_are_spoken_as_recorded(worker: TalkerWorker) -> None:
    """Each alone and then all at once with a further copy of one, in slots that have been used."""
    alone = {name: speak(worker, {1: recorded_segment(name)})[1] for name in LOOPS}
    for name, patches in alone.items():
        check_speech(name, patches, worker)
    slots = dict(zip((3, 1, 4, 2), (*LOOPS, "plain"), strict=True))
    together = speak(worker, {slot: recorded_segment(name) for slot, name in slots.items()})
    for slot, name in slots.items():
        check_speech(name, together[slot], worker)
        whole, again = (
            np.concatenate([each.samples for each in run]) for run in (alone[name], together[slot])
        )
        np.testing.assert_allclose(again, whole, atol=1e-4, err_msg=name)
