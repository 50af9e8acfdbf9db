"""The recorded speech loops through the objects that serve: planner, talker loop and worker, with the recorded noise.

The engines are those of a whole artifact. Latents, stop steps and samples must be the reference's, alone and among
other requests that join and leave.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from collector import Collector
from listeners import Clock, Listener, run_to_end
from numpy.typing import NDArray
from reference_vae import ReferenceVae
from safetensors.numpy import load_file

from mingc.artifacts.artifact import Artifact, open_artifact
from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.numerics.relative_error import relative_error
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.noise import NoiseSource
from mingc.runtime.request import AudioDelta, Done, Event, Recorder, ServiceInfo, SpeechParams, SpeechRequest
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.pipelines import SpeechPipeline
from mingc.runtime.talker.group import TalkerGroup
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import SpeechSegment, TalkerWorker
from mingc.runtime.voices import VoicePack

Floats = NDArray[np.float32]
RecordedPatch = tuple[AudioDelta, Floats, float]  # with latents and stop probability
DATA = Path(__file__).parents[1] / "data"
CPU = torch.device("cpu")
TOLERANCE = 1e-4
CASES = ("plain", "clone", "sde")
GOLDEN = load_file(DATA / "talker.safetensors")
PROMPTS = json.loads((DATA / "talker.json").read_text(encoding="utf-8"))
INFO = ServiceInfo(
    model="tiny",
    sample_rate=0,
    voices=(),
    default_voice=None,
    has_text=False,
    has_image=False,
    has_video=False,
    has_audio_input=False,
    has_speech=True,
)
TRANSCRIPTS = {"DB30": "感谢你的认可。", "lingguang": "诶，你今天有空吗？"}


@dataclass(frozen=True)
class RecordedNoise:
    """The noise of recorded loops: segment k of the request has that of `cases[k]`."""

    cases: tuple[str, ...]

    def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        return self._recorded(f"loop.{self.cases[segment]}.y0", patch, shape)

    def diffusion(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
        return self._recorded(f"loop.{self.cases[segment]}.sde_rnd", patch, shape)

    def _recorded(self, name: str, patch: int, shape: tuple[int, ...]) -> Floats:
        if patch >= len(GOLDEN[name]):  # a surplus patch, launched before the end was known
            return np.full(shape, 9.0, np.float32)
        noise: Floats = GOLDEN[name][patch].reshape(shape)  # the batch dim of 1 goes
        return noise


def golden_voices() -> dict[str, VoicePack]:
    """The recorded voices, and one without a recording."""
    voices = {
        name: VoicePack(
            name=name,
            transcript=transcript,
            latents=GOLDEN[f"voice.{name}.prompt_wav_lat"][0],
            embeds=GOLDEN[f"voice.{name}.prompt_wav_emb"][0],
            speaker=GOLDEN[f"voice.{name}.spk_emb"][0],
        )
        for name, transcript in TRANSCRIPTS.items()
    }
    empty = {"latents": np.zeros((0, 64), np.float32), "embeds": np.zeros((0, 64), np.float32)}
    silent = VoicePack(name="silent", transcript="", speaker=np.zeros(64, np.float32), **empty)
    # Its prompt has the same tokens as DB30's, but other vectors.
    twin = replace(voices["DB30"], name="twin", speaker=voices["lingguang"].speaker)
    return {
        **voices,
        "twin": twin,
        "silent": silent,
        "untold": replace(voices["DB30"], name="untold", transcript=""),
    }


class Speech:
    """The speech half of a service: engines of an artifact, planners with and without voices."""

    def __init__(self, artifact: Artifact) -> None:
        manifest = artifact.manifest
        self.talker = manifest.parameters_of("talker", TalkerParameters)
        self.flow = manifest.parameters_of("cfm", CfmParameters)
        self.vae = manifest.parameters_of("audio_vae", VaeParameters)
        self._stages: list[LoadedStage] = [
            load_stage(artifact, name, CPU) for name in ("talker", "cfm", "audio_vae")
        ]
        self._builder = SpeechPromptBuilder(
            TextTokenizer.from_file(artifact.path(manifest.tokenizers["talker"]))
        )
        self.planner = self._planner(golden_voices(), self.talker)
        self.without_voices = self._planner({}, replace(self.talker, default_voice=None))

    def _planner(self, voices: dict[str, VoicePack], talker: TalkerParameters) -> SpeechPlanner:
        return SpeechPlanner(self._builder, voices, parameters=talker, flow=self.flow, vae=self.vae)

    def plan(
        self, prompt: str, params: SpeechParams, cases: tuple[str, ...] = (), index: int = 0
    ) -> SpeechSegment:
        """The segment of the text of a recorded prompt."""
        planner = self.planner if params.voice else self.without_voices
        return planner.segment(PROMPTS[prompt]["text"], index, params, RecordedNoise(cases))

    def case(self, name: str, *, cases: tuple[str, ...] = (), index: int = 0) -> SpeechSegment:
        """The segment of a recorded loop."""
        if name == "sde":
            guidance, sigma, temperature = (float(value) for value in GOLDEN["loop.sde.sde_args"])
            numbers = {"guidance": guidance, "sigma": sigma, "temperature": temperature}
            return self.plan("plain", SpeechParams(max_steps=8, **numbers), cases or (name,), index)
        voice = "DB30" if name == "clone" else None
        return self.plan(name, SpeechParams(voice=voice), cases or (name,), index)

    def loop(
        self,
        *,
        slots: int = 4,
        depth: int = 1,
        speech_lead: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> TalkerLoop:
        parameters = {"parameters": self.talker, "flow": self.flow, "vae": self.vae}
        worker = TalkerWorker(*self._stages, **parameters, num_slots=slots + 1, device=CPU, depth=depth)
        scheduler = TalkerScheduler(
            SlotPool(slots + 1), max_batch=worker.max_batch, max_prefills_per_patch=2, max_streams=16
        )
        return TalkerLoop(worker, scheduler, speech_lead=speech_lead, clock=clock)


@pytest.fixture(scope="module")
def speech(eager_artifact: Path) -> Speech:
    return Speech(open_artifact(eager_artifact))


@pytest.fixture(scope="module")
def waves() -> dict[str, NDArray[np.float64]]:
    """The whole wave of each recorded loop, decoded at once."""
    vae = ReferenceVae(DATA / "tiny-ming")
    return {case: vae.decode(GOLDEN[f"loop.{case}.gen_lat"].reshape(-1, 64)) for case in CASES}


@pytest.fixture
def started() -> Iterator[Callable[[TalkerLoop], TalkerLoop]]:
    loops: list[TalkerLoop] = []

    def start(loop: TalkerLoop) -> TalkerLoop:
        loops.append(loop)
        loop.start()
        return loop

    yield start
    for loop in loops:
        loop.stop(10.0)


def speak(loop: TalkerLoop, *segments: SpeechSegment) -> tuple[Collector, int]:
    collector = Collector()
    stream = loop.open(collector.put, lambda: False, recorder=collector.recorder)
    for segment in segments:
        loop.add(stream, segment)
    return collector, stream


def spoken(collector: Collector, count: int = 1) -> list[list[RecordedPatch]]:
    """The patches of each of `count` segments, with what was recorded of them."""
    collector.segments(count)
    segments: list[list[RecordedPatch]] = [[]]
    recorder = collector.recorder
    for item, *values in zip(collector.items, recorder.latents, recorder.stop_probabilities, strict=True):
        assert isinstance(item, AudioDelta)
        segments[-1].append((item, *values))
        if item.is_segment_end:
            segments.append([])
    assert segments.pop() == [] and len(segments) == count
    return segments


def check(segment: Sequence[RecordedPatch], case: str, wave: NDArray[np.float64]) -> None:
    """Patches are those of the recorded loop: number, end, stop probabilities, latents, samples."""
    recorded = GOLDEN[f"loop.{case}.gen_lat"][:, 0]
    patches, latents, stops = zip(*segment, strict=True)
    assert len(patches) == len(recorded)
    assert [item.is_segment_end for item in patches] == [False] * (len(recorded) - 1) + [True]
    assert patches[-1].is_capped == (case == "sde")
    assert relative_error(np.stack(latents), recorded) < TOLERANCE
    assert relative_error(np.array(stops), GOLDEN[f"loop.{case}.stop_prob"][:, 1]) < TOLERANCE
    samples = np.concatenate([item.samples for item in patches])
    assert relative_error(samples, wave) < TOLERANCE
    # Not only each value: a client must get the loudness of the reference.
    assert np.sqrt(np.mean(samples**2)) == pytest.approx(np.sqrt(np.mean(wave**2)), rel=1e-5)


def test_paced_speech_is_the_recorded_speech(speech: Speech, waves: dict[str, NDArray[np.float64]]) -> None:
    """All recorded loops for listeners at once, each at the time of its playback."""
    clock = Clock()
    loop = speech.loop(slots=2, speech_lead=2, clock=clock)
    listeners = [Listener(loop, speech.case(case)) for case in CASES]
    assert run_to_end(loop, clock, listeners) > 0.0
    for case, listener in zip(CASES, listeners, strict=True):
        (patches,) = spoken(listener)
        check(patches, case, waves[case])


def test_the_reference_decoder_gives_the_recorded_wave() -> None:
    recorded = load_file(DATA / "vae.safetensors")
    wave = ReferenceVae(DATA / "tiny-ming").decode(recorded["dec.latent"][0])
    assert relative_error(wave, recorded["dec.sliding.wav"][0, 0]) < 1e-5


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ("plain", SpeechParams()),
        ("clone", SpeechParams(voice="DB30")),
        ("spk_only", SpeechParams(voice="untold")),
        (
            "zero_spk_instruction",
            SpeechParams(voice="silent", instructions=PROMPTS["zero_spk_instruction"]["instruction"]),
        ),
    ],
)
def test_planned_prompts_are_the_recorded_ones(speech: Speech, prompt: str, params: SpeechParams) -> None:
    segment = speech.plan(prompt, params)
    assert segment.input_ids.tolist() == GOLDEN[f"prompt.{prompt}.input_ids"][0].tolist()
    embeds = GOLDEN[f"prompt.{prompt}.inputs_embeds"][0]
    decoded = PROMPTS[prompt]["decoded"]
    replaced = decoded.count("<|vision_pad|>") + decoded.count("<audioPatch>")
    assert len(set(segment.embed_rows.tolist())) == replaced == len(segment.embeds)
    assert relative_error(segment.embeds, embeds[segment.embed_rows]) < 1e-6
    assert (segment.guidance, segment.sigma, segment.temperature) == (2.0, 0.25, 0.0)


def test_zero_is_a_value(speech: Speech) -> None:
    segment = speech.plan("plain", SpeechParams(guidance=0.0, sigma=0.0, temperature=0.0))
    assert (segment.guidance, segment.sigma, segment.temperature) == (0.0, 0.0, 0.0)


def test_the_default_voice_speaks_unless_another_is_named(speech: Speech) -> None:
    named, default = (
        speech.planner.segment("Hi.", 0, SpeechParams(voice=voice), RecordedNoise(()))
        for voice in ("DB30", None)
    )
    assert speech.talker.default_voice == "DB30"
    assert named.input_ids.tolist() == default.input_ids.tolist() and len(default.embeds) == 6
    assert np.array_equal(named.embeds, default.embeds)


def test_the_history_begins_with_the_end_of_the_voice(speech: Speech) -> None:
    for case in CASES:
        history = GOLDEN[f"loop.{case}.first_history"][0]
        assert np.array_equal(speech.case(case).history, history), case
    assert speech.case("clone").history.any() and not speech.case("plain").history.any()


@pytest.mark.parametrize("case", CASES)
def test_a_loop_alone(
    speech: Speech,
    waves: dict[str, NDArray[np.float64]],
    started: Callable[[TalkerLoop], TalkerLoop],
    case: str,
) -> None:
    collector, _ = speak(started(speech.loop(slots=1, depth=1)), speech.case(case))
    (patches,) = spoken(collector)
    check(patches, case, waves[case])


def test_loops_that_join_and_leave(
    speech: Speech, waves: dict[str, NDArray[np.float64]], started: Callable[[TalkerLoop], TalkerLoop]
) -> None:
    """Three slots: others wait, take over slots that were used, and one is cancelled while it speaks."""
    loop = started(speech.loop(slots=3, depth=2))
    order = ("plain", "clone", "sde", "clone", "sde", "plain")
    collectors: list[Collector] = []
    cancelled, stream = speak(loop, speech.case("clone"))
    for index, case in enumerate(order):
        collectors.append(speak(loop, speech.case(case))[0])
        if index < 3:
            first = collectors[0]
            first.wait(lambda items, wanted=index + 1: len(items) >= wanted, "patches")
        if index == 2:
            loop.cancel(stream)
    for case, collector in zip(order, collectors, strict=True):
        (patches,) = spoken(collector)
        check(patches, case, waves[case])
    assert 0 < len(cancelled.items) < len(GOLDEN["loop.clone.y0"])


def test_voices_with_equal_prompts_share_no_keys(
    speech: Speech, waves: dict[str, NDArray[np.float64]], started: Callable[[TalkerLoop], TalkerLoop]
) -> None:
    """The talker keeps the keys of prompt prefixes; speaker vectors are part of them."""
    loop = started(speech.loop(slots=1))
    twin = speech.plan("clone", SpeechParams(voice="twin", max_steps=1), ("clone",))
    assert twin.input_ids.tolist() == speech.case("clone").input_ids.tolist()
    for segment in (twin, speech.case("clone")):
        (patches,) = spoken(speak(loop, segment)[0])
    check(patches, "clone", waves["clone"])


def ask(
    speech: Speech,
    request: SpeechRequest,
    noise: NoiseSource,
    max_segment_length: int = 50,
    recorder: Recorder | None = None,
) -> list[Event]:
    """The events of a speech request to a service without voices."""

    async def run() -> list[Event]:
        pipeline = SpeechPipeline(
            planner=speech.without_voices,
            talkers=TalkerGroup([speech.loop()]),
            max_segment_length=max_segment_length,
            speech_text="reference",  # as the recorded texts
        )
        service = OmniService(replace(INFO, sample_rate=speech.vae.sample_rate), chat=None, speech=pipeline)
        try:
            return [event async for event in service.speech(request, noise=noise, recorder=recorder)]
        finally:
            await service.close(shutdown_timeout_s=1.0)

    return asyncio.run(asyncio.wait_for(run(), 60))


@pytest.mark.parametrize(("case", "finish"), [("plain", "stop"), ("sde", "length")])
def test_a_request_to_the_service(
    speech: Speech, waves: dict[str, NDArray[np.float64]], case: str, finish: str
) -> None:
    """From the text of a speech request to its events."""
    segment = speech.case(case)
    params = SpeechParams(
        guidance=segment.guidance,
        sigma=segment.sigma,
        temperature=segment.temperature,
        max_steps=segment.max_patches,
    )
    request = SpeechRequest(request_id="one", text=PROMPTS["plain"]["text"], speech=params)

    recorder = Recorder()
    *deltas, done = ask(speech, request, RecordedNoise((case,)), recorder=recorder)
    recorded = GOLDEN[f"loop.{case}.gen_lat"][:, 0]
    audio = [event for event in deltas if isinstance(event, AudioDelta)]
    assert len(audio) == len(deltas) == len(recorded) and isinstance(done, Done)
    assert relative_error(np.stack(recorder.latents), recorded) < TOLERANCE
    assert relative_error(np.concatenate([each.samples for each in audio]), waves[case]) < TOLERANCE
    assert done.finish_reason == finish
    assert (done.usage.prompt_tokens, done.usage.audio_patches) == (len(segment.input_ids), len(recorded))
    assert done.usage.audio_seconds == pytest.approx(0.32 * len(recorded))


def test_every_segment_of_a_request_has_its_own_number(speech: Speech) -> None:
    class CountedNoise(RecordedNoise):
        def start(self, segment: int, patch: int, shape: tuple[int, ...]) -> Floats:
            counted.append((segment, patch))
            return np.zeros(shape, np.float32)

    counted: list[tuple[int, int]] = []
    request = SpeechRequest(
        request_id="one",
        text="One two three. Four five six. Seven eight nine.",
        speech=SpeechParams(max_steps=2),
    )
    ask(speech, request, CountedNoise(()), max_segment_length=3)
    assert counted == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_segments_of_one_request_have_noise_and_history_of_their_own(
    speech: Speech,
    waves: dict[str, NDArray[np.float64]],
    started: Callable[[TalkerLoop], TalkerLoop],
) -> None:
    loop = started(speech.loop(slots=2))
    cases = ("clone", "sde", "plain")
    other = speak(loop, speech.case("sde"))[0]
    segments = [speech.case(case, cases=cases, index=index) for index, case in enumerate(cases)]
    for case, patches in zip(cases, spoken(speak(loop, *segments)[0], 3), strict=True):
        check(patches, case, waves[case])
    check(spoken(other)[0], "sde", waves["sde"])
