"""Builder of a service: what it reports of itself, the stages that it finds, and the sizes that it chooses."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import fake_images
import pytest
import torch
from fake_talker import FLOW, TALKER, VAE
from preprocess_data import audio_parameters, thinker_parameters, vision_parameters

from mingc.artifacts.artifact import Artifact, write_manifest
from mingc.artifacts.manifest import FILE_NAME, GraphRecord, Manifest, Parity, StageRecord
from mingc.artifacts.spec import Dim, GraphSpec, TensorSpec
from mingc.artifacts.stage_graph import CLIENT, Edge, Policy, StageGraph, StageNode
from mingc.artifacts.target import Host, lookup
from mingc.errors import (
    ArtifactError,
    ConfigError,
    IncompatibleError,
    IntegrityError,
    MingcError,
    RankError,
    ServeError,
    WorkerError,
)
from mingc.media.decoding import InProcessDecoder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.engines.stage_loader import LoadedStage
from mingc.runtime.service import build_context, builder, devices, image_builder, speech_builder
from mingc.runtime.service.build_context import BuildContext, MemoryAccount
from mingc.runtime.service.builder import _info, open_service
from mingc.runtime.service.chat_builder import kv_tokens
from mingc.runtime.service.devices import host_threads, image_devices, rank_devices, talker_devices
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.pipelines import SpeechPipeline
from mingc.runtime.service.served_stages import (
    ImageStages,
    find_chat_stages,
    find_speech_stages,
    largest_bucket,
)
from mingc.runtime.service.speech_builder import build_speech
from mingc.runtime.service.startup_clock import StartupClock
from mingc.runtime.talker.loop import TalkerLoop


def test_clients_see_the_artifacts_name_or_the_one_asked_for(manifest: Manifest) -> None:
    assert (
        _info(manifest, EngineOptions(), None, None, None, None, media=InProcessDecoder(), draws=False).model
        == manifest.model
    )
    options = EngineOptions(served_model_names=("house/voice-1",))
    renamed = _info(manifest, options, None, None, None, None, media=InProcessDecoder(), draws=False)
    assert (renamed.model, renamed.names) == ("house/voice-1", ("house/voice-1",))


def test_several_names_are_kept_and_the_first_stands_in_responses(manifest: Manifest) -> None:
    options = EngineOptions(served_model_names=("one", "two", "one", "three"))
    info = _info(manifest, options, None, None, None, None, media=InProcessDecoder(), draws=False)
    assert (info.model, info.names) == ("one", ("one", "two", "three"))


@pytest.mark.parametrize("name", ["", "  "])
def test_an_empty_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="--served-model-name: is empty"):
        EngineOptions(served_model_names=(name,))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"served_model_names": ("house\nvoice",)}, r"--served-model-name 'house\\nvoice': contains"),
        ({"max_total_tokens": 10**30}, "--max-total-tokens 10+: must be from 1 to 1099511627776"),
        ({"speech_lead": 10**400}, "--speech-lead 10+: must be from 0 to 1000000"),
        ({"num_torch_threads": 10**11}, "--threads 10+: must be from 1 to 1024"),
        ({"step_timeout_s": 1e300}, r"--step-timeout 1e\+300s: must be above 0s and at most 1000h"),
    ],
)
def test_what_no_machine_has_is_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        EngineOptions(**options)


@pytest.mark.parametrize(
    ("name", "option"),
    [
        ("max_total_tokens", "--max-total-tokens"),
        ("max_speech_seqs", "--max-speech-seqs"),
        ("num_torch_threads", "--threads"),
        ("max_running", "max_running"),
        ("max_streams", "max_streams"),
        ("tp", "--tp"),
    ],
)
def test_options_that_leave_nothing_to_run_are_refused(name: str, option: str) -> None:
    for value in (0, -1):
        with pytest.raises(ConfigError, match=f"{option} {value}: must be (at least|from) 1"):
            EngineOptions(**{name: value})
    assert getattr(EngineOptions(**{name: 1}), name) == 1
    assert EngineOptions(max_waiting=0).max_waiting == 0
    assert EngineOptions(speech_lead=0).speech_lead == 0
    with pytest.raises(ConfigError, match="--speech-lead -1: must be from 0 to 1000000"):
        EngineOptions(speech_lead=-1)


def test_beside_a_gpu_the_host_works_in_one_thread_unless_asked_otherwise() -> None:
    assert (host_threads("cuda", None), host_threads("cuda", 4)) == (1, 4)
    assert (host_threads("cpu", None), host_threads("cpu", 4)) == (None, 4)


DECODER = StageNode(name="decoder", policy="autoregressive")
EYE, EAR = StageNode(name="eye", policy="once"), StageNode(name="ear", policy="once")
SPEECH = (
    StageNode(name="speaker", policy="autoregressive"),
    StageNode(name="sampler", policy="loop"),
    StageNode(name="vocoder", policy="stream"),
)
SPEECH_EDGES = (
    Edge("speaker", "sampler", "condition"),
    Edge("sampler", "vocoder", "latents"),
    Edge("vocoder", CLIENT, "speech"),
)
TEXT = Edge("decoder", CLIENT, "text")
CHAT = {"decoder": thinker_parameters(), "eye": vision_parameters(), "ear": audio_parameters()}
CPU, META = torch.device("cpu"), torch.device("meta")


def fail(error: ServeError) -> None:
    raise error


def load_speech(
    artifact: Artifact,
    options: EngineOptions | None = None,
    *devices: torch.device,
    memory: MemoryAccount | None = None,
) -> SpeechPipeline:
    stages = find_speech_stages(artifact.manifest)
    assert stages is not None
    context = BuildContext(
        artifact=artifact,
        options=options or EngineOptions(),
        clock=StartupClock(),
        on_failure=fail,
        processes=ExitStack(),
        memory=memory or MemoryAccount(),
    )
    return build_speech(context, stages, list(devices or (CPU,)), None)


def with_policy(node: StageNode, policy: Policy) -> StageNode:
    return replace(node, policy=policy)


OF_VOICES: Any = dict.fromkeys(("encode", "aggregate", "speaker"), SimpleNamespace())


def make_stage(*graphs: tuple[str, dict[str, tuple[int, ...]]], **more: Any) -> StageRecord:
    """A stage whose graphs have these dims with these buckets."""
    parity = Parity(compiled=0.0, eager=0.0)
    records = {}
    for name, dims in graphs:
        spec = GraphSpec(
            name=name,
            inputs=(),
            outputs=(),
            dims=tuple(
                Dim(name=dim, minimum=1, maximum=4096, buckets=buckets) for dim, buckets in dims.items()
            ),
            **more,
        )
        records[name] = GraphRecord(spec=spec, engines=(), golden="golden", parity=parity)
    return StageRecord(is_sharded=False, weights=(("weights",),), graphs=records)


def speaking(manifest: Manifest, **stages: StageRecord) -> Manifest:
    """`manifest` with a speech path; its voice and tokenizer files are not there."""
    parameters = {"speaker": TALKER, "sampler": FLOW, "vocoder": VAE}
    return replace(
        manifest,
        stages=stages,
        graph=StageGraph(nodes=SPEECH, edges=SPEECH_EDGES),
        parameters=parameters,
        voices=(),
    )


@pytest.mark.parametrize(
    ("ports", "has"),
    [
        ({"image": "eye"}, (True, False, False)),
        ({"video": "eye"}, (False, True, False)),
        ({"image": "eye", "video": "eye"}, (True, True, False)),
        ({"audio": "ear"}, (False, False, True)),
        ({}, (False, False, False)),
    ],
)
def test_a_service_takes_what_the_ports_of_its_decoder_take(
    manifest: Manifest, ports: dict[str, str], has: tuple[bool, bool, bool]
) -> None:
    edges = (TEXT, *(Edge(stage, "decoder", port) for port, stage in ports.items()))
    graph = StageGraph(nodes=(DECODER, EYE, EAR), edges=edges)
    made = replace(manifest, graph=graph, parameters=CHAT)
    stages = find_chat_stages(made)
    assert stages is not None
    info = _info(made, EngineOptions(), stages, None, None, None, media=InProcessDecoder(), draws=False)
    assert (info.has_image, info.has_video, info.has_audio_input) == has
    assert info.has_text and not info.has_speech and info.voices == ()
    assert stages.vision == ("eye" if has[0] or has[1] else None)
    assert stages.audio == ("ear" if has[2] else None)
    deaf = _info(made, EngineOptions(), stages, None, None, None, media=None, draws=False)
    assert deaf.has_text and not (deaf.has_image or deaf.has_video or deaf.has_audio_input)


def test_two_stages_for_images_and_videos_are_refused(manifest: Manifest) -> None:
    graph = StageGraph(
        nodes=(DECODER, EYE, EAR),
        edges=(TEXT, Edge("eye", "decoder", "image"), Edge("ear", "decoder", "video")),
    )
    with pytest.raises(ArtifactError, match="images come from eye and videos from ear"):
        find_chat_stages(replace(manifest, graph=graph))


def test_a_stage_with_another_run_policy_is_refused(manifest: Manifest) -> None:
    def changed(*nodes: StageNode, edges: tuple[Edge, ...]) -> Manifest:
        return replace(manifest, graph=StageGraph(nodes=nodes, edges=edges))

    says = "stage {} has the run policy {}; the service runs it as {}"
    with pytest.raises(ArtifactError, match=says.format("decoder", "loop", "autoregressive")):
        find_chat_stages(changed(with_policy(DECODER, "loop"), edges=(TEXT,)))
    for port in ("image", "audio"):
        edges = (TEXT, Edge("eye", "decoder", port))
        with pytest.raises(ArtifactError, match=says.format("eye", "stream", "once")):
            find_chat_stages(changed(DECODER, with_policy(EYE, "stream"), edges=edges))
    for index, node in enumerate(SPEECH):
        nodes = (*SPEECH[:index], with_policy(node, "once"), *SPEECH[index + 1 :])
        with pytest.raises(ArtifactError, match=says.format(node.name, "once", node.policy)):
            find_speech_stages(changed(*nodes, edges=SPEECH_EDGES))


def test_a_graph_without_an_end_has_no_stages(manifest: Manifest) -> None:
    empty = replace(manifest, graph=StageGraph())
    assert find_chat_stages(empty) is None and find_speech_stages(empty) is None


def test_a_size_is_the_largest_that_every_graph_has(manifest: Manifest) -> None:
    stage = make_stage(
        ("prefill", {"B": (1, 8, 32), "T": (64,)}), ("decode", {"B": (1, 16)}), ("head", {"B": ()})
    )
    assert largest_bucket(replace(manifest, stages={"decoder": stage}), "decoder", "B") == 16


def test_speech_takes_the_largest_batch_of_its_three_stages_and_its_own_tokenizer(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    small, medium, large = (make_stage(("run", {"B": sizes})) for sizes in ((1, 8), (1, 16), (1, 32)))
    large = make_stage(("run", {"B": (1, 32)}), ("state", {"S": ()}))
    chosen = replace(
        speaking(manifest, speaker=large, sampler=small, vocoder=medium),
        tokenizers={"speaker": "speaker.json", "thinker": "thinker.json"},
    )
    read: list[Path] = []
    slots: list[int] = []

    def make_worker(*stages: LoadedStage, num_slots: int, **_: object) -> SimpleNamespace:
        assert [stage.name for stage in stages] == ["speaker", "sampler", "vocoder"]
        slots.append(num_slots)
        return SimpleNamespace(max_batch=8, state_bytes=0)

    monkeypatch.setattr(
        build_context, "load_stage", lambda artifact, name, device, **_: LoadedStage(name, OF_VOICES)
    )
    monkeypatch.setattr(speech_builder, "TalkerWorker", make_worker)
    monkeypatch.setattr(speech_builder, "TalkerLoop", lambda *_, **__: SimpleNamespace(call=None))
    monkeypatch.setattr(TextTokenizer, "from_file", read.append)
    for name in ("SpeechPromptBuilder", "SpeechPlanner", "VoiceEncoder", "Voices"):
        monkeypatch.setattr(speech_builder, name, lambda *_, **__: None)
    artifact = Artifact(root=Path("root"), manifest=chosen)
    for requested in (None, 3, 100):
        options = EngineOptions(max_speech_seqs=requested, speech_lead=0)
        load_speech(artifact, options)
    assert slots == [9, 4, 9], "one more than the segments spoken at once: slot 0 pads"
    assert {path.name for path in read} == {"speaker.json"}
    slots.clear()
    for requested in (None, 3, 100, 10**4):
        load_speech(artifact, EngineOptions(max_speech_seqs=requested))
    assert slots == [17, 4, 101, 4096], "paced speech may take more slots than a batch has rows"


def test_each_talker_is_loaded_on_its_device(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its device as the current one of the thread: engines and captures follow it."""
    stage = make_stage(("run", {"B": (1, 8)}))
    artifact = Artifact(
        root=Path("root"), manifest=speaking(manifest, speaker=stage, sampler=stage, vocoder=stage)
    )
    current: list[torch.device] = []
    loaded: list[tuple[str, str, str]] = []
    made: list[TalkerLoop] = []

    @contextmanager
    def current_device(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    def load_stage(artifact: object, name: str, device: torch.device, **_: object) -> LoadedStage:
        loaded.append((name, str(device), str(current[-1])))
        return LoadedStage(name, OF_VOICES, {"weight": torch.zeros(2 + len(loaded), dtype=torch.float64)})

    def make_worker(*stages: LoadedStage, device: torch.device, num_slots: int, **_: object) -> Any:
        loaded.append(("worker", str(device), str(current[-1])))
        return SimpleNamespace(
            max_batch=8, state_bytes=100 * num_slots, samples_per_patch=1, sample_rate=1, device=device
        )

    monkeypatch.setattr(speech_builder, "current_device", current_device)
    monkeypatch.setattr(build_context, "load_stage", load_stage)
    monkeypatch.setattr(speech_builder, "TalkerWorker", make_worker)
    for part in ("create_speech_planner", "VoiceEncoder", "Voices"):
        monkeypatch.setattr(speech_builder, part, lambda *_, **__: None)
    monkeypatch.setattr(speech_builder, "TalkerGroup", made.extend)
    memory = MemoryAccount()
    gpus = torch.device("cuda", 2), torch.device("cuda", 5)
    load_speech(artifact, EngineOptions(max_streams=20, max_speech_seqs=3), *gpus, memory=memory)
    parts = ["speaker", "sampler", "vocoder", "worker"]
    assert loaded == [(part, device, device) for device in ("cuda:2", "cuda:5") for part in parts]
    assert [loop._name for loop in made] == ["talker 0 on cuda:2", "talker 1 on cuda:5"]
    assert len({id(loop.scheduler) for loop in made}) == 2, "each has its slots"
    assert [loop.scheduler.slots.num_slots for loop in made] == [4, 4], "--max-speech-seqs is of each talker"
    assert {(use.device, use.owner): use.num_bytes for use in memory.uses} == {
        ("host", "voice_cache"): 128 << 20,
        ("cuda:2", "speaker_weights"): 8 * 3,
        ("cuda:2", "sampler_weights"): 8 * 4,
        ("cuda:2", "vocoder_weights"): 8 * 5,
        ("cuda:2", "talker_slots"): 400,
        ("cuda:5", "speaker_weights"): 8 * 7,
        ("cuda:5", "sampler_weights"): 8 * 8,
        ("cuda:5", "vocoder_weights"): 8 * 9,
        ("cuda:5", "talker_slots"): 400,
    }


DEVICE_OPTIONS = {"talker_devices": "--talker-device", "image_devices": "--image-device"}


@pytest.mark.parametrize("option", DEVICE_OPTIONS)
@pytest.mark.parametrize(
    ("names", "says"),
    [
        (("gpu:1",), "gpu:1: is neither cpu nor a GPU; write cuda:0"),
        (("cuda",), "cuda: is neither"),
        (("cuda:-1",), "cuda:-1: is neither"),
        (("cuda:01",), "cuda:01: is neither"),
        (("CPU",), "CPU: is neither"),
        (("",), ": is neither"),
        (("cuda:1", "cuda:0", "cuda:1"), "cuda:1: is named twice"),
    ],
)
def test_a_device_that_is_none_is_refused(option: str, names: tuple[str, ...], says: str) -> None:
    with pytest.raises(ConfigError, match=f"{DEVICE_OPTIONS[option]} {says}"):
        EngineOptions(**{option: names})  # type: ignore[arg-type]


def test_more_than_two_devices_for_pictures_are_refused() -> None:
    EngineOptions(image_devices=("cpu", "cpu"), talker_devices=("cpu", "cpu", "cpu"))
    with pytest.raises(ConfigError, match="--image-device cpu,cpu,cpu: names more than two devices"):
        EngineOptions(image_devices=("cpu", "cpu", "cpu"))


def test_devices_of_talkers_and_pictures_are_those_that_the_engines_run_on(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def chosen(*names: str, device: str = "cpu", has_speech: bool = True) -> list[torch.device]:
        recorded = replace(manifest.fingerprint, device=device, torch="2.11.0")
        if device == "cuda":
            recorded = replace(recorded, capability="9.0")
        found = talker_devices(EngineOptions(talker_devices=names), recorded, has_speech=has_speech)
        if len(names) <= 2 and has_speech:
            assert found == image_devices(EngineOptions(image_devices=names), recorded, draws=True)
        return found

    capabilities = {0: "9.0", 1: "9.0", 2: "8.0"}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(
        devices,
        "current_host",
        lambda device, index: Host(torch="2.11.0", device=device, capability=capabilities[index]),
    )
    assert chosen() == chosen(has_speech=False) == []
    assert chosen("cpu", "cpu") == [CPU, CPU]
    assert chosen("cuda:1", "cuda:0", device="cuda") == [torch.device("cuda", 1), torch.device("cuda", 0)]
    refused: list[tuple[Callable[[], object], type[MingcError], str]] = [
        (
            lambda: chosen("cuda:0"),
            ConfigError,
            "--talker-device cuda:0: the engines of the artifact run on cpu",
        ),
        (
            lambda: chosen("cpu", device="cuda"),
            ConfigError,
            "--talker-device cpu: the engines .* run on cuda",
        ),
        (
            lambda: chosen("cuda:0", "cuda:3", device="cuda"),
            ConfigError,
            "--talker-device cuda:3: 3 GPUs are visible, cuda:0 to cuda:2",
        ),
        (
            lambda: chosen("cuda:0", "cuda:2", device="cuda"),
            IncompatibleError,
            r"--talker-device cuda:2: .* capability: built for 9\.0, here 8\.0",
        ),
        (
            lambda: chosen("cpu", has_speech=False),
            ConfigError,
            "--talker-device cpu: no speech stages of the artifact are loaded",
        ),
        (
            lambda: chosen("cpu", "cpu", has_speech=False),
            ConfigError,
            "--talker-device cpu,cpu: no speech st",
        ),
    ]
    for choose, kind, says in refused:
        with pytest.raises(kind, match=says) as caught:
            choose()
        assert caught.value.where == "--talker-device" and caught.value.fix
    with pytest.raises(
        ConfigError, match="--image-device cpu,cpu: the artifact draws no pictures"
    ) as undrawn:
        image_devices(EngineOptions(image_devices=("cpu", "cpu")), manifest.fingerprint, draws=False)
    assert undrawn.value.where == "--image-device" and undrawn.value.fix


@pytest.mark.parametrize(("names", "devices"), [((), ["cpu"]), (("cpu", "cpu"), ["cpu", "cpu"])])
def test_talkers_are_loaded_on_the_devices_asked_for_or_the_first_of_the_thinker(
    two_ranks: Path, names: tuple[str, ...], devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[list[str]] = []

    def build_speech(context: object, stages: object, devices: list[torch.device], media: object) -> None:
        loaded.append([*map(str, devices)])
        raise ArtifactError("far enough")

    monkeypatch.setattr(builder, "build_speech", build_speech)
    with pytest.raises(ArtifactError, match="far enough"):
        open_service(two_ranks, EngineOptions(talker_devices=names))
    assert loaded == [devices]


def test_kv_pages_take_four_fifths_of_the_memory_that_is_left(
    manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys and values of 3 layers with 4 heads of 128 in bfloat16: 6,144 bytes a token."""
    state = tuple(TensorSpec(name=name, dtype="bfloat16", shape=("R", 4, 128)) for name in ("keys", "values"))
    stage = make_stage(("decode_attention", {}), state=state, layer_instances=("0", "1", "2"))
    made = replace(manifest, stages={"decoder": stage})
    free = {0: 10 << 30, 1: 4 << 30}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 141 << 30))
    gpus = [torch.device("cuda", index) for index in free]
    # 80 % of the 4 GiB that are left on the fuller one
    assert kv_tokens(made, "decoder", gpus, requested=None, context=4096) == 559240
    assert kv_tokens(made, "decoder", gpus, requested=None, context=1 << 20) == 1 << 20, (
        "one whole context at least"
    )
    assert kv_tokens(made, "decoder", gpus, requested=50, context=4096) == 50
    assert kv_tokens(made, "decoder", [CPU], requested=None, context=4096) == 16384
    assert kv_tokens(made, "decoder", [CPU], requested=None, context=32768) == 32768, (
        "one whole context at least"
    )


def test_an_artifact_is_checked_before_anything_is_loaded(
    artifact_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = Host(torch="2.13.0", device="cpu", capability="AVX2")
    monkeypatch.setattr(builder, "current_host", lambda device: here)
    for name in ("build_chat", "build_speech"):
        monkeypatch.setattr(builder, name, lambda *_: pytest.fail("something is loaded"))
    with pytest.raises(ConfigError, match="the artifact is for 1 rank") as caught:
        open_service(artifact_path, EngineOptions(tp=2))
    assert caught.value.where == "--tp"
    monkeypatch.setattr(builder, "current_host", lambda device: replace(here, torch="2.12.0"))
    with pytest.raises(IncompatibleError, match=r"torch: built with 2\.13\.0, here 2\.12\.0"):
        open_service(artifact_path, EngineOptions())


@pytest.fixture
def two_ranks(artifact_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An artifact of two ranks that fits this machine; nothing of it is loaded."""
    (artifact_path / FILE_NAME).unlink()  # not a file of its own table
    write_manifest(artifact_path, replace(manifest, fingerprint=replace(manifest.fingerprint, world_size=2)))
    here = Host(torch="2.13.0", device="cpu", capability="AVX2")
    monkeypatch.setattr(builder, "current_host", lambda device: here)
    chat = find_chat_stages(
        replace(manifest, graph=StageGraph(nodes=(DECODER,), edges=(TEXT,)), parameters=CHAT)
    )
    speech = find_speech_stages(speaking(manifest))
    monkeypatch.setattr(builder, "find_chat_stages", lambda _: chat)
    monkeypatch.setattr(builder, "find_speech_stages", lambda _: speech)
    monkeypatch.setattr(builder, "check_loadable", lambda *_: None)
    monkeypatch.setattr(builder, "build_chat", lambda *_, **__: (None, None))
    monkeypatch.setattr(
        builder, "build_speech", lambda *_: SimpleNamespace(talkers=SimpleNamespace(loops=()))
    )
    monkeypatch.setattr(builder, "OmniService", lambda info, **parts: SimpleNamespace(**parts))
    return artifact_path


@pytest.mark.parametrize("tp", [1, 3, 4])
def test_an_artifact_runs_on_the_ranks_that_it_was_exported_for(two_ranks: Path, tp: int) -> None:
    with pytest.raises(ConfigError, match=f"the artifact is for 2 rank\\(s\\), {tp} requested") as caught:
        open_service(two_ranks, EngineOptions(tp=tp))
    assert caught.value.where == "--tp" and f"--tp {tp}" in (caught.value.fix or "")
    for same in (None, 2):
        open_service(two_ranks, EngineOptions(tp=same))


@pytest.mark.parametrize("fails", [True, False])
def test_processes_end_when_a_later_part_fails_and_not_otherwise(
    two_ranks: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    def build_chat(context: BuildContext, *_: object, **__: object) -> tuple[None, None]:
        context.processes.callback(ended.append, "ranks")
        return None, None

    def make_service(info: object, **parts: object) -> SimpleNamespace:
        if fails:
            raise MemoryError("no thread can be started")
        return SimpleNamespace()

    monkeypatch.setattr(builder, "build_chat", build_chat)
    monkeypatch.setattr(builder, "OmniService", make_service)
    with pytest.raises(MemoryError) if fails else nullcontext():
        open_service(two_ranks)
    assert ended == (["ranks"] if fails else [])


def test_hashes_of_engines_are_compared_before_anything_is_loaded(
    two_ranks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "build_speech", lambda *_: pytest.fail("something is loaded"))
    for name in ("engines/encode.pt2", "weights/audio.bin"):
        (two_ranks / name).write_bytes((two_ranks / name).read_bytes()[:-1] + b"!")
        with pytest.raises(IntegrityError, match=r"engines/encode\.pt2: sha256 differs") as refused:
            open_service(two_ranks, EngineOptions(check_hashes=True))
    assert "weights/audio.bin: sha256 differs" in refused.value.message, "all files are listed"


@pytest.mark.parametrize("fails", [True, False])
def test_changed_weights_are_refused_once_what_was_started_has_ended(
    two_ranks: Path, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights are hashed while they are loaded; a changed one may be why that fails."""
    steps: list[str] = []

    def build_chat(context: BuildContext, *_: object, **__: object) -> tuple[None, None]:
        steps.append("loaded")
        context.processes.callback(steps.append, "ranks ended")
        if fails:
            raise RuntimeError("device-side assert triggered")
        return None, None

    monkeypatch.setattr(builder, "build_chat", build_chat)
    weights = two_ranks / "weights/audio.bin"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    with pytest.raises(IntegrityError, match=r"1 file\(s\) .*\n.* weights/audio\.bin: sha256 differs"):
        open_service(two_ranks, EngineOptions(check_hashes=True))
    assert steps == ["loaded", "ranks ended"]


def test_no_service_opens_without_all_hashes(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", shutil.which("false"))
    with pytest.raises(WorkerError, match="the process that hashes weights was killed"):
        open_service(two_ranks, EngineOptions(check_hashes=True))


def test_speech_is_loaded_before_the_thinker(two_ranks: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """KV pages take what is left, so nothing may be loaded after them."""
    order: list[str] = []
    monkeypatch.setattr(builder, "build_speech", lambda *_: order.append("speech"))

    def build_chat(*_: object, **__: object) -> None:
        order.append("chat")
        raise ArtifactError("far enough")

    monkeypatch.setattr(builder, "build_chat", build_chat)
    with pytest.raises(ArtifactError, match="far enough"):
        open_service(two_ranks)
    assert order == ["speech", "chat"]


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_rank_that_is_lost_fails_the_service_whenever_it_happens(
    two_ranks: Path, when: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost, failures, reports = RankError("rank 1 ended"), [], []

    def build_chat(context: BuildContext, *_: object, **__: object) -> tuple[None, None]:
        reports.append(context.on_failure)
        if when == "before":
            context.on_failure(lost)
        return None, None

    monkeypatch.setattr(builder, "build_chat", build_chat)
    monkeypatch.setattr(builder, "OmniService", lambda info, **_: SimpleNamespace(fail=failures.append))
    open_service(two_ranks)
    if when == "after":
        reports[0](lost)
    assert failures == [lost]


def test_each_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert rank_devices("cuda", 2) == [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert rank_devices("cpu", 4) == [CPU] * 4
    with pytest.raises(ConfigError, match="4 ranks need as many GPUs, 2 are visible"):
        rank_devices("cuda", 4)


@pytest.mark.parametrize(
    ("name", "level", "says"),
    [
        ("NVIDIA H200", logging.INFO, "runs on triton and clusters kernels"),
        ("NVIDIA B200", logging.WARNING, "unknown GPU NVIDIA B200"),
    ],
)
def test_the_log_warns_of_an_unknown_gpu(
    name: str,
    level: int,
    says: str,
    artifact_path: Path,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (artifact_path / FILE_NAME).unlink()  # not a file of its own table
    write_manifest(
        artifact_path,
        replace(manifest, fingerprint=replace(manifest.fingerprint, device="cuda", capability="9.0")),
    )
    stages = find_speech_stages(speaking(manifest))
    replacements: dict[str, Any] = {
        "current_host": lambda device: Host(torch="2.13.0", device="cuda", capability="9.0"),
        "gpu_target": lambda device: lookup((9, 0), name, 132),
        "start_device": lambda device: None,
        "free_bytes": lambda devices: {},
        "find_chat_stages": lambda _: None,
        "find_speech_stages": lambda _: stages,
        "check_loadable": lambda *_: None,
        "build_speech": lambda *_: SimpleNamespace(talkers=SimpleNamespace(loops=())),
        "OmniService": lambda info, **_: info,
    }
    for each, value in replacements.items():
        monkeypatch.setattr(builder, each, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with caplog.at_level(logging.INFO, "mingc.startup"):
        open_service(artifact_path)
    assert [
        (record.levelno, says in record.getMessage())
        for record in caplog.records
        if name in record.getMessage()
    ] == [(level, True)]


def test_a_client_in_place_of_a_stage_is_refused(manifest: Manifest) -> None:
    edges = (Edge(CLIENT, "sampler", "condition"), *SPEECH_EDGES[1:])
    with pytest.raises(ArtifactError, match="the client where the service needs a stage of policy autoreg"):
        find_speech_stages(replace(manifest, graph=StageGraph(nodes=SPEECH, edges=edges)))


def test_a_stage_without_batch_buckets_is_refused(manifest: Manifest) -> None:
    assert largest_bucket(manifest, "audio_encoder", "N") == 8
    with pytest.raises(ArtifactError, match="no graph of audio_encoder has buckets for dim B"):
        largest_bucket(manifest, "audio_encoder", "B")


def test_an_artifact_without_text_and_speech_is_not_served(
    artifact_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = manifest.fingerprint
    host = Host(torch=recorded.torch, device=recorded.device, capability=recorded.capability)
    monkeypatch.setattr(builder, "current_host", lambda device: host)
    with pytest.raises(ArtifactError, match="nothing to serve: audio_encoder produce neither text nor"):
        open_service(artifact_path)


def test_a_decoder_without_its_attention_graph_is_refused_by_name() -> None:
    stage = SimpleNamespace(graphs={})
    manifest: Any = SimpleNamespace(stages={"thinker": stage})
    with pytest.raises(ArtifactError, match="stage thinker has no graph decode_attention"):
        kv_tokens(manifest, "thinker", [torch.device("cuda")], requested=None, context=4096)


# Devices of pictures: META stands for a second GPU.


@pytest.mark.parametrize(
    ("chosen", "reserved"), [([], 123), ([CPU], 123), ([META, CPU], 123), ([META], 0)], ids=str
)
def test_kv_pages_leave_the_memory_of_pictures_free_where_they_share_a_device(
    two_ranks: Path, chosen: list[torch.device], reserved: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[object] = []

    def build_images(context: object, stages: object, devices: object, ranks: object) -> object:
        seen.extend((devices, ranks))
        return SimpleNamespace(num_bytes=123, loop=SimpleNamespace())

    def build_chat(*parts: object, reserved_bytes: int) -> tuple[None, None]:
        seen.append(reserved_bytes)
        return None, None

    def free(devices: list[torch.device]) -> dict[str, int]:
        assert {*devices} == {CPU, *chosen}, "all that this process uses"
        return {}

    monkeypatch.setattr(builder, "find_image_stages", lambda _: SimpleNamespace(names=()))
    monkeypatch.setattr(builder, "image_devices", lambda *_, draws: chosen)
    for put in (build_images, build_chat):
        monkeypatch.setattr(builder, put.__name__, put)
    monkeypatch.setattr(builder, "free_bytes", free)
    open_service(two_ranks)
    assert seen == [chosen or [CPU], [CPU, CPU], reserved]


@pytest.mark.parametrize(
    ("chosen", "busy", "gives_way"),
    [
        ([], None, False),
        ([], "thinker", True),
        ([], "talker", True),
        ([META], "thinker", False),
        ([META], "talker", False),
        ([META, CPU], "thinker", True),
        ([META, CPU], "talker", True),
    ],
    ids=str,
)
def test_pictures_give_way_to_thinker_and_talkers_of_their_devices(
    two_ranks: Path,
    chosen: list[torch.device],
    busy: str | None,
    gives_way: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def loop(name: str) -> SimpleNamespace:
        return SimpleNamespace(has_work=name == busy, is_healthy=True, worker=SimpleNamespace(device=CPU))

    talkers, pictures = SimpleNamespace(loops=[loop("talker")]), SimpleNamespace()
    replacements: dict[str, Any] = {
        "find_image_stages": lambda _: SimpleNamespace(names=()),
        "image_devices": lambda *_, draws: chosen,
        "build_images": lambda *_: SimpleNamespace(num_bytes=1, loop=pictures),
        "build_chat": lambda *_, **__: (None, SimpleNamespace(loop=loop("thinker"))),
        "build_speech": lambda *_: SimpleNamespace(talkers=talkers),
        "free_bytes": lambda devices: {},
        "_info": lambda *_, **__: None,
    }
    for each, value in replacements.items():
        monkeypatch.setattr(builder, each, value)
    open_service(two_ranks)
    assert pictures.others_have_work() == gives_way


class Queries:
    """Learned rows that go to any device."""

    def __len__(self) -> int:
        return sum(fake_images.CONDITION.num_queries)

    def to(self, device: torch.device) -> Queries:
        return self


@pytest.mark.parametrize(
    ("names", "ranks", "num_bytes", "per_device"),
    [
        ("cpu", "cpu", 1000, 1),  # half of what the host has
        ("cpu cpu", "cpu", 500, 2),
        ("cuda:1", "cuda:0", 600, 1),
        ("cuda:2 cuda:1", "cuda:0", 600, 1),
        ("cuda:0 cuda:2", "cuda:0", 700, 1),
        ("cuda:0", "cuda:0", None, 1),
        ("cuda:1", "cuda:0 cuda:1", None, 1),
    ],
)
def test_pictures_take_what_their_devices_have_left_beside_kv_pages(
    names: str, ranks: str, num_bytes: int | None, per_device: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None: as much as the largest pictures; KV pages are planned later."""
    stages = fake_images.image_stages()
    condition = stages["image_condition"]
    stages["image_condition"] = LoadedStage(
        condition.name, condition.graphs, cast(Any, {"queries": Queries()})
    )
    monkeypatch.setattr(image_builder, "current_device", lambda device: nullcontext())
    monkeypatch.setattr(image_builder, "free_memory_bytes", lambda: 2000)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (500 + 100 * device.index, 9999))
    memory, loads = MemoryAccount(), []

    def load(name: str, device: torch.device, *, copied: object = None) -> LoadedStage:
        loads.append((name, str(device), copied is not None))
        return stages[name]

    context: Any = SimpleNamespace(load=load, memory=memory, options=EngineOptions(max_waiting=7))
    devices = [*map(torch.device, names.split())]
    built = image_builder.build_images(
        context,
        ImageStages(
            condition="image_condition",
            queries=fake_images.CONDITION,
            glyph="glyph",
            glyphs=fake_images.GLYPH,
            sampler="image_dit",
            dit=fake_images.DIT,
            decoder="image_vae",
            vae=fake_images.VAE,
        ),
        devices,
        [*map(torch.device, ranks.split())],
    )
    num_bytes = 3 * 4 * 16384**2 if num_bytes is None else num_bytes  # scores of 1024 × 1024 pixels
    assert built.num_bytes == num_bytes
    assert {use.device: use.num_bytes for use in memory.uses if use.owner == "image_workspace"} == {
        name: per_device * num_bytes for name in names.split()
    }
    assert [str(each.device) for each in built.loop.worker.samplers] == names.split()
    assert built.memory.max_pictures(2) == 2 * len(devices), "calls of the fake sampler have four samples"
    copies = [(name, device) for name, device, is_copied in loads if is_copied]
    assert copies == [("image_dit", str(each)) for each in devices[1:]] and len(loads) == 4 + len(copies)
