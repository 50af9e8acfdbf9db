"""Plausible defects to plant in a copy of a finished artifact that was exported with the backend `eager`.

Each leaves sizes and hashes as a careless tool would, all correct: only content can betray it. Engines are edited as
the code that the backend stores, or exchanged; goldens and recorded figures stay those of the right artifact.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mingc.artifacts.artifact import hash_file
from mingc.artifacts.manifest import FILE_NAME, content_hash

Document = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Caught = Literal["load", "engine golden", "serve", "requests", "parameters", "no"]


@dataclass(frozen=True)
class Defect:
    """One defect.

    Attributes:
        what: what is wrong, for people.
        plant: writes it into a copy of the artifact, which `plant_defect` then seals.
        caught: the first check that refuses the artifact: every command that opens it, the goldens of engines, building
            a service, recorded requests, comparing the parameters with the recorded ones, or none.
        stages: whose engine goldens are to be replayed.
        requests: names of the recorded requests that show it.
    """

    what: str
    plant: Callable[[Path], None]
    caught: Caught
    stages: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()


def plant_defect(defect: Defect, artifact: Path, folder: Path) -> Path:
    """A copy of `artifact` in `folder` with the defect. Unchanged files are links."""
    root = Path(shutil.copytree(artifact, folder / "artifact", copy_function=os.link))
    defect.plant(root)
    _seal(root, artifact)
    return root


def _seal(root: Path, original: Path) -> None:
    """Write the sizes and hashes of all changed files, and the manifest's own hash."""
    document = _read(root)
    for name in [*document["files"]]:
        path = root / name
        if not path.exists():
            del document["files"][name]
        elif not path.samefile(original / name):
            document["files"][name] = {"size_bytes": path.stat().st_size, "sha256": hash_file(path)}
    document["sha256"] = content_hash(document)
    _write(root / FILE_NAME, json.dumps(document).encode())


def _read(root: Path) -> Document:
    document: Document = json.loads((root / FILE_NAME).read_text(encoding="utf-8"))
    return document


def _write(path: Path, data: bytes) -> None:
    """Replace a file; its other links keep their content."""
    path.unlink()
    path.write_bytes(data)


def edit(change: Callable[[Document], None]) -> Callable[[Path], None]:
    """Edit the manifest."""

    def plant(root: Path) -> None:
        document = _read(root)
        change(document)
        _write(root / FILE_NAME, json.dumps(document).encode())

    return plant


def parameter(stage: str, name: str, value: Any) -> Callable[[Path], None]:
    """Another number in the manifest."""

    def change(document: Document) -> None:
        assert document["parameters"][stage][name] != value
        document["parameters"][stage][name] = value

    return edit(change)


def weights(stage: str, change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    """Edit the tensors of a stage's weights file."""

    def plant(root: Path) -> None:
        path = root / _read(root)["stages"][stage]["weights"][0][0]
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)

    return plant


def code(
    engine: str, pattern: str, replacement: str | Callable[[re.Match[str]], str], count: int = 0
) -> Callable[[Path], None]:
    """Edit the code of an engine, `stage.graph`: replace matches of a regular expression, 0: all of them."""

    def plant(root: Path) -> None:
        path = root / "engines" / f"{engine}.eager"
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
        changed, found = re.subn(pattern, replacement, metadata["code"], count=count)
        assert found and changed != metadata["code"], f"{engine} has no {pattern}"
        path.unlink()
        save_file(tensors, path, metadata={**metadata, "code": changed})

    return plant


def all_of(*plants: Callable[[Path], None]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        for each in plants:
            each(root)

    return plant


def swap(first: str, second: str) -> Callable[[Path], None]:
    """Exchange two files."""

    def plant(root: Path) -> None:
        one, other = (root / name for name in (first, second))
        spare = root / "spare"
        one.rename(spare)
        other.rename(one)
        spare.rename(other)

    return plant


def scale(name: str, factor: float = 1.05) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = tensors[name] * factor

    return change


def exchange(first: str, second: str) -> Callable[[Tensors], None]:
    """Exchange all tensors of two prefixes."""

    def change(tensors: Tensors) -> None:
        for name in [each for each in tensors if each.startswith(first)]:
            other = second + name.removeprefix(first)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return change


def experts(layer: int, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Change the stacked weights of a layer's experts."""

    def apply(tensors: Tensors) -> None:
        for name in ("gate_up", "down"):
            key = f"layers.{layer}.feed_forward.{name}"
            tensors[key] = change(tensors[key].clone())

    return apply


def _exchange_two(values: torch.Tensor) -> torch.Tensor:
    values[[2, 5]] = values[[5, 2]]
    return values


def _louder_last(values: torch.Tensor) -> torch.Tensor:
    values[-4:] *= 1.05
    return values


def put(name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        value = make(tensors[name]).to(tensors[name].dtype)
        assert value.shape == tensors[name].shape and not torch.equal(value, tensors[name])
        tensors[name] = value

    return change


def _drop(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def _uniform_steps(steps: torch.Tensor) -> torch.Tensor:
    return torch.full_like(steps, 1 / len(steps))


def _grid_of_twelve(steps: torch.Tensor) -> torch.Tensor:
    """The first ten of twelve steps of the same shape."""
    cumulative = torch.cat([torch.zeros(1), steps.cumsum(0)])
    place = torch.linspace(0, len(steps), 13)
    low = place.floor().long().clamp(max=len(steps) - 1)
    times = cumulative[low] + (place - low) * (cumulative[low + 1] - cumulative[low])
    return times.diff()[: len(steps)]


def _each_graph(stage: str, change: Callable[[str, Document], None]) -> Callable[[Path], None]:
    def apply(document: Document) -> None:
        for name, graph in document["stages"][stage]["graphs"].items():
            change(name, graph)

    return edit(apply)


def _without_layer(number: int) -> Callable[[Path], None]:
    """Leave a layer out of every graph, and count one less."""

    def change(document: Document) -> None:
        for graph in document["stages"]["thinker"]["graphs"].values():
            names = graph["spec"]["layer_instances"]
            graph["spec"]["layer_instances"] = [
                name for name in names if not name.startswith(f"layers.{number}.")
            ]
        document["parameters"]["thinker"]["num_layers"] -= 1

    return edit(change)


def _reversed_layers(name: str, graph: Document) -> None:
    if name.endswith("attention"):
        graph["spec"]["layer_instances"] = (
            graph["spec"]["layer_instances"][:1] + (graph["spec"]["layer_instances"][:0:-1])
        )


def _state_dtype(name: str, graph: Document) -> None:
    for state in graph["spec"]["state"]:
        if state["name"].startswith("v_"):
            state["dtype"] = "bfloat16"


def _other_fingerprint(**values: Any) -> Callable[[Path], None]:
    return edit(lambda document: document["fingerprint"].update(values))


def _exchange_engines(document: Document) -> None:
    graphs = document["stages"]["thinker"]["graphs"]
    graphs["dense"]["engines"], graphs["head"]["engines"] = (
        graphs["head"]["engines"],
        graphs["dense"]["engines"],
    )


def _exchange_goldens(document: Document) -> None:
    graphs = document["stages"]["cfm"]["graphs"]
    graphs["aggregate"]["golden"], graphs["speaker"]["golden"] = (
        graphs["speaker"]["golden"],
        graphs["aggregate"]["golden"],
    )


def _golden_without_outputs(root: Path) -> None:
    """A golden file that compares nothing, beside an engine that is wrong."""
    path = root / "goldens/cfm.sample.safetensors"
    tensors = {name: value for name, value in load_file(path).items() if name.startswith("in.")}
    path.unlink()
    save_file(tensors, path)


def _rerouted_edge(document: Document) -> None:
    for edge in document["graph"]["edges"]:
        if (edge["source"], edge["target"]) == ("audio_encoder", "thinker"):
            edge["source"] = "vision_encoder"


def _other_policy(document: Document) -> None:
    for node in document["graph"]["nodes"]:
        if node["name"] == "cfm":
            node["policy"] = "once"


def _exchange_voices(document: Document) -> None:
    first, second = document["voices"]
    for key in ("file", "num_patches"):
        first[key], second[key] = second[key], first[key]


def _voice(change: Callable[[Tensors], None]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / _read(root)["voices"][0]["file"]
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file({name: value.contiguous() for name, value in tensors.items()}, path)

    return plant


def _tokenizer(stage: str, change: Callable[[Document], None]) -> Callable[[Path], None]:
    def plant(root: Path) -> None:
        path = root / _read(root)["tokenizers"][stage]
        document: Document = json.loads(path.read_text(encoding="utf-8"))
        change(document)
        _write(path, json.dumps(document).encode())

    return plant


def _first_merge_later(document: Document) -> None:
    merges = document["model"]["merges"]
    merges[0], merges[40] = merges[40], merges[0]


def _exchange_audio_and_video(document: Document) -> None:
    """Prompts have these ids from the manifest; a client that may write special tokens has them from here."""
    tokens = {each["content"]: each for each in document["added_tokens"]}
    one, other = tokens["<audio>"], tokens["<video>"]
    one["id"], other["id"] = other["id"], one["id"]


def _exchange_tokenizers(document: Document) -> None:
    own = document["tokenizers"]
    own["thinker"], own["talker"] = own["talker"], own["thinker"]


def _truncate_weights(root: Path) -> None:
    path = root / _read(root)["stages"]["cfm"]["weights"][0][0]
    _write(path, path.read_bytes()[:-64])


def _unknown_backend(document: Document) -> None:
    for graph in document["stages"]["cfm"]["graphs"].values():
        for engine in graph["engines"]:
            engine["backend"] = "tensorrt"


def _halves(values: torch.Tensor) -> torch.Tensor:
    """The second half of the columns first."""
    return torch.cat(values.chunk(2, -1)[::-1], -1)


THINKER, TALKER, CFM, VAE = ("thinker",), ("talker",), ("cfm",), ("audio_vae",)

DEFECTS: Mapping[str, Defect] = {
    # Manifest: fields that opening compares. test_signatures.py and test_parameter_ranges.py have more.
    "schema": Defect("schema of a later mingc", edit(lambda document: document.update(schema=99)), "load"),
    "device": Defect("engines for CUDA on a CPU", _other_fingerprint(device="cuda"), "load"),
    "world-size": Defect("weights of one rank, manifest of two", _other_fingerprint(world_size=2), "load"),
    "unknown-backend": Defect(
        "engines of a backend that is not there", edit(_unknown_backend), "engine golden", CFM
    ),
    "policy": Defect("run policy of the sampler", edit(_other_policy), "serve", CFM),
    "edge": Defect("audio embeddings from the vision encoder", edit(_rerouted_edge), "serve"),
    "token-id": Defect(
        "a token id beyond the vocabulary", parameter("thinker", "image_patch_token", 99999), "load"
    ),
    "num-steps": Defect("steps of the solver, manifest only", parameter("cfm", "num_steps", 12), "load"),
    # Files.
    "weight-missing": Defect(
        "a weight is missing", weights("talker", _drop("stack.layers.1.mlp_norm")), "engine golden", TALKER
    ),
    "weights-cut": Defect("a weights file is cut off", _truncate_weights, "engine golden", CFM),
    "voice-width": Defect(
        "a voice of a wider model",
        _voice(lambda tensors: tensors.update(embeds=torch.cat([tensors["embeds"]] * 2, -1))),
        "serve",
    ),
    "tokenizers": Defect("tokenizers of thinker and talker exchanged", edit(_exchange_tokenizers), "serve"),
    "engines-exchanged": Defect(
        "engines of two graphs exchanged", edit(_exchange_engines), "engine golden", THINKER
    ),
    "goldens-exchanged": Defect(
        "goldens of two graphs exchanged", edit(_exchange_goldens), "engine golden", CFM
    ),
    "golden-empty": Defect(
        "a golden without outputs beside a wrong engine",
        all_of(_golden_without_outputs, weights("cfm", scale("condition.weight", 2.0))),
        "engine golden",
        CFM,
    ),
    "state-dtype": Defect(
        "dtype of a KV state", _each_graph("talker", _state_dtype), "engine golden", TALKER
    ),
    # Weights.
    "experts-exchanged": Defect(
        "two experts of the first sparse layer exchanged",
        weights("thinker", experts(1, _exchange_two)),
        "engine golden",
        THINKER,
    ),
    "experts-exchanged-last": Defect(
        "two experts of the last layer exchanged",
        weights("thinker", experts(3, _exchange_two)),
        "requests",
        THINKER,
        ("text",),
    ),
    "experts-scaled-last": Defect(
        "last experts of the last layer 5 % too large",
        weights("thinker", experts(3, _louder_last)),
        "requests",
        THINKER,
        ("text",),
    ),
    "layers-exchanged": Defect(
        "two layers exchanged in the weights file",
        weights("thinker", exchange("layers.2.", "layers.3.")),
        "requests",
        THINKER,
        ("text",),
    ),
    "layers-reversed": Defect(
        "layers in another order in the manifest",
        _each_graph("thinker", _reversed_layers),
        "requests",
        THINKER,
        ("text",),
    ),
    "layer-left-out": Defect("a layer left out", _without_layer(2), "requests", THINKER, ("text",)),
    "router-bias": Defect(
        "router bias lost",
        weights("thinker", put("layers.1.feed_forward.router.bias", torch.zeros_like)),
        "engine golden",
        THINKER,
    ),
    "router-kinds": Defect(
        "router weights of text and audio exchanged",
        weights("thinker", put("layers.1.feed_forward.router.weight", lambda value: value.flip(0))),
        "engine golden",
        THINKER,
    ),
    "other-rank": Defect(
        "heads in the order of another rank's shard",
        weights("thinker", put("layers.0.attention.dense", _halves)),
        "engine golden",
        THINKER,
    ),
    "thinker-rope": Defect(
        "base of the rotary embedding",
        weights("thinker", put("embed.inv_freq", lambda value: value**0.9)),
        "engine golden",
        THINKER,
    ),
    "talker-scaled": Defect(
        "5 % scale inside the speech LLM",
        weights("talker", scale("stack.layers.1.down.weight")),
        "engine golden",
        TALKER,
    ),
    "cfm-scaled": Defect(
        "5 % scale inside the DiT", weights("cfm", scale("dit.blocks.1.down.weight")), "engine golden", CFM
    ),
    "vae-scaled": Defect(
        "5 % scale inside the audio decoder",
        weights("audio_vae", scale("decoder.stack.layers.2.down.weight")),
        "engine golden",
        VAE,
    ),
    "talker-finetuned": Defect(
        "engines and goldens older than the weights",
        weights(
            "talker",
            put("stack.layers.0.qkv.weight", lambda value: value + 0.01 * torch.randn_like(value)),
        ),
        "engine golden",
        TALKER,
    ),
    "time-grid-uniform": Defect(
        "uniform time grid", weights("cfm", put("step_sizes", _uniform_steps)), "engine golden", CFM
    ),
    "time-grid-of-12": Defect(
        "first ten of twelve steps", weights("cfm", put("step_sizes", _grid_of_twelve)), "engine golden", CFM
    ),
    "stft-window": Defect(
        "rectangular STFT window",
        weights("audio_vae", put("decoder.head.window", torch.ones_like)),
        "engine golden",
        VAE,
    ),
    "stft-window-shifted": Defect(
        "STFT window shifted by one hop",
        weights("audio_vae", put("decoder.head.window", lambda value: value.roll(882))),
        "engine golden",
        VAE,
    ),
    "position-table": Defect(
        "position table of images mirrored",
        weights("vision_encoder", put("position_table", lambda value: value.flip(0))),
        "engine golden",
        ("vision_encoder",),
    ),
    # Engines with the right goldens.
    "guidance-formula": Defect(
        "guidance from the unconditional side: u + g (c - u)",
        code(
            "cfm.sample",
            r"(sub_\w+) = torch\.ops\.aten\.sub\.Tensor\((getitem_\w+), (getitem_\w+)\);  \3 = None\n"
            r"(    mul_\w+ = .*\n    add_\w+ = torch\.ops\.aten\.add\.Tensor\()\2,",
            r"\1 = torch.ops.aten.sub.Tensor(\2, \3)\n\4\3,",
        ),
        "engine golden",
        CFM,
    ),
    "history-not-moved": Defect(
        "history window never moves",
        code(
            "cfm.sample", r"(slice_\w+ = torch\.ops\.aten\.slice\.Tensor\(cat_\w+, 1,) 4, \d+\)", r"\1 0, 32)"
        ),
        "engine golden",
        CFM,
    ),
    "router-scale": Defect(
        "router scale 2.5 → 1",
        code("thinker.decode_experts", r"reciprocal, 2\.5\)", "reciprocal, 1.0)"),
        "engine golden",
        THINKER,
    ),
    "router-groups": Defect(
        "one expert group kept in place of two",
        code("thinker.prefill_experts", r"topk\.default\(sum_1, 2\)", "topk.default(sum_1, 1)"),
        "engine golden",
        THINKER,
    ),
    "router-group-score": Defect(
        "groups scored by their best expert alone",
        code("thinker.decode_experts", r"topk\.default\(view, 2\)", "topk.default(view, 1)"),
        "engine golden",
        THINKER,
    ),
    "norm-eps": Defect(
        "norm epsilon 1e-6 → 1e-3",
        code("thinker.prefill_attention", r", 1e-06\)", ", 0.001)"),
        "engine golden",
        THINKER,
    ),
    "rope-pairing": Defect(
        "rotary pairs beside each other instead of half a head apart",
        code(
            "thinker.decode_attention",
            r"torch\.ops\.aten\.slice\.Tensor\((mul_\w+), 2, (0, 32|32, 64)\)",
            lambda match: (
                f"torch.ops.aten.slice.Tensor({match[1]}, 2, {'0' if match[2] == '0, 32' else '1'}, 64, 2)"
            ),
        ),
        "engine golden",
        THINKER,
    ),
    "vae-window": Defect(
        "attention window of the audio decoder 32 → 24 frames",
        code(
            "audio_vae.stream", r"(sub_\w+ = torch\.ops\.aten\.sub\.Tensor\(unsqueeze_\w+,) 32\)", r"\1 24)"
        ),
        "engine golden",
        VAE,
    ),
    "vae-overlap": Defect(
        "overlap of the previous patch not kept",
        code("audio_vae.stream", r"index_put__7 = .*\n", "index_put__7 = None\n"),
        "engine golden",
        VAE,
    ),
    "vae-last-latent": Defect(
        "last latent of a patch is its first",
        code("audio_vae.stream", r"select\.int\(tensors_0, 1, -1\)", "select.int(tensors_0, 1, 0)"),
        "engine golden",
        VAE,
    ),
    "talker-kv-lost": Defect(
        "keys of the first layer not written",
        code(
            "talker.step", r"index_put_\.default\(tensors_3, (.*?)\)", r"index_put.default(tensors_3, \1)", 1
        ),
        "engine golden",
        TALKER,
    ),
    # What an engine golden does not see.
    "guidance": Defect(
        "default guidance 2 → 3", parameter("cfm", "guidance", 3.0), "requests", requests=("speech",)
    ),
    "sigma": Defect(
        "default sigma", parameter("cfm", "sigma", 0.5), "requests", requests=("speech in segments",)
    ),
    "temperature": Defect(
        "default temperature", parameter("cfm", "temperature", 0.5), "requests", requests=("speech",)
    ),
    "stop-threshold": Defect("stop threshold", parameter("talker", "stop_threshold", 0.9), "parameters"),
    "min-stop-step": Defect(
        "first step that may stop",
        parameter("talker", "min_stop_step", 2),
        "requests",
        requests=("speech until it stops",),
    ),
    "max-steps": Defect("longest segment", parameter("talker", "max_steps", 50), "parameters"),
    "segment-length": Defect(
        "longest text of a segment",
        parameter("talker", "max_segment_length", 5),
        "requests",
        requests=("speech with settings",),
    ),
    "sample-rate": Defect(
        "sample rate of speech",
        parameter("audio_vae", "sample_rate", 22050),
        "requests",
        requests=("speech",),
    ),
    "input-rate": Defect(
        "sample rate of audio input",
        parameter("audio_encoder", "sample_rate", 8000),
        "requests",
        requests=("audio",),
    ),
    "stft-hop": Defect(
        "hop of the audio front end",
        parameter("audio_encoder", "hop_samples", 200),
        "requests",
        requests=("audio",),
    ),
    "max-pixels": Defect("largest image", parameter("vision_encoder", "max_pixels", 65536), "parameters"),
    "image-mean": Defect(
        "mean of pixels",
        parameter("vision_encoder", "image_mean", [0.5, 0.5, 0.5]),
        "requests",
        requests=("image",),
    ),
    "video-fps": Defect(
        "frames a second of videos", parameter("vision_encoder", "video_fps", 1.0), "parameters"
    ),
    "stop-tokens": Defect(
        "tokens that end an answer",
        parameter("thinker", "stop_token_ids", [7]),
        "requests",
        requests=("spoken chat",),
    ),
    "patch-token": Defect(
        "placeholder of images", parameter("thinker", "image_patch_token", 7), "requests", requests=("image",)
    ),
    "system-text": Defect(
        "system text",
        parameter("thinker", "default_system_text", "You sing."),
        "requests",
        requests=("text",),
    ),
    "merge-moved": Defect(
        "a merge of the thinker's tokenizer has another rank",
        _tokenizer("thinker", _first_merge_later),
        "parameters",
        requests=("text",),
    ),
    "dtype": Defect(
        "float32 artifact called bfloat16, whose tolerances are larger",
        _other_fingerprint(dtype="bfloat16"),
        "parameters",
        requests=("text",),
    ),
    "special-tokens": Defect(
        "ids of two special tokens exchanged",
        _tokenizer("thinker", _exchange_audio_and_video),
        "parameters",
        requests=("text",),
    ),
    "voices-exchanged": Defect(
        "files of two voices exchanged", edit(_exchange_voices), "requests", requests=("speech",)
    ),
    "voice-scaled": Defect(
        "latents of a voice 5 % too large",
        _voice(lambda tensors: tensors.update(latents=1.05 * tensors["latents"])),
        "requests",
        requests=("speech",),
    ),
}
