"""Builds a running service from an artifact: checks it, loads speech, then chat, and starts their threads."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path

import torch

from mingc.artifacts.artifact import check_fingerprint, open_artifact
from mingc.artifacts.hash_process import HashProcess, hashes_compared
from mingc.artifacts.manifest import Manifest
from mingc.errors import ArtifactError, ConfigError, ServeError
from mingc.host.machine import current_host, gpu_target
from mingc.prompts.media_decoder import MediaDecoder
from mingc.runtime.engines.backends import check_loadable
from mingc.runtime.request import ServiceInfo
from mingc.runtime.service.build_context import BuildContext, free_bytes
from mingc.runtime.service.chat_builder import build_chat
from mingc.runtime.service.devices import (
    host_threads,
    image_devices,
    rank_devices,
    start_device,
    talker_devices,
)
from mingc.runtime.service.image_builder import build_images, others_have_work
from mingc.runtime.service.omni import OmniService
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.pipelines import ChatPipeline
from mingc.runtime.service.served_stages import (
    ChatStages,
    SpeechStages,
    find_chat_stages,
    find_image_stages,
    find_speech_stages,
)
from mingc.runtime.service.speech_builder import build_speech
from mingc.runtime.service.startup_clock import StartupClock
from mingc.runtime.thinker.ranks.rank_group import RankGroup

log = logging.getLogger("mingc.startup")


def open_service(
    root: Path,
    options: EngineOptions | None = None,
    clock: StartupClock | None = None,
    *,
    media: MediaDecoder | None = None,
    hashing: HashProcess | None = None,
) -> OmniService:
    """Load the artifact at `root` and start its threads and ranks. `clock` records the seconds of each phase.

    `media` decodes the media of requests, and the service closes it; None: the service takes no media.

    With `check_hashes`, files of weights are hashed while they are loaded; it returns when all hashes are as recorded.
    `hashing` is a process that hashes them already; None: one is started.

    Raises: ArtifactError and its subclasses, ConfigError when options and artifact do not match, WorkerError when a
    rank does not start.
    """
    options, clock = options or EngineOptions(), clock or StartupClock()
    with clock.phase("check the artifact"):
        artifact = open_artifact(root)
        recorded = artifact.manifest.fingerprint
        check_fingerprint(recorded, current_host(recorded.device))
        chat_stages = find_chat_stages(artifact.manifest)
        speech_stages = find_speech_stages(artifact.manifest) if options.loads_speech else None
        image_stages = find_image_stages(artifact.manifest)
        names = [
            name for stages in (chat_stages, speech_stages, image_stages) if stages for name in stages.names
        ]
        check_loadable(artifact, names)
        own_talker_devices = talker_devices(options, recorded, has_speech=speech_stages is not None)
        own_image_devices = image_devices(options, recorded, draws=image_stages is not None)
    if options.tp not in (None, recorded.world_size):
        raise ConfigError(
            f"the artifact is for {recorded.world_size} rank(s), {options.tp} requested",
            where="--tp",
            fix=f"pass --tp {recorded.world_size}, or export again with --tp {options.tp}",
        )
    if chat_stages is None and speech_stages is None:
        raise ArtifactError(
            f"nothing to serve: {', '.join(artifact.manifest.stages)} produce neither text nor speech",
            where=str(root),
            fix="export the thinker, or talker, cfm and audio_vae as well",
        )
    threads = host_threads(recorded.device, options.num_torch_threads)
    if threads is not None:
        torch.set_num_threads(threads)
    devices = rank_devices(recorded.device, recorded.world_size)
    for_talkers, for_images = own_talker_devices or devices[:1], own_image_devices or devices[:1]
    # Other ranks run in other processes; without a thinker only the talkers use devices.
    for_chat = () if chat_stages is None else devices[:1]
    own_devices = [*dict.fromkeys((*for_chat, *for_talkers, *(for_images if image_stages else ())))]
    # The group of ranks is created before the service to which it reports failures.
    services: list[OmniService] = []
    rank_failures: list[ServeError] = []

    def on_failure(error: ServeError) -> None:
        rank_failures.append(error)
        for service in services:
            service.fail(error)

    with ExitStack() as hashes, ExitStack() as processes:  # ends them when something after their start fails
        if options.check_hashes:
            # Engines are code: their hashes are compared before they are loaded.
            with clock.phase("compare hashes"):
                hashing = hashing or HashProcess(artifact, artifact.manifest.weights_files)
                wait_for_hashes = hashes.enter_context(hashes_compared(artifact, hashing))
        for device in own_devices if recorded.device == "cuda" else ():
            with clock.phase("start the device"):
                start_device(device)
            target = gpu_target(device)
            log.log(logging.INFO if target.is_known else logging.WARNING, "%s", target.describe())
        if media is not None:
            processes.callback(media.close)
            media.prepare()
        context = BuildContext(
            artifact=artifact, options=options, clock=clock, on_failure=on_failure, processes=processes
        )
        # The thinker is built last: its KV pages take the memory that the other parts leave free.
        speech = chat = ranks = images = None
        if speech_stages is not None:
            with clock.phase("set up speech: tokenizer, voices, scheduler"):
                speech = build_speech(context, speech_stages, for_talkers, media)
        if media is not None:
            with clock.phase("wait for a media decoder"):
                media.start()  # also without encoders: a library of `serve` that is missing is found now
            if speech is None and (chat_stages is None or not chat_stages.ports):
                media.close()
        if image_stages is not None:
            images = build_images(context, image_stages, for_images, devices)
        if chat_stages is not None:
            with clock.phase("set up chat: tokenizer, scheduler, decoders of media"):
                reserved = 0 if images is None or not {*for_images} & {*devices} else images.num_bytes
                ranks, chat = build_chat(context, chat_stages, devices, media, reserved_bytes=reserved)
        if images is not None:
            images.loop.others_have_work = others_have_work(
                for_images,
                None if chat is None or not {*for_images} & {*devices} else chat.loop,
                () if speech is None else speech.talkers.loops,
            )
        # Asking for the memory of another rank's device creates a CUDA context there, unless `kv_tokens` has done so.
        has_measured = chat is not None and options.max_total_tokens is None
        context.memory.log(free_bytes([*dict.fromkeys((*own_devices, *(devices if has_measured else ())))]))
        if options.check_hashes:
            with clock.phase("wait for the hashes of weights"):
                wait_for_hashes()
        service = OmniService(
            _info(
                artifact.manifest,
                options,
                chat_stages,
                speech_stages,
                chat,
                ranks,
                media=media,
                draws=images is not None,
            ),
            chat=chat,
            speech=speech,
            images=images,
            ranks=ranks,
            num_threads=options.num_preprocess_threads,
            max_pending_patches=options.max_pending_patches,
            memory=context.memory.uses,
        )
        processes.pop_all()
    services.append(service)
    for error in rank_failures:
        service.fail(error)
    return service


def _info(
    manifest: Manifest,
    options: EngineOptions,
    chat: ChatStages | None,
    speech: SpeechStages | None,
    pipeline: ChatPipeline | None,
    ranks: RankGroup | None,
    *,
    media: MediaDecoder | None,
    draws: bool,
) -> ServiceInfo:
    ports = chat.ports if chat is not None and media is not None else frozenset[str]()
    names = tuple(dict.fromkeys(options.served_model_names)) or (manifest.model,)
    return ServiceInfo(
        model=names[0],
        aliases=names[1:],
        artifact=manifest.hash,
        sample_rate=speech.vae.sample_rate if speech is not None else 0,
        voices=tuple(voice.name for voice in manifest.voices) if speech is not None else (),
        default_voice=speech.talker.default_voice if speech is not None else None,
        has_text=chat is not None,
        has_image="image" in ports,
        has_video="video" in ports,
        has_audio_input="audio" in ports,
        has_speech=speech is not None,
        has_image_output=draws,
        has_tools=pipeline is not None and pipeline.processor.tool_tokens is not None,
        max_model_len=pipeline.loop.scheduler.max_context if pipeline is not None else None,
        max_total_tokens=pipeline.loop.scheduler.pool.max_tokens if pipeline is not None else None,
        media_limits=_media_limits(chat, media),
        all_reduce=ranks.worker.all_reduce.plan.reason if ranks is not None else None,
    )


def _media_limits(chat: ChatStages | None, media: MediaDecoder | None) -> dict[str, float]:
    """See `ServiceInfo.media_limits`."""
    if chat is None or media is None or not chat.ports:
        return {}
    limits: dict[str, float] = dict(media.limits)
    if (vision := chat.vision_parameters) is not None:
        limits["resized_pixels"] = min(vision.max_pixels, vision.max_patches * vision.patch_size**2)
        limits["sampled_frames"] = vision.video_max_frames
    if (audio := chat.audio_parameters) is not None:
        limits["clip_seconds"] = audio.max_frames * audio.hop_samples / audio.sample_rate
    return limits
