"""Build a running service from an artifact: checks, engines, pools, threads.

The stages are found in the stage graph, by walking back from the ports of the client.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

import torch

from mingc.artifacts.artifact import (
    Artifact,
    check_fingerprint,
    check_hashes,
    fingerprint_problems,
    open_artifact,
)
from mingc.artifacts.manifest import Fingerprint, Manifest
from mingc.artifacts.parameters import (
    AudioParameters,
    CfmParameters,
    TalkerParameters,
    ThinkerParameters,
    VaeParameters,
    VisionParameters,
)
from mingc.artifacts.stage_graph import CLIENT, Policy, StageGraph
from mingc.dtypes import torch_dtype
from mingc.errors import ArtifactError, ConfigError, IncompatibleError, ServeError
from mingc.host.machine import current_host, gpu_target
from mingc.prompts.features import AudioFeatures, VisionFeatures
from mingc.prompts.media_decoder import MediaDecoder
from mingc.runtime.encoders.cache import EncoderCache
from mingc.runtime.encoders.encoder import AudioEncoder, VisionEncoder
from mingc.runtime.encoders.loop import EncoderLoop
from mingc.runtime.engines.backends import check_loadable
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage, rank_weight_bytes
from mingc.runtime.kv_cache import PagePool, SlotPool
from mingc.runtime.request import ServiceInfo
from mingc.runtime.service.memory import HOST, MemoryAccount, free_bytes
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.pipelines import ChatPipeline, SpeechPipeline
from mingc.runtime.service.preprocessing import create_chat_processor, create_speech_planner, load_tokenizer
from mingc.runtime.service.startup import StartupClock
from mingc.runtime.talker.group import TalkerGroup
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.worker import TalkerWorker
from mingc.runtime.thinker.loop import StepRunner, ThinkerLoop
from mingc.runtime.thinker.prefill_policy import ChunkedPrefillPolicy
from mingc.runtime.thinker.ranks.rank_group import RankGroup
from mingc.runtime.thinker.scheduler import ThinkerScheduler
from mingc.runtime.thinker.startup import create_worker
from mingc.runtime.thinker.worker import ThinkerWorker

log = logging.getLogger("mingc.startup")

_MIN_KV_TOKENS = 16384
# Of the memory that is free after everything else is loaded; the rest is for CUDA graphs and buffers of thinker steps.
_CUDA_KV_SHARE = 0.8
_PREPARE_ENCODERS = "prepare encoders (CUDA: capture)"
_CACHED_CHARACTERS = 4 << 20  # of texts whose token ids are kept: 128 prompts of 8,000 tokens, at most 32 MiB


def open_service(
    root: Path,
    options: EngineOptions | None = None,
    clock: StartupClock | None = None,
    *,
    media: MediaDecoder | None = None,
) -> OmniService:
    """Load the artifact at `root` and start its threads and ranks. `clock` records the seconds of each phase.

    `media` decodes the media of requests and is closed with the service; None: the service takes none.

    Raises: ArtifactError and its subclasses, ConfigError when options and artifact do not match, WorkerError when a
    rank does not start.
    """
    options, clock = options or EngineOptions(), clock or StartupClock()
    with clock.phase("check the artifact"):
        artifact = open_artifact(root)
        manifest = artifact.manifest
        recorded = manifest.fingerprint
        check_fingerprint(recorded, current_host(recorded.device))
        check_loadable(artifact, _loaded_stages(manifest, options))
        talker_devices = _talker_devices(options, manifest)
    if options.check_hashes:
        with clock.phase("compare hashes"):
            check_hashes(artifact)
    if options.tp not in (None, recorded.world_size):
        raise ConfigError(
            f"the artifact is for {recorded.world_size} rank(s), {options.tp} requested",
            where="--tp",
            fix=f"pass --tp {recorded.world_size}, or export again with --tp {options.tp}",
        )
    threads = host_threads(recorded.device, options.num_torch_threads)
    if threads is not None:
        torch.set_num_threads(threads)
    devices = _devices(recorded.device, recorded.world_size)
    talker_devices = talker_devices or devices[:1]
    # Other ranks are other processes, and without a thinker only the talkers have devices.
    first = devices[:1] if manifest.graph.text_decoder() is not None else []
    own_devices = [*dict.fromkeys((*first, *talker_devices))]
    for device in own_devices if recorded.device == "cuda" else ():
        with clock.phase("start the device"):
            _start_device(device)
        target = gpu_target(device)
        log.log(logging.INFO if target.is_known else logging.WARNING, "%s", target.describe())
    # The group of ranks exists before the service that it reports to.
    services: list[OmniService] = []
    rank_failures: list[ServeError] = []

    def on_failure(error: ServeError) -> None:
        rank_failures.append(error)
        for service in services:
            service.fail(error)

    memory = MemoryAccount()
    with ExitStack() as processes:  # ended when something after their start fails
        if media is not None:
            processes.callback(media.close)
        # The thinker last: its KV pages take the memory that the other parts leave free.
        with clock.phase("set up speech: tokenizer, voices, scheduler"):
            speech = (
                _load_speech(artifact, options, talker_devices, clock, memory)
                if options.loads_speech
                else None
            )
        with clock.phase("set up chat: tokenizer, scheduler, decoders of media"):
            runner, chat = _load_chat(artifact, options, media, devices, on_failure, clock, memory, processes)
        if chat is None and speech is None:
            raise ArtifactError(
                f"nothing to serve: {', '.join(manifest.stages)} produce neither text nor speech",
                where=str(root),
                fix="export the thinker, or talker, cfm and audio_vae as well",
            )
        # Of other ranks' devices only where `_kv_tokens` has a context already.
        has_measured = chat is not None and options.max_total_tokens is None
        memory.log(free_bytes([*dict.fromkeys((*own_devices, *(devices if has_measured else ())))]))
        ranks = runner if isinstance(runner, RankGroup) else None
        service = OmniService(
            _info(manifest, options, ranks, chat, takes_media=media is not None),
            chat=chat,
            speech=speech,
            ranks=ranks,
            num_threads=options.num_preprocess_threads,
            max_pending_patches=options.max_pending_patches,
            memory=memory.uses,
        )
        processes.pop_all()
    services.append(service)
    for error in rank_failures:
        service.fail(error)
    return service


def _start_device(device: torch.device) -> None:
    """Create the context of a CUDA device, which loading would otherwise do."""
    torch.cuda.synchronize(device)


def _loaded_stages(manifest: Manifest, options: EngineOptions) -> list[str]:
    """The stages that `open_service` loads engines of."""
    decoder, path = manifest.graph.text_decoder(), manifest.graph.speech_path()
    names: list[str | None] = []
    if decoder is not None:
        names += [decoder, _vision_encoder(manifest.graph, decoder), _audio_encoder(manifest.graph, decoder)]
    if path is not None and options.loads_speech:
        names += [path.speech_llm, path.sampler, path.vocoder]
    return [name for name in names if name is not None]


def host_threads(device: str, requested: int | None) -> int | None:
    """Threads for torch's work on the host; None leaves torch's setting alone.

    With a GPU the host only prepares inputs. A copy of more than 32,768 values, such as the inputs of a prompt or of
    sixteen patches, would use several threads and wait until the last one is scheduled, sometimes for many times the
    duration of the copy.
    """
    return 1 if requested is None and device == "cuda" else requested


def _load_chat(
    artifact: Artifact,
    options: EngineOptions,
    media: MediaDecoder | None,
    devices: list[torch.device],
    on_failure: Callable[[ServeError], None],
    clock: StartupClock,
    memory: MemoryAccount,
    processes: ExitStack,
) -> tuple[StepRunner | None, ChatPipeline | None]:
    """Load encoders, then the thinker's weights, then its KV pages. `processes` ends the processes that are started."""
    manifest = artifact.manifest
    decoder = manifest.graph.text_decoder()
    if decoder is None:
        return None, None
    _check_policy(manifest.graph, decoder, "autoregressive")
    thinker = manifest.parameters_of(decoder, ThinkerParameters)
    vision_stage, audio_stage = (
        _vision_encoder(manifest.graph, decoder),
        _audio_encoder(manifest.graph, decoder),
    )
    cache = EncoderCache(options.encoder_cache) if options.encoder_cache else None
    vision: EncoderLoop[VisionFeatures] | None = None
    if vision_stage is not None:
        vision_parameters = manifest.parameters_of(vision_stage, VisionParameters)
        stage = load_stage(artifact, vision_stage, devices[0], phase=clock.phase)
        memory.add(devices[0], f"{vision_stage}_weights", stage.weight_bytes)
        with clock.phase(_PREPARE_ENCODERS):
            vision_encoder = VisionEncoder(stage, vision_parameters, devices[0])
        vision = EncoderLoop(vision_stage, vision_encoder, cache)
    audio: EncoderLoop[AudioFeatures] | None = None
    if audio_stage is not None:
        audio_parameters = manifest.parameters_of(audio_stage, AudioParameters)
        stage = load_stage(artifact, audio_stage, devices[0], phase=clock.phase)
        memory.add(devices[0], f"{audio_stage}_weights", stage.weight_bytes)
        with clock.phase(_PREPARE_ENCODERS):
            audio_encoder = AudioEncoder(stage, audio_parameters, devices[0])
        audio = EncoderLoop(audio_stage, audio_encoder, cache)
    if vision is not None or audio is not None:
        memory.add(HOST, "encoder_cache", options.encoder_cache)
    tokenizer = load_tokenizer(artifact, decoder)
    context = _largest(manifest, decoder, "P") * thinker.page_size

    def load() -> LoadedStage:
        stage = load_stage(artifact, decoder, devices[0], phase=clock.phase)
        memory.add(devices[0], f"{decoder}_weights", stage.weight_bytes)
        return stage

    def count_pages() -> int:
        return 1 + -(-_kv_tokens(artifact, decoder, options, devices, context) // thinker.page_size)

    def start(stage: LoadedStage, num_pages: int) -> ThinkerWorker:
        with clock.phase("prepare steps (CUDA: capture)"):
            return create_worker(
                stage, manifest, num_pages=num_pages, device=devices[0], options=options.steps
            )

    runner: RankGroup | ThinkerWorker
    if len(devices) > 1:
        runner = RankGroup(
            artifact.root,
            devices,
            load,
            count_pages,
            start,
            on_failure=on_failure,
            step_timeout_s=options.step_timeout_s,
            options=options.steps,
        )
        processes.callback(runner.close)
    else:
        stage = load()
        runner = start(stage, count_pages())
    for rank, device in enumerate(devices):
        if rank:
            memory.add(device, f"{decoder}_weights", rank_weight_bytes(artifact, decoder, rank))
        memory.add(device, "kv_pages", runner.state_bytes)
    if runner.latency_model is not None:
        log.info(
            "ms of a prompt's chunk by tokens %s, of a decode step by requests %s",
            *(
                {size: round(ms, 2) for size, ms in each}
                for each in (runner.latency_model.chunks, runner.latency_model.decodes)
            ),
        )
    batch = _largest(manifest, decoder, "B")
    scheduler = ThinkerScheduler(
        PagePool(runner.num_pages, thinker.page_size),
        max_running=min(options.max_running or batch, batch),
        chunk=runner.chunk,
        prefill_policy=ChunkedPrefillPolicy(
            num_layer_groups=runner.num_layer_groups, latency_model=runner.latency_model
        ),
        max_context=min(context, thinker.max_positions),
        max_waiting=options.max_waiting,
    )
    log.info(
        "KV pages for %d tokens, a request may have %d", scheduler.pool.max_tokens, scheduler.max_context
    )
    if scheduler.max_context < min(context, thinker.max_positions):
        log.warning(
            "--max-total-tokens %d limits a request to %d tokens; the artifact allows %d",
            options.max_total_tokens or 0,
            scheduler.max_context,
            min(context, thinker.max_positions),
        )
    parts = ChatPipeline(
        processor=create_chat_processor(
            artifact,
            decoder,
            tokenizer,
            max_tokens=scheduler.max_context,
            parse_special_tokens=options.parse_special_tokens,
            media=media,
            cached_characters=_CACHED_CHARACTERS if options.prefix_cache else 0,
        ),
        tokenizer=tokenizer,
        vision=vision,
        audio=audio,
        encoder_cache=cache,
        media=media,
        loop=ThinkerLoop(
            runner,
            scheduler,
            stop_ids=thinker.stop_token_ids,
            vocab_size=thinker.vocab_size,
            prefix_salt=hashlib.sha256(manifest.to_json().encode()).digest()
            if options.prefix_cache
            else None,
        ),
    )
    if media is not None and (vision is not None or audio is not None):
        media.start()
    return runner, parts


def _load_speech(
    artifact: Artifact,
    options: EngineOptions,
    devices: list[torch.device],
    clock: StartupClock,
    memory: MemoryAccount,
) -> SpeechPipeline | None:
    """Load a talker on each of `devices`."""
    manifest = artifact.manifest
    path = manifest.graph.speech_path()
    if path is None:
        return None
    _check_policy(manifest.graph, path.speech_llm, "autoregressive")
    _check_policy(manifest.graph, path.sampler, "loop")
    _check_policy(manifest.graph, path.vocoder, "stream")
    talker = manifest.parameters_of(path.speech_llm, TalkerParameters)
    flow = manifest.parameters_of(path.sampler, CfmParameters)
    vae = manifest.parameters_of(path.vocoder, VaeParameters)
    names = (path.speech_llm, path.sampler, path.vocoder)
    largest = min(_largest(manifest, name, "B") for name in names)
    most = max(largest, _most_slots(manifest, names)) if options.speech_lead else largest
    slots = 1 + min(options.max_speech_seqs or largest, most)
    loops = []
    for index, device in enumerate(devices):
        with current_device(device):
            stages = [load_stage(artifact, name, device, phase=clock.phase) for name in names]
            with clock.phase("prepare patches and prompts (CUDA: capture)"):
                worker = TalkerWorker(
                    *stages,
                    parameters=talker,
                    flow=flow,
                    vae=vae,
                    num_slots=slots,
                    device=device,
                    depth=options.talker_depth,
                )
        for stage in stages:
            memory.add(device, f"{stage.name}_weights", stage.weight_bytes)
        memory.add(device, "talker_slots", worker.state_bytes)
        scheduler = TalkerScheduler(
            SlotPool(slots),
            max_batch=worker.max_batch,
            max_prefills_per_patch=options.max_prefills_per_patch,
            max_streams=max(options.max_streams, slots - 1),
        )
        name = f"talker {index} on {device}" if len(devices) > 1 else "talker"
        loops.append(TalkerLoop(worker, scheduler, name=name, speech_lead=options.speech_lead))
    return SpeechPipeline(
        planner=create_speech_planner(artifact, path, parse_special_tokens=options.parse_special_tokens),
        talkers=TalkerGroup(loops),
        max_segment_length=talker.max_segment_length,
    )


def _info(
    manifest: Manifest,
    options: EngineOptions,
    ranks: RankGroup | None,
    chat: ChatPipeline | None,
    *,
    takes_media: bool,
) -> ServiceInfo:
    graph = manifest.graph
    decoder, path = graph.text_decoder(), graph.speech_path() if options.loads_speech else None
    ports = {
        port
        for port in ("image", "video", "audio")
        if takes_media and decoder is not None and graph.producer(decoder, port) is not None
    }
    sample_rate, default_voice = 0, None
    if path is not None:
        sample_rate = manifest.parameters_of(path.vocoder, VaeParameters).sample_rate
        default_voice = manifest.parameters_of(path.speech_llm, TalkerParameters).default_voice
    return ServiceInfo(
        model=(*options.served_model_names, manifest.model)[0],
        aliases=tuple(dict.fromkeys(options.served_model_names))[1:],
        sample_rate=sample_rate,
        voices=tuple(voice.name for voice in manifest.voices) if path is not None else (),
        default_voice=default_voice,
        has_text=decoder is not None,
        has_image="image" in ports,
        has_video="video" in ports,
        has_audio_input="audio" in ports,
        has_speech=path is not None,
        max_model_len=chat.loop.scheduler.max_context if chat is not None else None,
        max_total_tokens=chat.loop.scheduler.pool.max_tokens if chat is not None else None,
        all_reduce=ranks.all_reduce_plan.reason if ranks is not None else None,
    )


def _vision_encoder(graph: StageGraph, decoder: str) -> str | None:
    """The stage behind the decoder's image and video ports."""
    image, video = graph.producer(decoder, "image"), graph.producer(decoder, "video")
    if image is not None and video is not None and image != video:
        raise ArtifactError(
            f"images come from {image} and videos from {video}; the service runs one vision encoder",
            where="stage graph",
            fix="export again with one of them",
        )
    found = image or video
    if found is not None:
        _check_policy(graph, found, "once")
    return found


def _audio_encoder(graph: StageGraph, decoder: str) -> str | None:
    """The stage behind the decoder's audio port."""
    found = graph.producer(decoder, "audio")
    if found is not None:
        _check_policy(graph, found, "once")
    return found


def _check_policy(graph: StageGraph, stage: str, expected: Policy) -> None:
    """Raises: ArtifactError when `stage` is the client, or its policy differs from that of the service."""
    if stage == CLIENT:
        raise ArtifactError(
            f"the stage graph has the client where the service needs a stage of policy {expected}",
            where="stage graph",
            fix="copy the artifact again, or export again",
        )
    if graph.policy(stage) != expected:
        raise ArtifactError(
            f"stage {stage} has the run policy {graph.policy(stage)}; the service runs it as {expected}",
            where="stage graph",
            fix="export again without it, or correct the policy that it declares",
        )


def _largest(manifest: Manifest, stage: str, dim: str) -> int:
    """The largest size of `dim` that every graph of `stage` with this dim has a bucket for."""
    graphs = [record.spec for record in manifest.stages[stage].graphs.values()]
    sizes = [
        max(each.buckets) for graph in graphs for each in graph.dims if each.name == dim and each.buckets
    ]
    if not sizes:
        raise ArtifactError(
            f"no graph of {stage} has buckets for dim {dim}", where="manifest.json", fix="export again"
        )
    return min(sizes)


def _most_slots(manifest: Manifest, stages: Sequence[str]) -> int:
    """Number of segments whose state all graphs of `stages` can hold, besides slot 0; 0 if none has state."""
    graphs = [record.spec for stage in stages for record in manifest.stages[stage].graphs.values()]
    sizes = [dim.maximum for graph in graphs for dim in graph.dims if dim.name == "S"]
    return min(sizes, default=1) - 1


def _kv_tokens(
    artifact: Artifact, decoder: str, options: EngineOptions, devices: list[torch.device], context: int
) -> int:
    """Capacity of the KV pages in tokens: as requested, else by free memory on a GPU, or a few requests on a CPU.

    Called after everything else is loaded on every rank; measures the free memory of the fullest of `devices`.
    """
    if options.max_total_tokens is not None:
        return options.max_total_tokens
    if devices[0].type != "cuda":
        return max(context, _MIN_KV_TOKENS)
    record = artifact.manifest.stages[decoder].graphs.get("decode_attention")
    if record is None:
        raise ArtifactError(
            f"stage {decoder} has no graph decode_attention", where="manifest.json", fix="export again"
        )
    attention = record.spec
    row_bytes = len(attention.layer_instances) * sum(
        torch_dtype(tensor.dtype).itemsize * math.prod(size for size in tensor.shape if isinstance(size, int))
        for tensor in attention.state
    )
    free = min(torch.cuda.mem_get_info(device)[0] for device in devices)
    return max(context, int(free * _CUDA_KV_SHARE) // row_bytes)


def _devices(kind: str, world_size: int) -> list[torch.device]:
    if kind != "cuda":
        return [torch.device(kind)] * world_size
    if torch.cuda.device_count() < world_size:
        raise ConfigError(
            f"{world_size} ranks need as many GPUs, {torch.cuda.device_count()} are visible",
            where="CUDA_VISIBLE_DEVICES",
            fix="make more GPUs visible, or export with a smaller --tp",
        )
    return [torch.device("cuda", index) for index in range(world_size)]


def _talker_devices(options: EngineOptions, manifest: Manifest) -> list[torch.device]:
    """The devices that are asked for; none: the default.

    Raises: ConfigError for talkers that the artifact has not, another kind of device than its engines run on, or a GPU
        that is not visible; IncompatibleError when its engines do not run on one of the GPUs.
    """
    option, asked = "--talker-device", ",".join(options.talker_devices)
    if not asked:
        return []
    recorded = manifest.fingerprint
    if manifest.graph.speech_path() is None or not options.loads_speech:
        raise ConfigError(
            f"{option} {asked}: no speech stages of the artifact are loaded",
            where=option,
            fix="leave it out, or export talker, cfm and audio_vae as well",
        )
    devices = [*map(torch.device, options.talker_devices)]
    for device in devices:
        if device.type != recorded.device:
            raise ConfigError(
                f"{option} {device}: the engines of the artifact run on {recorded.device}",
                where=option,
                fix=f"name devices of that kind ({'cpu' if recorded.device == 'cpu' else 'cuda:0'}), or leave it out",
            )
        if device.type == "cuda":
            _check_gpu(device, recorded)
    return devices


def _check_gpu(device: torch.device, recorded: Fingerprint) -> None:
    """Raises: ConfigError when the GPU is not visible, IncompatibleError when the engines do not run on it."""
    option = "--talker-device"
    visible = torch.cuda.device_count()
    if device.index >= visible:
        raise ConfigError(
            f"{option} {device}: {visible} GPUs are visible, cuda:0 to cuda:{visible - 1}",
            where=option,
            fix="name one of them, or make more visible (CUDA_VISIBLE_DEVICES)",
        )
    problems = fingerprint_problems(recorded, current_host("cuda", device.index))
    if problems:
        raise IncompatibleError(
            f"{option} {device}: the engines do not run there: {', '.join(problems)}",
            where=option,
            fix=f"name a GPU of compute capability {' or '.join(recorded.capability.split(','))}, or leave it out",
        )
