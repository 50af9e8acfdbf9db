"""Synthetic checkpoint: random weights with the shapes that a folder of configs specifies, for benchmarking.

Each tensor is sampled when it is read, from a generator seeded by its name: two reads are equal and nothing is stored.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mingc.errors import CheckpointError
from mingc.export.checkpoint import Checkpoint, Part, TensorEntry, open_configs
from mingc.export.stage import Shard
from mingc.export.stages import discover

_CONTINUE_LOGIT = 20.0  # against 0 for stopping: the probability of a stop is 2e-9
_T5_HEAD = 64  # T5 does not scale scores: its initialization makes queries smaller by the root of this
_SPEAKER_VECTOR = 192  # width of the speaker network's output in the released checkpoint


@dataclass(frozen=True)
class SyntheticPart(Part):
    """A checkpoint part whose tensors are sampled on `device` when read; values differ between kinds of devices."""

    device: str = "cpu"
    seed: int = 0

    def read(self, name: str) -> torch.Tensor:
        """A random bfloat16 tensor of the declared shape: scaled by its fan-in, or near 1 for weights of norms."""
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"tensor {name} is missing", where=f"synthetic {self.name}")
        key = f"{self.name}:{name}" if self.seed == 0 else f"{self.seed}:{self.name}:{name}"
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        generator = torch.Generator(self.device).manual_seed(seed)
        value = torch.randn(entry.shape, generator=generator, device=self.device)
        if name.startswith("stop_head."):
            # Never stop: the request alone limits the length of random speech.
            value = torch.zeros(entry.shape)
            if len(entry.shape) == 1:
                value[0] = _CONTINUE_LOGIT
            return value.to(torch.bfloat16)
        if len(entry.shape) < 2:
            value = 1 + 0.1 * value if name.endswith("weight") else 0.02 * value
        else:
            value = value * (value[0].numel() ** -0.5)
            if name.endswith("SelfAttention.q.weight"):
                value *= _T5_HEAD**-0.5
        return value.to(torch.bfloat16).cpu()


def _declare_tensors(plain: Checkpoint) -> Checkpoint:
    """`plain` with the tensors whose shapes stages read from the checkpoint because no config specifies them."""
    talker = plain.talker
    if talker is None:
        return plain
    file = talker.root / "llm" / "config.json"
    try:
        llm = json.loads(file.read_text(encoding="utf-8"))
        vocabulary, hidden = int(llm["vocab_size"]), int(llm["hidden_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"the speech LLM's config cannot be read: {error}", where=str(file)) from error
    shapes = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "spk_head.weight": (hidden, _SPEAKER_VECTOR),
    }
    tensors = {name: TensorEntry(plain.root, "BF16", shape) for name, shape in shapes.items()}
    return plain.with_part(replace(talker, tensors=tensors))


def open_synthetic(configs: Path, device: str = "cpu", *, seed: int = 0) -> Checkpoint:
    """A checkpoint over the config files in `configs` (the released layout without weights), sampled on `device`.

    Another `seed` gives other weights.

    Raises: CheckpointError when a config is missing or lacks a key.
    """
    plain = _declare_tensors(open_configs(configs))
    tensors: dict[str, dict[str, TensorEntry]] = {name: {} for name in plain.parts}
    notes = [
        *plain.notes,
        "weights are random: use the artifact for benchmarking only, its output is meaningless",
    ]
    for stage in discover().values():
        try:
            config = stage.config(plain)
        except CheckpointError as error:
            notes.append(f"{stage.name} left out: {error.message}")
            continue
        for source in stage.weights(config, Shard()):
            for name, shape in zip(source.tensors, source.shapes, strict=True):
                tensors[source.part][name] = TensorEntry(configs, "BF16", tuple(shape))

    parts = {
        name: SyntheticPart(
            name,
            part.root,
            part.config,
            tensors[name],
            device=device,
            seed=seed,
        )
        for name, part in plain.parts.items()
    }
    return Checkpoint(root=plain.root, parts=parts, notes=tuple(notes))
