"""Every number of a manifest and every option: a service built from an artifact with another one differs by it.

The artifact's engines are small Python functions; everything else is what `mingc serve` builds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import io
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import av
import fake_images
import fake_talker
import numpy as np
import pytest
import torch
from fake_engines import HIDDEN, FunctionEngine
from fake_omni import TINY, collect, voice
from fake_thinker import PAGE, VOCAB, make_thinker_stage, thinker_parameters
from preprocess_data import audio_parameters, noise_image, png, vision_parameters, wav

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.codec import encode
from mingc.artifacts.manifest import (
    FILE_NAME,
    SCHEMA,
    EngineRecord,
    FileRecord,
    Fingerprint,
    GraphRecord,
    Manifest,
    Parity,
    StageRecord,
    VoiceRecord,
    read_manifest,
)
from mingc.artifacts.parameters import BUILT_IN
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import CLIENT, Edge, StageGraph, StageNode
from mingc.artifacts.target import Host
from mingc.errors import CapacityError, ConfigError, MingcError
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.conversation import MediaPart, Message, TextPart
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime import request as request_module
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.noise import PhiloxNoise
from mingc.runtime.request import (
    AudioDelta,
    ChatRequest,
    Done,
    ImageRequest,
    SamplingParams,
    SpeechParams,
    SpeechRequest,
    TextDelta,
)
from mingc.runtime.request_stream import EventQueue, RequestStream
from mingc.runtime.service import build_context, builder, chat_builder, speech_builder
from mingc.runtime.service.builder import open_service
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.thinker.scheduler import ChunkShape
from mingc.runtime.thinker.worker import StepOptions

tokenizer_of = cache(TextTokenizer.from_file)


class Recorder(Graph):
    """An encoder that returns zeros and remembers the names, shapes and values of its inputs."""

    def __init__(self, spec: GraphSpec) -> None:
        super().__init__(spec, {None: FunctionEngine((), lambda: ())})
        self.calls: list[str] = []

    def run(self, **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls.append(digest(*(value for _, value in sorted(tensors.items()))))
        shape = tensors["mel"].shape[:2] if "mel" in tensors else tensors["pixels"].shape[:1]
        return {"embeddings": torch.zeros(*shape, HIDDEN)}


def encoder_spec(inputs: Mapping[str, tuple[int | str, ...]], **dims: tuple[int, ...]) -> GraphSpec:
    return GraphSpec(
        name="encode",
        inputs=tuple(TensorSpec(name=name, dtype="float32", shape=shape) for name, shape in inputs.items()),
        outputs=(TensorSpec(name="embeddings", dtype="float32", shape=()),),
        dims=tuple(
            Dim(name=name, minimum=1, maximum=max(sizes), buckets=sizes) for name, sizes in dims.items()
        ),
    )


VISION_INPUTS: Mapping[str, tuple[int | str, ...]] = {
    "pixels": ("M", 4, 1536),
    "position_index": ("M", 4, 4),
    "position_weight": ("M", 4, 4),
    "coordinates": ("M", 4, 2),
    "segment": ("M", 4, 2),
}
AUDIO_INPUTS: Mapping[str, tuple[int | str, ...]] = {"mel": ("N", "T4", 4, 128), "lengths": ("N",)}


@cache
def stages() -> dict[str, LoadedStage]:
    return {
        "vision_encoder": LoadedStage(
            "vision_encoder", {"encode": Recorder(encoder_spec(VISION_INPUTS, M=(64, 512, 4096)))}
        ),
        "audio_encoder": LoadedStage(
            "audio_encoder",
            {"encode": Recorder(encoder_spec(AUDIO_INPUTS, N=(1, 2), T4=(64, 256)))},
        ),
        "thinker": make_thinker_stage(max_prompts=2),
        "talker": fake_talker._talker_stage(),
        "cfm": fake_talker._cfm_stage(0.6, None),
        "audio_vae": fake_talker._vae_stage(),
        **fake_images.image_stages(),
    }


POLICIES: Mapping[str, Any] = {
    "vision_encoder": "once",
    "audio_encoder": "once",
    "thinker": "autoregressive",
    "talker": "autoregressive",
    "cfm": "loop",
    "audio_vae": "stream",
    "image_condition": "once",
    "glyph": "once",
    "image_dit": "loop",
    "image_vae": "once",
}
EDGES = (
    Edge("vision_encoder", "thinker", "image"),
    Edge("vision_encoder", "thinker", "video"),
    Edge("audio_encoder", "thinker", "audio"),
    Edge("thinker", CLIENT, "text"),
    Edge("talker", "cfm", "condition"),
    Edge("cfm", "audio_vae", "latents"),
    Edge("audio_vae", CLIENT, "speech"),
    Edge("thinker", "image_condition", "hidden"),
    Edge("image_condition", "image_dit", "condition"),
    Edge("glyph", "image_dit", "glyph"),
    Edge("image_dit", "image_vae", "latents"),
    Edge("image_vae", CLIENT, "picture"),
)


ENGINE = EngineRecord(backend="aoti", file="engine", dims=None, compile_seconds=0.0)


def with_sizes(spec: GraphSpec) -> GraphSpec:
    """The signature of a fake graph with the sizes of its outputs, as an export records them."""
    sizes: dict[str, tuple[int | str, ...]] = {
        "samples": ("B", fake_talker.PATCH_SAMPLES + fake_talker.TAIL),
        "logits": ("B", VOCAB),
        "next_embeds": ("B", HIDDEN),
    }
    return replace(
        spec,
        outputs=tuple(replace(each, shape=sizes.get(each.name, each.shape)) for each in spec.outputs),
        dims=tuple(replace(each, multiple=PAGE) if each.name == "KV" else each for each in spec.dims),
    )


@cache
def manifest() -> Manifest:
    thinker = thinker_parameters(tokenizer_of(TINY / "tokenizer.json").token_id)
    vision = replace(
        vision_parameters(),
        hidden_size=HIDDEN,
        max_patches=1024,
        max_pixels=64 * 32 * 32,
        video_min_pixels=4 * 32 * 32,
        video_total_pixels=200 * 32 * 32,
        video_max_frames=8,
    )
    audio = replace(audio_parameters(), hidden_size=HIDDEN, max_frames=400)
    # A talker that stops by its rule, with caps above that; each cap decides in a change below.
    talker = replace(fake_talker.TALKER, cap_seconds_per_character=1e-5, cap_min_seconds=0.002)
    parameters = {
        "vision_encoder": vision,
        "audio_encoder": audio,
        "thinker": thinker,
        "talker": talker,
        "cfm": replace(fake_talker.FLOW, temperature=0.5),
        "audio_vae": fake_talker.VAE,
        "image_condition": fake_images.CONDITION,
        "glyph": fake_images.GLYPH,
        "image_dit": fake_images.DIT,
        "image_vae": fake_images.VAE,
    }
    return Manifest(
        schema=SCHEMA,
        model="tiny",
        fingerprint=Fingerprint(
            mingc="0",
            torch="2.13.0",
            target="cpu",
            device="cpu",
            capability="AVX2",
            dtype="float32",
            world_size=1,
            config_sha256="",
            checkpoint_sha256="",
        ),
        stages={
            name: StageRecord(
                is_sharded=False,
                weights=(("weights",),),
                graphs={
                    key: GraphRecord(
                        spec=with_sizes(graph.spec),
                        engines=(ENGINE,),
                        golden="golden",
                        parity=Parity(compiled=0.0, eager=0.0),
                    )
                    for key, graph in stage.graphs.items()
                },
            )
            for name, stage in stages().items()
        },
        graph=StageGraph(
            nodes=tuple(StageNode(name=name, policy=policy) for name, policy in POLICIES.items()), edges=EDGES
        ),
        parameters={name: encode(value) for name, value in parameters.items()},
        tokenizers={"thinker": "tokenizer.json", "talker": "talker/llm"},
        speaker_network=None,
        voices=tuple(
            VoiceRecord(name=name, file=name, transcript="Hello.", num_patches=2) for name in ("amy", "bob")
        ),
        notes=(),
        files={},
    )


def load_stage(artifact: Artifact, name: str, device: torch.device, **_: object) -> LoadedStage:
    """The fake stage with the signatures of the manifest."""
    graphs: dict[str, Graph] = {}
    for key, graph in stages()[name].graphs.items():
        spec = artifact.manifest.stages[name].graphs[key].spec
        graphs[key] = Recorder(spec) if isinstance(graph, Recorder) else Graph(spec, graph.engines)
    return LoadedStage(name, graphs, stages()[name].weights)


@dataclass
class Built:
    """A service and what the builder asked for outside it."""

    service: OmniService
    rank_timeout_s: list[float] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)
    hashed: list[Path] = field(default_factory=list)


@contextmanager
def build(
    changed: Manifest, options: EngineOptions, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], Built]]:
    """A function that opens the service; the service is closed after the block."""
    opened: list[OmniService] = []
    found = Built(service=None)  # type: ignore[arg-type]

    @contextmanager
    def hashes_compared(artifact: Artifact, *_: object) -> Iterator[Callable[[], None]]:
        yield lambda: found.hashed.append(artifact.root)

    def rank_group(*_: object, step_timeout_s: float, **__: object) -> None:
        found.rank_timeout_s.append(step_timeout_s)
        raise CapacityError("no ranks in this test")

    with monkeypatch.context() as patch:
        patch.setattr(builder, "open_artifact", lambda root: Artifact(root=root, manifest=read(changed)))
        patch.setattr(
            builder, "current_host", lambda device: Host(torch="2.13.0", device="cpu", capability="AVX2")
        )
        patch.setattr(build_context, "load_stage", load_stage)
        patch.setattr(
            speech_builder, "load_voice", lambda artifact, record: voice(record.name, ord(record.name[0]))
        )
        patch.setattr(builder, "HashProcess", lambda *_: None)
        patch.setattr(builder, "hashes_compared", hashes_compared)
        patch.setattr(torch, "set_num_threads", found.threads.append)
        patch.setattr(TextTokenizer, "from_file", tokenizer_of)

        patch.setattr(chat_builder, "RankGroup", type("Ranks", (), {"__new__": rank_group}))

        def open_it() -> Built:
            try:
                found.service = open_service(TINY, options, media=InProcessDecoder())
                opened.append(found.service)
            except CapacityError:
                assert found.rank_timeout_s
            return found

        try:
            yield open_it
        finally:
            for service in opened:
                asyncio.run(service.close(shutdown_timeout_s=0))


def read(changed: Manifest) -> Manifest:
    """The manifest as it is read from a file, with all its checks."""
    files = {name: FileRecord(size_bytes=0, sha256="") for name in changed.named_files()}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, FILE_NAME).write_text(replace(changed, files=files).to_json(), encoding="utf-8")
        return read_manifest(Path(folder))


def digest(*values: torch.Tensor | np.ndarray[Any, Any]) -> str:
    whole = hashlib.sha256()
    for value in values:
        array = np.ascontiguousarray(np.asarray(value))
        whole.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return whole.hexdigest()[:16]


@cache
def media() -> Mapping[str, bytes]:
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as output:
        stream = output.add_stream("ffv1", rate=4)
        stream.height, stream.width, stream.pix_fmt = 120, 160, "bgr0"
        for index in range(24):
            picture = av.VideoFrame.from_ndarray(noise_image(120, 160, index), format="rgb24")
            picture.pts, picture.time_base = index, Fraction(1, 4)
            output.mux(stream.encode(picture))
        output.mux(stream.encode())
    tone = np.sin(np.arange(16000) / 20).astype(np.float32)
    return {
        "image": png(noise_image(100, 140)),
        "small image": png(noise_image(20, 24)),
        "large image": png(noise_image(500, 700)),
        "video": file.getvalue(),
        "audio": wav(tone, 16000),
        "long audio": wav(np.tile(tone, 3), 16000),
    }


def ask(*parts: TextPart | MediaPart, max_tokens: int = 12) -> ChatRequest:
    return ChatRequest(
        request_id="r",
        messages=(Message(role="user", parts=parts or (TextPart(text="hi"),)),),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        speech=None,
    )


def outcome(work: Callable[[], object]) -> object:
    """The result of `work`, or the error that refuses it."""
    try:
        return work()
    except MingcError as error:
        return f"{type(error).__name__}: {error.message}"


def count_until_refused(work: Callable[[int], object], most: int = 400) -> int:
    for count in range(most):
        try:
            work(count)
        except CapacityError:
            return count
    return most


def describe_chat(service: OmniService, *, with_media: bool) -> Iterator[tuple[str, object]]:
    chat = service._chat
    assert chat is not None

    def prompt(kind: str, *parts: TextPart | MediaPart) -> Iterator[tuple[str, object]]:
        def prepare() -> object:
            built, features = chat.processor.prepare(ask(*parts).messages)
            values = [each.pixels for each in features.vision] + [each.mel for each in features.audio]
            for encoder, of_kind in ((chat.vision, features.vision), (chat.audio, features.audio)):
                if encoder is not None and of_kind:
                    encoder._encoder.encode(of_kind)
            return {
                "ids": built.input_ids.tolist(),
                "positions": digest(built.positions),
                "features": [digest(each) for each in values],
            }

        yield f"{kind} prompt", outcome(prepare)

    yield "encoder cache", None if chat.encoder_cache is None else chat.encoder_cache.max_bytes
    encode, long = chat.processor._encode, "hello " * 50
    with mock.patch.object(encode, "_encode", wraps=encode._encode) as tokenize:
        ids = [list(encode(long)) for _ in range(2)]
        yield "token ids are kept", tokenize.call_count == 1
        tokenize.reset_mock()
        service.forget_caches()
        assert [list(encode(long)), *ids] == [ids[0]] * 3 and tokenize.call_count == 1
    yield from prompt("text", TextPart(text="hi"))
    yield from prompt("special text", TextPart(text="<|role_end|>"))
    for name, data in media().items() if with_media else ():
        kind: Any = name.split()[-1]
        yield from prompt(name, MediaPart(kind=kind, data=data, where=name), TextPart(text="hi"))
    for encoder_name, encoder in (("vision", chat.vision), ("audio", chat.audio)) if with_media else ():
        assert encoder is not None
        yield f"{encoder_name} calls", list(encoder._encoder._graph.calls)
    loop = chat.loop
    with loop._lock:
        scheduler = loop.scheduler
        yield "pages", (scheduler.pool.num_pages, scheduler.pool.page_size)
        yield "context", scheduler.max_context
        yield "chunk", scheduler._chunk
        size = scheduler.pool.page_size

        def add(number: int) -> None:
            scheduler.add(-1 - number, prompt_tokens=1, max_tokens=size - 1)

        waiting = count_until_refused(add)
        scheduler.plan()
        yield "running", scheduler.num_running
        yield "waiting", waiting
        for number in range(400):
            scheduler.remove(-1 - number)

    def answer() -> object:
        events = asyncio.run(asyncio.wait_for(collect(service.chat(ask())), 60))
        done = next(each for each in events if isinstance(each, Done))
        return (
            "".join(each.text for each in events if isinstance(each, TextDelta)),
            done.usage,
            done.finish_reason,
        )

    yield "answer", outcome(answer)
    yield "answer again", outcome(answer)


def describe_speech(service: OmniService) -> Iterator[tuple[str, object]]:
    speech = service._speech
    if speech is None:
        return
    for name, text, params in (
        ("short", "Hi.", SpeechParams()),
        ("long", "A longer text to speak, and on. " * 3, SpeechParams()),
    ):

        def plan(text: str = text, params: SpeechParams = params) -> object:
            segment = speech.planner.segment(text, 0, params, PhiloxNoise(1))
            return {
                **{key: digest(getattr(segment, key)) for key in ("input_ids", "embeds", "history")},
                **{key: getattr(segment, key) for key in ("guidance", "sigma", "temperature")},
                "max_patches": segment.max_patches,
            }

        yield f"{name} segment", outcome(plan)
    yield "talkers", len(speech.talkers.loops)
    voices = speech.voices
    assert voices is not None
    yield "longest clip of a voice", voices._encoder.max_seconds
    yield "keeps voices", voices._store is not None
    loop = speech.talkers.loops[0]
    yield "reading", service.speech_text
    yield "patches in flight", loop.worker.depth
    yield "patches ahead", loop._pacing._lead
    with loop._lock:
        scheduler = loop.scheduler
        yield "slots", scheduler.slots.num_slots
        yield "streams", count_until_refused(lambda number: scheduler.open(-1 - number))
        for number in range(400):
            scheduler.remove(-1 - number)
        for number in range(8):
            scheduler.open(-1 - number)
            scheduler.add(-1 - number, 0)
        yield "segments that join at once", len(scheduler.admit())
        for number in range(8):
            scheduler.remove(-1 - number)
    own = asyncio.new_event_loop()
    stream = RequestStream(EventQueue(own))
    try:
        service._open_speech_stream(speech, SpeechParams(), stream, 1, None, is_live=False, recorder=None)
        (is_behind,) = (each.is_behind for each in loop._streams.values())
        unread = 0
        while not is_behind() and unread < 400:
            stream.put(UNREAD)
            unread += 1
        yield "unread patches", unread
    finally:
        stream.close()
        own.close()

    def say() -> object:
        text = "One sentence with several words in it, and then another clause. And a second sentence."
        request = SpeechRequest(request_id="s", text=text, speech=SpeechParams(seed=1))
        events = asyncio.run(asyncio.wait_for(collect(service.speech(request)), 60))
        samples = [each.samples for each in events if isinstance(each, AudioDelta)]
        return sum(map(len, samples)), digest(np.concatenate(samples))

    yield "speech", outcome(say)


def describe_pictures(service: OmniService) -> Iterator[tuple[str, object]]:
    yield (
        "image memory",
        [use.num_bytes for use in service.load.memory if use.owner == "image_workspace"],
    )

    def draw(**fields: Any) -> object:
        said = Message(role="user", parts=(TextPart(text='A sign "<color-0>!"'),))
        request = ImageRequest(request_id="d", messages=(said,), resolution=512, seed=1, **fields)
        recorder = request_module.Recorder()
        events = asyncio.run(asyncio.wait_for(collect(service.draw(request, recorder=recorder)), 60))
        return len(events), digest(*recorder.image_latents)

    yield "picture", outcome(draw)
    yield "picture of one step", outcome(lambda: draw(num_steps=1, guidance=1.0))


def describe(
    changed: Manifest,
    options: EngineOptions,
    monkeypatch: pytest.MonkeyPatch,
    *,
    with_media: bool = True,
    with_speech: bool = True,
    with_pictures: bool = False,
) -> dict[str, object]:
    """What a client or an operator can see of the service, by name; `refused` alone when it does not start."""
    with build(changed, options, monkeypatch) as opened:
        try:
            built = opened()
        except (MingcError, RuntimeError, AssertionError) as error:
            return {"refused": str(error)}
        seen: dict[str, object] = {
            "hashes": len(built.hashed),
            "threads": built.threads,
            "step timeout": built.rank_timeout_s,
        }
        if built.service is not None:
            seen["info"] = built.service.info
            seen["preprocessing threads"] = built.service._pool._max_workers
            seen.update(describe_chat(built.service, with_media=with_media))
            if with_pictures:
                seen.update(describe_pictures(built.service))
            if with_speech:
                seen.update(describe_speech(built.service))
        return seen


@dataclass(frozen=True)
class Change:
    """Another value, and names of what must differ by it."""

    value: Any
    differs: tuple[str, ...]


UNREAD = AudioDelta(samples=np.zeros(1, np.float32))
REFUSED = ("refused",)
ALL_IMAGES = ("image prompt", "small image prompt", "large image prompt")
# By stage and parameter. A string in place of a change: why no part of the service depends on the number.
PARAMETERS: dict[str, dict[str, Change | str]] = {
    "vision_encoder": {
        "patch_size": Change(8, REFUSED),
        "temporal_patch_size": Change(1, REFUSED),
        "merge_size": Change(1, REFUSED),
        "in_channels": Change(4, REFUSED),
        "min_pixels": Change(32 * 32 * 32, ("small image prompt",)),
        "max_pixels": Change(32 * 32 * 32, ("large image prompt",)),
        "image_mean": Change([0.1, 0.2, 0.3], (*ALL_IMAGES, "video prompt")),
        "image_std": Change([0.1, 0.2, 0.3], (*ALL_IMAGES, "video prompt")),
        "position_grid_size": Change(5, ("vision calls",)),
        "hidden_size": Change(5, REFUSED),
        "video_min_pixels": Change(48 * 32 * 32, ("video prompt",)),
        "video_total_pixels": Change(16 * 32 * 32, ("video prompt",)),
        "video_fps": Change(1.0, ("video prompt",)),
        "video_max_frames": Change(4, ("video prompt",)),
        "max_patches": Change(10, (*ALL_IMAGES, "video prompt")),
        "load_factor": Change(64, ("image prompt",)),
        "load_min_pixels": Change(64 * 32 * 32, ("small image prompt",)),
        "load_max_pixels": Change(16 * 32 * 32, ("large image prompt",)),
    },
    "audio_encoder": {
        "sample_rate": Change(8000, ("audio prompt",)),
        "num_mels": Change(64, REFUSED),
        "fft_size": Change(512, ("audio prompt",)),
        "hop_samples": Change(320, ("audio prompt",)),
        "max_frames": Change(200, ("long audio prompt",)),
        "frames_per_token": Change(8, REFUSED),
        "hidden_size": Change(5, REFUSED),
    },
    "thinker": {
        "vocab_size": Change(575, REFUSED),
        "hidden_size": Change(5, REFUSED),
        "num_layers": Change(3, REFUSED),
        "max_positions": Change(100, ("context", "info")),
        "page_size": Change(2, REFUSED),
        "chunk_alignment": Change(8, ("chunk",)),
        "shared_rows": Change(16, ("chunk",)),
        "stop_token_ids": Change("an id of the answer", ("answer",)),
        "image_patch_token": Change(7, ("image prompt",)),
        "frame_patch_token": Change(7, ("video prompt",)),
        "audio_patch_token": Change(7, ("audio prompt",)),
        "image_start_token": Change(7, ("image prompt",)),
        "image_end_token": Change(7, ("image prompt",)),
        "video_start_token": Change(7, ("video prompt",)),
        "video_end_token": Change(7, ("video prompt",)),
        "audio_start_token": Change(7, ("audio prompt",)),
        "audio_end_token": Change(7, ("audio prompt",)),
        "temporal_position_scale": "every grid of a served video has one frame; tests/unit/test_positions.py",
        "default_system_text": Change("You sing.", ("text prompt", "answer")),
        "thinking_suffix": Change("{state}!", ("text prompt", "answer")),
    },
    "talker": {
        "hidden_size": Change(5, REFUSED),
        "num_layers": Change(3, REFUSED),
        "vocab_size": "of the word embedding, which is in the engine; no input has this size",
        "slot_tokens": Change(110, REFUSED),
        "min_stop_step": Change(2, ("speech",)),
        "max_steps": Change(5, ("long segment",)),
        "stop_threshold": Change(0.61, ("speech",)),
        "default_voice": Change("bob", ("info", "short segment", "speech")),
        "max_segment_length": Change(5, ("speech",)),
        "chunk_alignment": "of prompts in a chunk; tests/runtime/test_talker_loop.py",
        "cap_seconds_per_character": Change(1e-4, ("long segment",)),
        "cap_min_seconds": Change(0.0011, ("short segment",)),
    },
    "cfm": {
        "num_steps": Change(4, REFUSED),
        "latents_per_patch": Change(3, REFUSED),
        "history_latents": Change(5, REFUSED),
        "latent_dim": Change(5, REFUSED),
        "speaker_dim": "of the speaker network; tests/export/test_signatures.py",
        "guidance": Change(2.5, ("short segment", "speech")),
        "sigma": Change(0.5, ("short segment", "speech")),
        "temperature": Change(1.0, ("short segment", "speech")),
    },
    "audio_vae": {
        "sample_rate": Change(22050, ("info", "long segment")),
        "hop_samples": Change(4, REFUSED),
        "frames_per_latent": Change(4, REFUSED),
        "latent_dim": Change(5, REFUSED),
        "samples_per_latent": Change(5, REFUSED),
        "lookahead_frames": "in the engine; what it adds to a patch is in tail_samples",
        "tail_samples": Change(2, REFUSED),
    },
    "image_condition": {
        "num_queries": Change([3], REFUSED),
        "width": Change(6, REFUSED),
    },
    "glyph": {
        "max_length": Change(20, REFUSED),
        "width": Change(6, REFUSED),
        "added_tokens": Change(["<color-1>"], ("picture",)),
    },
    "image_dit": {
        "latent_channels": Change(3, REFUSED),
        "patch_size": Change(1, REFUSED),
        "token_multiple": Change(8, ("picture",)),
        "caption_width": Change(6, REFUSED),
        "hidden_size": Change(9000, ("image memory",)),
        "feed_forward_size": Change(90000, ("image memory",)),
        "max_positions": Change([64, 127, 128], REFUSED),
        "num_train_steps": Change(7, ("picture",)),
        "shift": Change(2.0, ("picture",)),
        "is_shift_dynamic": Change(True, ("picture",)),
        "dynamic_tokens": "of a dynamic shift alone; tests/unit/test_image_schedule.py",
        "dynamic_shifts": "of a dynamic shift alone; tests/unit/test_image_schedule.py",
        "num_steps": Change(5, ("picture",)),
        "guidance": Change(3.0, ("picture",)),
    },
    "image_vae": {
        "latent_channels": Change(3, REFUSED),
        "block_channels": Change([3, 4, 5, 5, 5], ("picture", "picture of one step")),
    },
}
OPTIONS: dict[str, Change] = {
    "tp": Change(2, REFUSED),
    "max_total_tokens": Change(400, ("pages", "info")),
    "max_running": Change(3, ("running",)),
    "max_waiting": Change(5, ("waiting",)),
    "max_speech_seqs": Change(3, ("slots", "segments that join at once")),
    "talker_devices": Change(("cpu", "cpu", "cpu"), ("talkers",)),
    "image_devices": Change(("cpu", "cpu"), ("image memory",)),
    "speech_lead": Change(0, ("patches ahead",)),
    "voices_dir": Change("a folder", ("keeps voices",)),
    "max_prefills_per_patch": Change(2, ("segments that join at once",)),
    "max_streams": Change(9, ("streams",)),
    "max_pending_patches": Change(4, ("unread patches",)),
    "num_preprocess_threads": Change(5, ("preprocessing threads",)),
    "num_torch_threads": Change(3, ("threads",)),
    "step_timeout_s": Change(7.0, ()),  # of ranks: a test of its own below
    "check_hashes": Change(True, ("hashes",)),
    "served_model_names": Change(("other",), ("info",)),
    "steps": Change(StepOptions(max_prompts=2), ("chunk",)),
    "talker_depth": Change(2, ("patches in flight",)),
    "speech_text": Change("reference", ("reading",)),
    "parse_special_tokens": Change(True, ("special text prompt",)),
    "prefix_cache": Change(False, ("answer again", "token ids are kept")),
    "encoder_cache": Change(0, ("encoder cache",)),
    "loads_speech": Change(False, ("info",)),
}
# Largest buckets of dims, by stage and graph.
BUCKETS: dict[tuple[str, str, str], Change] = {
    ("thinker", "decode_attention", "B"): Change((1, 2), ("running",)),
    ("thinker", "prefill_attention", "T"): Change((8, 16), ("chunk",)),
    ("thinker", "prefill_attention", "P"): Change((4, 8, 16), ("context", "info")),
    ("talker", "step", "B"): Change((1, 2), ("slots", "segments that join at once")),
    ("cfm", "sample", "B"): Change((1, 2), ("slots", "segments that join at once")),
    ("audio_vae", "stream", "B"): Change((1, 2), ("slots", "segments that join at once")),
    ("talker", "prefill", "T"): Change((16,), ()),
    ("cfm", "aggregate", "N"): Change((1,), ("longest clip of a voice",)),
    ("audio_vae", "encode", "T"): Change((4,), ("longest clip of a voice",)),
    ("vision_encoder", "encode", "M"): Change((128, 4096), ("vision calls",)),
    ("audio_encoder", "encode", "T4"): Change((32, 256), ("audio calls",)),
}


@pytest.fixture(scope="module")
def usual() -> dict[str, object]:
    with pytest.MonkeyPatch.context() as patch:
        return describe(manifest(), EngineOptions(), patch, with_pictures=True)


def with_parameter(stage: str, name: str, value: Any) -> Manifest:
    base = manifest()
    assert base.parameters[stage][name] != value
    return replace(base, parameters={**base.parameters, stage: {**base.parameters[stage], name: value}})


def check_change(change: Change, seen: dict[str, object], usual: dict[str, object]) -> None:
    different = {name for name, value in seen.items() if value != usual.get(name)}
    assert different >= {*change.differs}, f"unchanged: {sorted({*change.differs} - different)}"


def test_the_table_has_every_parameter_of_every_stage_and_every_option() -> None:
    assert PARAMETERS.keys() == BUILT_IN.keys()
    for stage, kind in BUILT_IN.items():
        assert PARAMETERS[stage].keys() == {each.name for each in dataclasses.fields(kind)}, stage
    assert OPTIONS.keys() == {each.name for each in dataclasses.fields(EngineOptions)}


def test_a_service_built_twice_is_the_same(usual: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    assert "refused" not in usual
    assert describe(manifest(), EngineOptions(), monkeypatch, with_pictures=True) == usual


def test_the_memory_of_a_service_is_known_by_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly, from the shapes of the fake stages, in float32; two talkers on one device are added up."""
    weights = {
        "thinker": 3,
        "vision_encoder": 5,
        "audio_encoder": 7,
        "talker": 11,
        "cfm": 13,
        "audio_vae": 17,
        "image_condition": 4 * HIDDEN,
        "glyph": 19,
        "image_dit": 23,
        "image_vae": 29,
    }
    load = load_stage

    def load_with_weights(artifact: Artifact, name: str, device: torch.device, **_: object) -> LoadedStage:
        stage = load(artifact, name, device)
        return LoadedStage(name, stage.graphs, stage.weights or {"weight": torch.zeros(weights[name])})

    options = EngineOptions(
        max_total_tokens=400, max_speech_seqs=3, talker_devices=("cpu", "cpu"), encoder_cache=1000
    )
    with build(manifest(), options, monkeypatch) as opened, monkeypatch.context() as patch:
        patch.setattr(build_context, "load_stage", load_with_weights)
        found = {(use.device, use.owner): use.num_bytes for use in opened().service.load.memory}
    slot = (
        fake_talker.SLOT_TOKENS + HIDDEN + fake_talker.HISTORY * fake_talker.LATENT_DIM + fake_talker.TAIL + 1
    )
    assert found == {
        **{
            ("cpu", f"{name}_weights"): 4 * count * (2 if name in ("talker", "cfm", "audio_vae") else 1)
            for name, count in weights.items()
        },
        ("cpu", "kv_pages"): 101 * PAGE * 2 * 4,
        ("cpu", "talker_slots"): 2 * 4 * slot * 4,
        ("cpu", "image_workspace"): 3 * 4 * 16384**2,  # three matrices of scores of 1024 × 1024 pixels
        ("host", "encoder_cache"): 1000,
        ("host", "voice_cache"): 128 << 20,
    }


@pytest.mark.parametrize("where", ["ChatProcessor", "ThinkerLoop"])
def test_rank_and_decoder_processes_end_when_a_part_after_them_fails(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thinker of two ranks, whose second one is not there."""
    ended: list[str] = []

    class Ranks:
        worker = SimpleNamespace(
            chunk=ChunkShape(max_rows=8), num_layer_groups=1, latency_model=None, num_pages=5, state_bytes=64
        )

        def __init__(self, *_: object, **__: object) -> None:
            pass

        def close(self) -> None:
            ended.append("ranks")

    def fail(*_: object, **__: object) -> None:
        raise MemoryError("far enough")

    two = replace(manifest(), fingerprint=replace(manifest().fingerprint, world_size=2))
    # Undone before what `build` has patched: a patch that outlives its block would bring that back.
    with build(two, EngineOptions(), monkeypatch) as opened, monkeypatch.context() as patch:
        patch.setattr(chat_builder, "RankGroup", Ranks)
        patch.setattr(chat_builder, "rank_weight_bytes", lambda artifact, stage, rank: 0)
        patch.setattr(InProcessDecoder, "close", lambda self: ended.append("decoders"))
        patch.setattr(chat_builder, where, fail)
        with pytest.raises(MemoryError, match="far enough"):
            opened()
    assert sorted(ended) == ["decoders", "ranks"]


@pytest.mark.parametrize("has_encoders", [True, False])
def test_a_service_that_lacks_a_library_of_its_decoders_is_not_opened(
    has_encoders: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without encoders, which would end the decoders: the extra `serve` is whole, or the server does not start."""
    ended: list[str] = []

    def lacking(self: InProcessDecoder) -> None:
        raise ConfigError("av cannot be imported")

    with build(manifest(), EngineOptions(), monkeypatch) as opened, monkeypatch.context() as patch:
        patch.setattr(InProcessDecoder, "close", lambda self: ended.append("decoders"))
        patch.setattr(InProcessDecoder, "start", lacking)
        if not has_encoders:
            patch.setattr(builder, "find_chat_stages", lambda manifest: None)
        with pytest.raises(ConfigError, match="av cannot be imported"):
            opened()
    assert ended == ["decoders"]


CHANGES = [
    pytest.param(stage, name, change, id=f"{stage}.{name}")
    for stage, changes in PARAMETERS.items()
    for name, change in changes.items()
    if isinstance(change, Change)
]


@pytest.mark.parametrize(("stage", "name", "change"), CHANGES)
def test_another_number_in_the_manifest_gives_another_service(
    stage: str, name: str, change: Change, usual: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    value = change.value
    if name == "stop_token_ids":
        value = [first_token(usual)]
    is_speech = stage in ("talker", "cfm", "audio_vae")
    is_picture = stage == "glyph" or stage.startswith("image_")
    seen = describe(
        with_parameter(stage, name, value),
        EngineOptions(),
        monkeypatch,
        with_media=not is_speech and not is_picture,
        with_speech=is_speech,
        with_pictures=is_picture,
    )
    check_change(change, seen, usual)


def first_token(usual: dict[str, object]) -> int:
    """The id of the first character of the usual answer."""
    answer: Any = usual["answer"]
    tokenizer = tokenizer_of(TINY / "tokenizer.json")
    (token,) = tokenizer.encode(answer[0][0])
    return token


@pytest.mark.parametrize("name", OPTIONS)
def test_another_option_gives_another_service(
    name: str, usual: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change = OPTIONS[name]
    value = tmp_path if name == "voices_dir" else change.value
    options = EngineOptions(**{name: value})
    seen = describe(manifest(), options, monkeypatch, with_pictures=name == "image_devices")
    check_change(change, seen, usual)
    assert name != "image_devices" or seen["picture"] == usual["picture"]


def test_options_hold_what_they_ask_for(usual: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exactly: pages for all tokens besides page 0; and never more than the engines take."""
    asked = EngineOptions(max_total_tokens=400, max_running=100, max_speech_seqs=100, speech_lead=0)
    seen = describe(manifest(), asked, monkeypatch, with_media=False)
    assert seen["pages"] == (101, PAGE)
    for name in ("running", "segments that join at once"):
        assert seen[name] == usual[name], name
    assert (seen["slots"], usual["slots"]) == (9, 17), "a batch; by default two, for speech is paced"
    info: Any = seen["info"]
    assert info.max_total_tokens == 400
    few = describe(manifest(), EngineOptions(max_running=1, max_speech_seqs=1), monkeypatch, with_media=False)
    assert (few["running"], few["slots"]) == (1, 2)
    paced = describe(manifest(), EngineOptions(max_speech_seqs=100), monkeypatch, with_media=False)
    assert paced["slots"] == 101, "of paced speech more than a batch may be under way"
    wide = EngineOptions(max_speech_seqs=100, max_streams=1)
    assert describe(manifest(), wide, monkeypatch, with_media=False)["streams"] == 100, "one for each slot"


@pytest.mark.parametrize("key", BUCKETS, ids=".".join)
def test_other_buckets_give_another_service(
    key: tuple[str, str, str], usual: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, graph, dim = key
    base = manifest()
    record = base.stages[stage].graphs[graph]
    dims = tuple(
        replace(each, buckets=BUCKETS[key].value) if each.name == dim else each for each in record.spec.dims
    )
    graphs = {**base.stages[stage].graphs, graph: replace(record, spec=replace(record.spec, dims=dims))}
    changed = replace(base, stages={**base.stages, stage: replace(base.stages[stage], graphs=graphs)})
    seen = describe(
        changed,
        EngineOptions(),
        monkeypatch,
        with_media="encoder" in stage,
        with_speech="encoder" not in stage,
    )
    check_change(BUCKETS[key], seen, usual)


@pytest.mark.parametrize("seconds", [60.0, 7.0])
def test_ranks_have_as_long_for_a_step_as_the_option_says(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = replace(manifest(), fingerprint=replace(manifest().fingerprint, world_size=2))
    seen = describe(two, EngineOptions(step_timeout_s=seconds), monkeypatch)
    assert seen["step timeout"] == [seconds]
    seen = describe(manifest(), EngineOptions(tp=1), monkeypatch, with_media=False, with_speech=False)
    assert "info" in seen


def test_a_layer_without_feed_forward_is_named_when_the_service_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A manifest from which a hand has removed a graph."""
    base = manifest()
    graphs = {name: each for name, each in base.stages["thinker"].graphs.items() if name != "dense"}
    changed = replace(base, stages={**base.stages, "thinker": replace(base.stages["thinker"], graphs=graphs)})
    monkeypatch.setitem(
        stages(),
        "thinker",
        LoadedStage("thinker", {name: stages()["thinker"].graphs[name] for name in graphs}),
    )
    seen = describe(changed, EngineOptions(), monkeypatch, with_media=False, with_speech=False)
    assert str(seen["refused"]).startswith("layer layers.0 has attention but no feed-forward")


@pytest.mark.parametrize(("length", "is_refused"), [(31, False), (30, True)])
def test_two_frames_have_positions_behind_the_longest_caption(
    length: int, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 queries and 24 glyphs, padded to 28 rows, are at 1 to 28; picture and reference at 29 and 30."""
    changed = with_parameter("image_dit", "max_positions", [length, 128, 128])
    seen = describe(changed, EngineOptions(), monkeypatch, with_media=False, with_speech=False)
    assert ("image_dit has positions for" in str(seen.get("refused"))) == is_refused
