"""Finds the stages that a service runs, and their parameters, by walking the stage graph back from the client."""

from __future__ import annotations

from dataclasses import dataclass

from mingc.artifacts.manifest import Manifest
from mingc.artifacts.parameters import (
    AudioParameters,
    CfmParameters,
    GlyphParameters,
    ImageConditionParameters,
    ImageDitParameters,
    ImageVaeParameters,
    TalkerParameters,
    ThinkerParameters,
    VaeParameters,
    VisionParameters,
)
from mingc.artifacts.stage_graph import CLIENT, Policy, StageGraph
from mingc.errors import ArtifactError

MEDIA_PORTS = ("image", "video", "audio")


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatStages:
    """The text decoder and its encoders, with their parameters; None for an encoder that the artifact lacks.

    `ports`: the kinds of media for which the decoder has an encoder.
    """

    decoder: str
    thinker: ThinkerParameters
    vision: str | None
    vision_parameters: VisionParameters | None
    audio: str | None
    audio_parameters: AudioParameters | None
    ports: frozenset[str]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name in (self.decoder, self.vision, self.audio) if name is not None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeechStages:
    """The stages that turn text into speech."""

    speech_llm: str
    talker: TalkerParameters
    sampler: str
    flow: CfmParameters
    vocoder: str
    vae: VaeParameters

    @property
    def names(self) -> tuple[str, str, str]:
        return self.speech_llm, self.sampler, self.vocoder


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageStages:
    """The stages that turn hidden rows of the text decoder into pictures; None for glyphs that the artifact lacks."""

    condition: str
    queries: ImageConditionParameters
    glyph: str | None
    glyphs: GlyphParameters | None
    sampler: str
    dit: ImageDitParameters
    decoder: str
    vae: ImageVaeParameters

    @property
    def names(self) -> tuple[str, ...]:
        found = (self.condition, self.glyph, self.sampler, self.decoder)
        return tuple(name for name in found if name is not None)


def find_chat_stages(manifest: Manifest) -> ChatStages | None:
    """The stages of chat; None when no stage produces text. Raises: ArtifactError for stages that cannot be served."""
    graph = manifest.graph
    decoder = graph.text_decoder()
    if decoder is None:
        return None
    _check_policy(graph, decoder, "autoregressive")
    image, video, audio = (graph.producer(decoder, port) for port in MEDIA_PORTS)
    if image is not None and video is not None and image != video:
        raise ArtifactError(
            f"images come from {image} and videos from {video}; the service runs one vision encoder",
            where="stage graph",
            fix="export again with one of them",
        )
    vision = image or video
    for encoder in (vision, audio):
        if encoder is not None:
            _check_policy(graph, encoder, "once")
    return ChatStages(
        decoder=decoder,
        thinker=manifest.parameters_of(decoder, ThinkerParameters),
        vision=vision,
        vision_parameters=None if vision is None else manifest.parameters_of(vision, VisionParameters),
        audio=audio,
        audio_parameters=None if audio is None else manifest.parameters_of(audio, AudioParameters),
        ports=frozenset(port for port in MEDIA_PORTS if graph.producer(decoder, port) is not None),
    )


def find_speech_stages(manifest: Manifest) -> SpeechStages | None:
    """The stages of speech; None unless all are there. Raises: ArtifactError for stages that cannot be served."""
    graph = manifest.graph
    path = graph.speech_path()
    if path is None:
        return None
    _check_policy(graph, path.speech_llm, "autoregressive")
    _check_policy(graph, path.sampler, "loop")
    _check_policy(graph, path.vocoder, "stream")
    return SpeechStages(
        speech_llm=path.speech_llm,
        talker=manifest.parameters_of(path.speech_llm, TalkerParameters),
        sampler=path.sampler,
        flow=manifest.parameters_of(path.sampler, CfmParameters),
        vocoder=path.vocoder,
        vae=manifest.parameters_of(path.vocoder, VaeParameters),
    )


def find_image_stages(manifest: Manifest) -> ImageStages | None:
    """The stages of pictures; None unless all are there. Raises: ArtifactError for stages that cannot be served."""
    graph = manifest.graph
    path = graph.image_path()
    if path is None:
        return None
    for once in (path.condition, path.glyph, path.decoder):
        if once is not None:
            _check_policy(graph, once, "once")
    _check_policy(graph, path.sampler, "loop")
    return ImageStages(
        condition=path.condition,
        queries=manifest.parameters_of(path.condition, ImageConditionParameters),
        glyph=path.glyph,
        glyphs=None if path.glyph is None else manifest.parameters_of(path.glyph, GlyphParameters),
        sampler=path.sampler,
        dit=manifest.parameters_of(path.sampler, ImageDitParameters),
        decoder=path.decoder,
        vae=manifest.parameters_of(path.decoder, ImageVaeParameters),
    )


def _check_policy(graph: StageGraph, stage: str, expected: Policy) -> None:
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


def largest_bucket(manifest: Manifest, stage: str, dim: str) -> int:
    """The largest size of `dim` for which all graphs of `stage` that have it have a bucket. Raises: ArtifactError."""
    graphs = [record.spec for record in manifest.stages[stage].graphs.values()]
    sizes = [
        max(each.buckets) for graph in graphs for each in graph.dims if each.name == dim and each.buckets
    ]
    if not sizes:
        raise ArtifactError(
            f"no graph of {stage} has buckets for dim {dim}", where="manifest.json", fix="export again"
        )
    return min(sizes)
