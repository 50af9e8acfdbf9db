"""Speech planner: turns a piece of text and the speech parameters of a request into a segment for the talker loop.

It also loads voices. It runs no engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from mingc.artifacts.artifact import Artifact
from mingc.artifacts.manifest import VoiceRecord
from mingc.artifacts.parameters import CfmParameters, TalkerParameters, VaeParameters
from mingc.errors import ArtifactError, RequestError
from mingc.prompts.speech_prompt import SpeechPrompt, SpeechPromptBuilder, caption_instruction
from mingc.runtime.noise import NoiseSource
from mingc.runtime.request import SpeechParams
from mingc.runtime.talker.worker import SpeechSegment
from mingc.runtime.voices import VoicePack, voice_not_found

_LEAST_PATCHES = 30  # of speech that must fit behind a voice: 10 s


def load_voice(artifact: Artifact, record: VoiceRecord) -> VoicePack:
    """Load the tensors of a voice. Raises: ArtifactError when the file does not match the manifest."""
    path = artifact.path(record.file)
    try:
        tensors = load_file(path)
        latents, embeds, speaker = tensors["latents"][0], tensors["embeds"], tensors["speaker"]
    except (OSError, KeyError, IndexError, SafetensorError) as error:
        raise ArtifactError(f"voice {record.name} cannot be read: {error}", where=str(path)) from error
    if len(embeds) != record.num_patches:
        raise ArtifactError(
            f"voice {record.name} has {len(embeds)} patches, {record.num_patches} recorded", where=str(path)
        )
    return VoicePack(
        name=record.name, transcript=record.transcript, latents=latents, embeds=embeds, speaker=speaker
    )


class SpeechPlanner:
    """Creates segments for one artifact. Stateless and thread-safe."""

    def __init__(
        self,
        builder: SpeechPromptBuilder,
        voices: Mapping[str, VoicePack],
        *,
        parameters: TalkerParameters,
        flow: CfmParameters,
        vae: VaeParameters,
    ) -> None:
        self._builder = builder
        self._voices = voices
        self._parameters = parameters
        self._flow = flow
        self._patch_seconds = flow.latents_per_patch * vae.samples_per_latent / vae.sample_rate

    def check(self, speech: SpeechParams) -> None:
        """Validate speech parameters. Raises: RequestError for an unknown voice or invalid instructions."""
        self._voice(speech)
        caption_instruction(speech.instructions or "")

    def segment(self, text: str, index: int, speech: SpeechParams, noise: NoiseSource) -> SpeechSegment:
        """Create the segment that speaks a normalised piece of text in the requested voice and style.

        Raises: RequestError when the prompt leaves no room for speech.
        """
        voice = self._voice(speech)
        prompt = self._prompt(text, voice, caption_instruction(speech.instructions or ""))
        embeds = np.zeros((0, self._parameters.hidden_size), np.float32)
        if voice is not None:
            embeds = np.concatenate([voice.speaker[None], voice.embeds[: len(prompt.patch_rows)]])
        return SpeechSegment(
            input_ids=prompt.token_ids,
            embed_rows=np.concatenate([prompt.speaker_rows, prompt.patch_rows]),
            embeds=embeds,
            num_prefix=prompt.prefix_length,
            history=self.history(voice),
            noise=noise,
            index=index,
            max_patches=self.max_patches(text, len(prompt.token_ids), speech.max_steps),
            guidance=_given(speech.guidance, self._flow.guidance),
            sigma=_given(speech.sigma, self._flow.sigma),
            temperature=_given(speech.temperature, self._flow.temperature),
        )

    def check_room(self, voice: VoicePack) -> None:
        """Raises: RequestError when the recording and its transcript leave too little room for speech."""
        size = len(self._prompt("a", voice, None).token_ids)
        room, least = self._parameters.slot_tokens - size, min(_LEAST_PATCHES, self._parameters.max_steps)
        if room < least:
            raise RequestError(
                f"the voice takes {size} of {self._parameters.slot_tokens} tokens, which leaves no room for speech",
                where="ref_text",
                fix="send a shorter recording with its words",
                param="ref_text",
            )

    def _prompt(self, text: str, voice: VoicePack | None, instruction: str | None) -> SpeechPrompt:
        return self._builder.build(
            text,
            num_speakers=0 if voice is None else 1,
            transcript=None if voice is None else voice.transcript,
            num_prompt_patches=0 if voice is None else len(voice.embeds),
            instruction=instruction,
        )

    def _voice(self, speech: SpeechParams) -> VoicePack | None:
        """The requested or default voice; None if the artifact has no voices."""
        if isinstance(speech.reference, VoicePack):
            return speech.reference
        name = speech.voice or self._parameters.default_voice
        if name is None:
            return None
        voice = self._voices.get(name)
        if voice is None:
            raise voice_not_found(name, sorted(self._voices))
        return voice

    def history(self, voice: VoicePack | None) -> NDArray[np.float32]:
        """Latents before the first patch: the end of the recording, with zeros in front (spec: talker.md §5)."""
        history = np.zeros((self._flow.history_latents, self._flow.latent_dim), np.float32)
        if voice is not None:
            latents = voice.latents[-self._flow.history_latents :]
            history[len(history) - len(latents) :] = latents
        return history

    def max_patches(self, text: str, prompt_tokens: int, requested: int | None) -> int:
        """The smallest of four caps: of the model, the slot, the client, and the length of the text.

        The last cap guards against a model that never stops. It is about twice the time of a slow reading, rounded up
        to whole patches, because the reference stops only after the time has passed. Raises: RequestError without room.
        """
        parameters = self._parameters
        room = parameters.slot_tokens - prompt_tokens
        if room < 1:
            raise RequestError(
                f"the speech prompt has {prompt_tokens} tokens, a slot holds {parameters.slot_tokens}",
                fix="send shorter instructions, or shorter sentences: each is spoken on its own",
            )
        seconds = max(parameters.cap_min_seconds, len(text) * parameters.cap_seconds_per_character)
        caps = [parameters.max_steps, room, math.ceil(seconds / self._patch_seconds)]
        if requested is not None:
            caps.append(requested)
        return max(1, min(caps))


def _given(value: float | None, default: float) -> float:
    return default if value is None else value
