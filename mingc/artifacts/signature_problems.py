"""Model parameters of built-in stages compared with the signatures of their graphs. No torch.

Both come from one checkpoint. If they disagree, the manifest was edited or combined from two artifacts, and requests
would fail or get wrong answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mingc.artifacts.spec import GraphSpec, TensorSpec

Parameters = Mapping[str, Any]
Graphs = Mapping[str, GraphSpec]


def signature_problems(
    parameters: Mapping[str, Parameters], graphs: Mapping[str, Graphs], world_size: int
) -> Iterator[str]:
    """One line per number that disagrees. Both mappings are by stage; stages, graphs and tensors may be missing."""
    for stage, expected in _expected(parameters, world_size).items():
        for (graph, tensor, axis), (name, value) in expected.items():
            spec = graphs.get(stage, {}).get(graph)
            found = _size(spec, tensor, axis) if spec is not None else None
            if found is not None and found != value:
                yield f"{name} gives {value}, but axis {axis} of {tensor} in graph {stage}.{graph} is {found}"
    yield from _layer_problems(parameters, graphs)
    yield from _bucket_problems(parameters, graphs)


_Place = tuple[str, str, int]  # graph, tensor, axis
_Value = tuple[str, int]  # description and size


def _expected(parameters: Mapping[str, Parameters], world_size: int) -> dict[str, dict[_Place, _Value]]:
    """The sizes that the parameters give for axes of tensors, by stage."""
    expected: dict[str, dict[_Place, _Value]] = {}

    def expect(stage: str, graph: str, tensor: str, axis: int, owner: str, *names: str) -> None:
        """The product of the parameters `names` of stage `owner`."""
        given = parameters.get(owner)
        if given is None or stage not in parameters:
            return
        value = 1
        for name in names:
            value *= given[name]
        described = f"$.parameters.{owner}.{' × '.join(names)}"
        expected.setdefault(stage, {})[graph, tensor, axis] = (described, value)

    expect("vision_encoder", "encode", "pixels", 1, "vision_encoder", "merge_size", "merge_size")
    expect(
        *("vision_encoder", "encode", "pixels", 2, "vision_encoder"),
        *("in_channels", "temporal_patch_size", "patch_size", "patch_size"),
    )
    expect("vision_encoder", "encode", "embeddings", 1, "vision_encoder", "hidden_size")
    expect("audio_encoder", "encode", "mel", 2, "audio_encoder", "frames_per_token")
    expect("audio_encoder", "encode", "mel", 3, "audio_encoder", "num_mels")
    expect("audio_encoder", "encode", "embeddings", 2, "audio_encoder", "hidden_size")
    expect("thinker", "embed", "embeds", 1, "thinker", "hidden_size")
    if world_size == 1:  # shards of the vocabulary are padded
        expect("thinker", "head", "logits", 1, "thinker", "vocab_size")
    expect("thinker", "sample", "logits", 1, "thinker", "vocab_size")
    expect("talker", "prefill", "embeds", 1, "talker", "hidden_size")
    expect("talker", "step", "embeds", 1, "talker", "hidden_size")
    expect("talker", "step", "k_slots.0", 1, "talker", "slot_tokens")
    expect("cfm", "sample", "hidden", 1, "talker", "hidden_size")
    expect("cfm", "sample", "next_embeds", 1, "talker", "hidden_size")
    expect("cfm", "sample", "history", 1, "cfm", "history_latents")
    expect("cfm", "sample", "history", 2, "cfm", "latent_dim")
    expect("cfm", "sample", "noise", 1, "cfm", "latents_per_patch")
    expect("cfm", "sample", "step_noise", 1, "cfm", "num_steps")
    expect("cfm", "speaker", "vectors", 1, "cfm", "speaker_dim")
    expect("audio_vae", "stream", "latents", 1, "cfm", "latents_per_patch")
    expect("audio_vae", "stream", "latents", 2, "audio_vae", "latent_dim")
    expect("audio_vae", "decode", "waveform", 1, "audio_vae", "hop_samples", "frames_per_latent")
    flow, vae = parameters.get("cfm"), parameters.get("audio_vae")
    if flow is not None and vae is not None:
        described = (
            "$.parameters.cfm.latents_per_patch × $.parameters.audio_vae.samples_per_latent + tail_samples"
        )
        samples = flow["latents_per_patch"] * vae["samples_per_latent"] + vae["tail_samples"]
        expected["audio_vae"]["stream", "samples", 1] = (described, samples)
    return expected


def _layer_problems(parameters: Mapping[str, Parameters], graphs: Mapping[str, Graphs]) -> Iterator[str]:
    """Layers, pages, and stages that exchange embeddings or latents of different widths."""
    if "thinker" in parameters:
        thinker = parameters["thinker"]
        for graph in ("prefill_attention", "decode_attention"):
            spec = graphs.get("thinker", {}).get(graph)
            if spec is None:
                continue
            if len(spec.layer_instances) != thinker["num_layers"]:
                yield (
                    f"$.parameters.thinker.num_layers is {thinker['num_layers']}, but graph thinker.{graph} runs for "
                    f"{len(spec.layer_instances)}"
                )
            for dim in spec.dims:
                if dim.name == "KV" and dim.multiple != thinker["page_size"]:
                    yield (
                        f"$.parameters.thinker.page_size is {thinker['page_size']}, but pages of graph "
                        f"thinker.{graph} have {dim.multiple}"
                    )
    step = graphs.get("talker", {}).get("step")
    if "talker" in parameters and step is not None:
        layers = sum(each.name.startswith("k_slots.") for each in step.state)
        if layers != parameters["talker"]["num_layers"]:
            given = parameters["talker"]["num_layers"]
            yield f"$.parameters.talker.num_layers is {given}, but graph talker.step has {layers}"
    for stage, other, name in (
        ("vision_encoder", "thinker", "hidden_size"),
        ("audio_encoder", "thinker", "hidden_size"),
        ("cfm", "audio_vae", "latent_dim"),
    ):
        if stage in parameters and other in parameters and parameters[stage][name] != parameters[other][name]:
            yield (
                f"$.parameters.{stage}.{name} is {parameters[stage][name]}, but $.parameters.{other}.{name} is "
                f"{parameters[other][name]}"
            )
    if "audio_vae" in parameters:
        vae = parameters["audio_vae"]
        if vae["hop_samples"] * vae["frames_per_latent"] != vae["samples_per_latent"]:
            yield (
                f"$.parameters.audio_vae.samples_per_latent is {vae['samples_per_latent']}, but hop_samples × "
                f"frames_per_latent is {vae['hop_samples'] * vae['frames_per_latent']}"
            )


def _bucket_problems(parameters: Mapping[str, Parameters], graphs: Mapping[str, Graphs]) -> Iterator[str]:
    """Limits of media beyond the largest bucket that would hold them."""
    for stage, dim, limit, per_row in (
        ("vision_encoder", "M", "max_patches", ("merge_size", "merge_size")),
        ("audio_encoder", "T4", "max_frames", ("frames_per_token",)),
    ):
        spec = graphs.get(stage, {}).get("encode")
        given = parameters.get(stage)
        if spec is None or given is None:
            continue
        most = max(
            (max(each.buckets) for each in spec.dims if each.name == dim and each.buckets), default=None
        )
        for name in per_row:
            most = most and most * given[name]
        if most is not None and given[limit] > most:
            where = f"$.parameters.{stage}.{limit}"
            yield f"{where} is {given[limit]}, but the largest bucket of graph {stage}.encode holds {most}"


def _size(spec: GraphSpec, name: str, axis: int) -> int | None:
    """The size of an axis; None when it varies or the graph lacks the tensor."""
    tensors: tuple[TensorSpec, ...] = (*spec.inputs, *spec.outputs, *spec.state)
    for tensor in tensors:
        if tensor.name == name and axis < len(tensor.shape):
            size = tensor.shape[axis]
            return size if isinstance(size, int) else None
    return None
