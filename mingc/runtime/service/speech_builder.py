"""Builds the speech pipeline of a service: talkers and the planner of their segments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import Manifest
from mingc.errors import ArtifactError
from mingc.prompts.media_decoder import MediaDecoder
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import load_tokenizer
from mingc.runtime.engines.cuda_graphs import current_device
from mingc.runtime.kv_cache import SlotPool
from mingc.runtime.service.build_context import HOST, BuildContext
from mingc.runtime.service.options import EngineOptions
from mingc.runtime.service.pipelines import SpeechPipeline
from mingc.runtime.service.served_stages import SpeechStages, largest_bucket
from mingc.runtime.service.voice_store import VoiceStore
from mingc.runtime.service.voices import CACHE_BYTES, Voices
from mingc.runtime.talker.group import TalkerGroup
from mingc.runtime.talker.loop import TalkerLoop
from mingc.runtime.talker.planner import SpeechPlanner, load_voice
from mingc.runtime.talker.scheduler import TalkerScheduler
from mingc.runtime.talker.voice_encoder import GraphsByName, VoiceEncoder
from mingc.runtime.talker.worker import TalkerWorker
from mingc.runtime.voices import VoicePack
from mingc.text.spoken import SpeechText


def build_speech(
    context: BuildContext, stages: SpeechStages, devices: Sequence[torch.device], media: MediaDecoder | None
) -> SpeechPipeline:
    """Load a talker on each of `devices`. `media` decodes recordings of voices."""
    options = context.options
    store = None if options.voices_dir is None else VoiceStore(options.voices_dir)
    slots = _num_slots(context.manifest, stages, options)
    loops, loaded_stages = [], []
    for index, device in enumerate(devices):
        with current_device(device):
            loaded = [context.load(name, device) for name in stages.names]
            with context.clock.phase("prepare patches and prompts (CUDA: capture)", stages.speech_llm):
                worker = TalkerWorker(
                    *loaded,
                    parameters=stages.talker,
                    flow=stages.flow,
                    vae=stages.vae,
                    num_slots=slots,
                    device=device,
                    depth=options.talker_depth,
                )
        context.memory.add(device, "talker_slots", worker.state_bytes)
        loaded_stages.append(loaded)
        scheduler = TalkerScheduler(
            SlotPool(slots),
            max_batch=worker.max_batch,
            max_prefills_per_patch=options.max_prefills_per_patch,
            max_streams=max(options.max_streams, slots - 1),
            # Files may fill a batch; a listener that comes then finds a free slot.
            max_jobs=max(1, min(worker.max_batch, (slots - 1) * 3 // 4)),
        )
        name = f"talker {index} on {device}" if len(devices) > 1 else "talker"
        loops.append(TalkerLoop(worker, scheduler, name=name, speech_lead=options.speech_lead))
    planner = create_speech_planner(
        context.artifact, stages, parse_special_tokens=options.parse_special_tokens
    )
    talkers = TalkerGroup(loops)
    _, sampler, vocoder = loaded_stages[0]
    encoder = create_voice_encoder(sampler, vocoder, stages, devices[0])
    context.memory.add(HOST, "voice_cache", CACHE_BYTES)
    return SpeechPipeline(
        planner=planner,
        talkers=talkers,
        max_segment_length=stages.talker.max_segment_length,
        speech_text=cast(SpeechText, options.speech_text),  # the options have checked it
        voices=Voices(context.artifact, stages, planner, encoder, loops[0].call, media=media, store=store),
    )


def create_voice_encoder(
    sampler: GraphsByName, vocoder: GraphsByName, stages: SpeechStages, device: torch.device
) -> VoiceEncoder:
    """The encoder of voices over the graphs of two stages, which are on `device`."""
    return VoiceEncoder(
        encode=vocoder["encode"],
        aggregate=sampler["aggregate"],
        speaker=sampler["speaker"],
        flow=stages.flow,
        vae=stages.vae,
        device=device,
    )


def create_speech_planner(
    artifact: Artifact, stages: SpeechStages, *, parse_special_tokens: bool = False
) -> SpeechPlanner:
    """The planner of speech segments, with the artifact's voices."""
    voices = {record.name: load_voice(artifact, record) for record in artifact.manifest.voices}
    for voice in voices.values():
        _check_voice(voice, stages)
    tokenizer = load_tokenizer(artifact, stages.speech_llm)
    return SpeechPlanner(
        SpeechPromptBuilder(tokenizer, parse_special_tokens=parse_special_tokens),
        voices,
        parameters=stages.talker,
        flow=stages.flow,
        vae=stages.vae,
    )


def _check_voice(voice: VoicePack, stages: SpeechStages) -> None:
    """Raises: ArtifactError when the tensors of `voice` do not fit the engines."""
    talker, flow, patches = stages.talker, stages.flow, len(voice.embeds)
    found = (voice.latents.shape, voice.embeds.shape, voice.speaker.shape)
    expected = (
        (patches * flow.latents_per_patch, flow.latent_dim),
        (patches, talker.hidden_size),
        (talker.hidden_size,),
    )
    if found != expected:
        raise ArtifactError(
            f"voice {voice.name} has tensors of shape {found}; this model's have {expected}",
            where="voices",
            fix="export again from the checkpoint of this model",
        )


def _num_slots(manifest: Manifest, stages: SpeechStages, options: EngineOptions) -> int:
    """Slots of each talker, including slot 0 for padding. Paced speech may have more slots than a batch has rows.

    By default it has twice as many: files may fill a batch, and listeners need slots beside them.
    """
    largest = min(largest_bucket(manifest, name, "B") for name in stages.names)
    graphs = [record.spec for name in stages.names for record in manifest.stages[name].graphs.values()]
    states = [dim.maximum for graph in graphs for dim in graph.dims if dim.name == "S"]
    most = max(largest, min(states, default=1) - 1) if options.speech_lead else largest
    return 1 + min(options.max_speech_seqs or 2 * largest, most)
