"""Model parameters of built-in stages compared with the signatures of their graphs. No torch.

Both come from one checkpoint. If they disagree, the manifest was edited or combined from two artifacts, and requests
would fail or get wrong answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from mingc.artifacts.spec import GraphSpec

Graphs = Mapping[str, Mapping[str, GraphSpec]]

# Graph, tensor and axis, and the parameters of one stage whose product is the size of this axis.
_SIZES = (
    ("vision_encoder.encode", "pixels", 1, "vision_encoder.merge_size × merge_size"),
    (
        "vision_encoder.encode",
        "pixels",
        2,
        "vision_encoder.in_channels × temporal_patch_size × patch_size × patch_size",
    ),
    ("vision_encoder.encode", "embeddings", 1, "vision_encoder.hidden_size"),
    ("audio_encoder.encode", "mel", 2, "audio_encoder.frames_per_token"),
    ("audio_encoder.encode", "mel", 3, "audio_encoder.num_mels"),
    ("audio_encoder.encode", "embeddings", 2, "audio_encoder.hidden_size"),
    ("thinker.embed", "embeds", 1, "thinker.hidden_size"),
    ("thinker.head", "logits", 1, "thinker.vocab_size"),
    ("thinker.sample", "logits", 1, "thinker.vocab_size"),
    ("talker.prefill", "embeds", 1, "talker.hidden_size"),
    ("talker.step", "embeds", 1, "talker.hidden_size"),
    ("talker.step", "k_slots.0", 1, "talker.slot_tokens"),
    ("cfm.sample", "hidden", 1, "talker.hidden_size"),
    ("cfm.sample", "next_embeds", 1, "talker.hidden_size"),
    ("cfm.sample", "history", 1, "cfm.history_latents"),
    ("cfm.sample", "history", 2, "cfm.latent_dim"),
    ("cfm.sample", "noise", 1, "cfm.latents_per_patch"),
    ("cfm.sample", "step_noise", 1, "cfm.num_steps"),
    ("cfm.speaker", "vectors", 1, "cfm.speaker_dim"),
    ("audio_vae.stream", "latents", 1, "cfm.latents_per_patch"),
    ("audio_vae.stream", "latents", 2, "audio_vae.latent_dim"),
    ("audio_vae.decode", "waveform", 1, "audio_vae.hop_samples × frames_per_latent"),
    ("image_condition.condition", "rows", 1, "image_condition.width"),
    ("image_condition.condition", "rows", 1, "image_dit.caption_width"),
    ("glyph.encode", "ids", 1, "glyph.max_length"),
    ("glyph.encode", "rows", 2, "glyph.width"),
    ("glyph.encode", "rows", 2, "image_dit.caption_width"),
    ("image_dit.caption", "rows", 2, "image_dit.caption_width"),
    ("image_dit.caption", "caption", 2, "image_dit.hidden_size"),
    ("image_dit.begin", "latents", 2, "image_dit.latent_channels × patch_size × patch_size"),
    ("image_dit.end", "velocity", 2, "image_dit.latent_channels × patch_size × patch_size"),
    ("image_vae.decode", "latents", 1, "image_vae.latent_channels"),
    ("image_vae.decode", "pixels", 3, "image_vae.scale"),
)
# Stages that exchange embeddings or latents of this width.
_SHARED_WIDTHS = (
    ("vision_encoder", "thinker", "hidden_size"),
    ("audio_encoder", "thinker", "hidden_size"),
    ("cfm", "audio_vae", "latent_dim"),
    ("image_dit", "image_vae", "latent_channels"),
)
# A limit of media, the bucketed dim that holds them, and the parameters whose product one row of it holds.
_LIMITS = (
    ("vision_encoder", "max_patches", "M", ("merge_size", "merge_size")),
    ("audio_encoder", "max_frames", "T4", ("frames_per_token",)),
)


def signature_problems(parameters: Mapping[str, Any], graphs: Graphs, world_size: int) -> Iterator[str]:
    """One line per number that disagrees. Both mappings are by stage; stages, graphs and tensors may be missing."""
    for graph, tensor, axis, product in _SIZES:
        owner, _, names = product.partition(".")
        is_padded = graph == "thinker.head" and world_size > 1  # shards of the vocabulary are
        if not is_padded and {owner, graph.partition(".")[0]} <= {*parameters}:
            value = math.prod(getattr(parameters[owner], name) for name in names.split(" × "))
            yield from _size_problems(graphs, graph, tensor, axis, f"$.parameters.{product}", value)
    if {"cfm", "audio_vae"} <= {*parameters}:
        flow, vae = parameters["cfm"], parameters["audio_vae"]
        sum_of = (
            "$.parameters.cfm.latents_per_patch × $.parameters.audio_vae.samples_per_latent + tail_samples"
        )
        samples = flow.latents_per_patch * vae.samples_per_latent + vae.tail_samples
        yield from _size_problems(graphs, "audio_vae.stream", "samples", 1, sum_of, samples)
    yield from _layer_problems(parameters, graphs)
    yield from _parameter_problems(parameters)
    yield from _bucket_problems(parameters, graphs)


def _size_problems(
    graphs: Graphs, graph: str, tensor: str, axis: int, name: str, value: int
) -> Iterator[str]:
    """Compare `value`, which the parameters `name` give, with an axis of a tensor, unless its size varies."""
    spec = _find(graphs, graph)
    for each in () if spec is None else (*spec.inputs, *spec.outputs, *spec.state):
        found = each.shape[axis] if each.name == tensor and axis < len(each.shape) else None
        if isinstance(found, int) and found != value:
            yield f"{name} gives {value}, but axis {axis} of {tensor} in graph {graph} is {found}"


def _layer_problems(parameters: Mapping[str, Any], graphs: Graphs) -> Iterator[str]:
    """Compare the numbers of layers, and the page size."""
    thinker, talker = parameters.get("thinker"), parameters.get("talker")
    for graph in ("thinker.prefill_attention", "thinker.decode_attention"):
        spec = _find(graphs, graph)
        if thinker is None or spec is None:
            continue
        if len(spec.layer_instances) != thinker.num_layers:
            yield (
                f"$.parameters.thinker.num_layers is {thinker.num_layers}, but graph {graph} runs for "
                f"{len(spec.layer_instances)}"
            )
        for dim in spec.dims:
            if dim.name == "KV" and dim.multiple != thinker.page_size:
                yield (
                    f"$.parameters.thinker.page_size is {thinker.page_size}, but pages of graph {graph} have "
                    f"{dim.multiple}"
                )
    step = _find(graphs, "talker.step")
    if talker is not None and step is not None:
        layers = sum(each.name.startswith("k_slots.") for each in step.state)
        if layers != talker.num_layers:
            yield f"$.parameters.talker.num_layers is {talker.num_layers}, but graph talker.step has {layers}"


def _parameter_problems(parameters: Mapping[str, Any]) -> Iterator[str]:
    """Compare parameters with each other."""
    for stage, other, name in _SHARED_WIDTHS:
        if {stage, other} <= {*parameters}:
            width, other_width = getattr(parameters[stage], name), getattr(parameters[other], name)
            if width != other_width:
                yield f"$.parameters.{stage}.{name} is {width}, but $.parameters.{other}.{name} is {other_width}"
    vae = parameters.get("audio_vae")
    if vae is not None and vae.hop_samples * vae.frames_per_latent != vae.samples_per_latent:
        yield (
            f"$.parameters.audio_vae.samples_per_latent is {vae.samples_per_latent}, but hop_samples × "
            f"frames_per_latent is {vae.hop_samples * vae.frames_per_latent}"
        )


def _bucket_problems(parameters: Mapping[str, Any], graphs: Graphs) -> Iterator[str]:
    """Compare the limits of media with the largest bucket that would hold them."""
    for stage, limit, dim, names in _LIMITS:
        spec, given = _find(graphs, f"{stage}.encode"), parameters.get(stage)
        if spec is None or given is None:
            continue
        rows = [max(each.buckets) for each in spec.dims if each.name == dim and each.buckets]
        most = max(rows, default=math.inf) * math.prod(getattr(given, name) for name in names)
        if getattr(given, limit) > most:
            yield (
                f"$.parameters.{stage}.{limit} is {getattr(given, limit)}, but the largest bucket of graph "
                f"{stage}.encode holds {most}"
            )


def _find(graphs: Graphs, name: str) -> GraphSpec | None:
    """The graph called `STAGE.GRAPH`; None when there is none."""
    stage, _, graph = name.partition(".")
    return graphs.get(stage, {}).get(graph)
