"""Tokenizers and the speech planner of an artifact."""

from __future__ import annotations

from mingc.artifacts.artifact import Artifact
from mingc.errors import ArtifactError
from mingc.prompts.speech_prompt import SpeechPromptBuilder
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.service.served_stages import SpeechStages
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
