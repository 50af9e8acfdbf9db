"""Preprocessing of an artifact: its tokenizers, chat processor and speech planner."""

from __future__ import annotations

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.parameters import (
    AudioParameters,
    CfmParameters,
    TalkerParameters,
    ThinkerParameters,
    VaeParameters,
    VisionParameters,
)
from mingc.artifacts.stage_graph import SpeechPath
from mingc.errors import ArtifactError
from mingc.prompts.chat import ChatProcessor
from mingc.prompts.media_decoder import MediaDecoder
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.talker.planner import SpeechPlanner, VoicePack, load_voice


def load_tokenizer(artifact: Artifact, stage: str) -> TextTokenizer:
    """The tokenizer of `stage`. Raises: ArtifactError when the artifact has none."""
    file = artifact.manifest.tokenizers.get(stage)
    if file is None:
        raise ArtifactError(
            f"the artifact has no tokenizer of the {stage}",
            where="manifest.json",
            fix="export again from a checkpoint with tokenizers; mingc probe needs none",
        )
    return TextTokenizer.from_file(artifact.path(file))


def create_chat_processor(
    artifact: Artifact,
    decoder: str,
    tokenizer: TextTokenizer,
    *,
    max_tokens: int | None = None,
    parse_special_tokens: bool = False,
    media: MediaDecoder | None = None,
    cached_characters: int = 0,
) -> ChatProcessor:
    """The prompt builder of the text decoder `decoder`; see `ChatProcessor`."""
    manifest = artifact.manifest
    graph = manifest.graph
    vision, audio = (
        graph.producer(decoder, "image") or graph.producer(decoder, "video"),
        graph.producer(decoder, "audio"),
    )
    return ChatProcessor(
        tokenizer,
        manifest.parameters_of(decoder, ThinkerParameters),
        vision=None if vision is None else manifest.parameters_of(vision, VisionParameters),
        audio=None if audio is None else manifest.parameters_of(audio, AudioParameters),
        max_tokens=max_tokens,
        parse_special_tokens=parse_special_tokens,
        decoder=media,
        cached_characters=cached_characters,
    )


def create_speech_planner(
    artifact: Artifact, path: SpeechPath, *, parse_special_tokens: bool = False
) -> SpeechPlanner:
    """The planner of speech segments, with the artifact's voices."""
    manifest = artifact.manifest
    talker = manifest.parameters_of(path.speech_llm, TalkerParameters)
    flow = manifest.parameters_of(path.sampler, CfmParameters)
    voices = {record.name: load_voice(artifact, record) for record in manifest.voices}
    for voice in voices.values():
        _check_voice(voice, talker, flow)
    tokenizer = load_tokenizer(artifact, path.speech_llm)
    return SpeechPlanner(
        SpeechPromptBuilder(tokenizer, parse_special_tokens=parse_special_tokens),
        voices,
        parameters=talker,
        flow=flow,
        vae=manifest.parameters_of(path.vocoder, VaeParameters),
    )


def _check_voice(voice: VoicePack, talker: TalkerParameters, flow: CfmParameters) -> None:
    """Raises: ArtifactError when the tensors of `voice` do not fit the engines."""
    patches = len(voice.embeds)
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
