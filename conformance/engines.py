"""The engines of an artifact, loaded stage by stage on first use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from mingc.artifacts.artifact import Artifact
from mingc.dtypes import torch_dtype
from mingc.prompts.tokenizer import TextTokenizer
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage, load_stage

_Parameters = TypeVar("_Parameters")


class Engines:
    """The engines of `artifact` on its device; of a sharded stage the engines of rank 0."""

    def __init__(self, artifact: Artifact) -> None:
        kind = artifact.manifest.fingerprint.device
        self.artifact = artifact
        self.device = torch.device(kind, 0) if kind == "cuda" else torch.device(kind)
        self._stages: dict[str, LoadedStage] = {}

    def parameters_of(self, stage: str, kind: type[_Parameters]) -> _Parameters:
        """The parameters of `stage`. Raises ArtifactError when the artifact has none."""
        return self.artifact.manifest.parameters_of(stage, kind)

    def find_parameters(self, stage: str, kind: type[_Parameters]) -> _Parameters | None:
        """The parameters of `stage`, or None."""
        return self.artifact.manifest.find_parameters(stage, kind)

    @property
    def world_size(self) -> int:
        return self.artifact.manifest.fingerprint.world_size

    def rank_devices(self) -> list[torch.device]:
        """One device per rank: the CPU for all, or CUDA devices 0 to n - 1."""
        if self.device.type == "cpu":
            return [self.device] * self.world_size
        return [torch.device(self.device.type, index) for index in range(self.world_size)]

    def has(self, *stages: str) -> bool:
        return all(name in self.artifact.manifest.stages for name in stages)

    def quantization_of(self, stages: Sequence[str]) -> float:
        """Return the largest error that weight quantization causes in a graph of `stages`.

        Stages that record a quantization error per layer are left out: they are compared layer by layer.
        """
        records = [self.artifact.manifest.stages[name] for name in stages if self.has(name)]
        return max(
            (
                graph.parity.quantization or 0.0
                for stage in records
                if stage.quantization_error is None
                for graph in stage.graphs.values()
            ),
            default=0.0,
        )

    def stage(self, name: str) -> LoadedStage:
        """Load a stage on first use. Raises: ArtifactError when the artifact has no stage `name`."""
        if name not in self._stages:
            self._stages[name] = load_stage(self.artifact, name, self.device)
        return self._stages[name]

    def rank_stage(self, name: str, rank: int) -> LoadedStage:
        """Load the shard of `rank` on that rank's device."""
        return load_stage(self.artifact, name, self.rank_devices()[rank], rank=rank)

    def tokenizer(self, name: str) -> TextTokenizer | None:
        """Load the tokenizer of `thinker` or `talker`; None when the artifact has none."""
        file = self.artifact.manifest.tokenizers.get(name)
        return None if file is None else TextTokenizer.from_file(self.artifact.path(file))

    def is_dynamic(self, stage: str, graph: str) -> bool:
        """Whether one engine takes every size, so that inputs need no padding to a bucket."""
        return any(
            engine.dims is None for engine in self.artifact.manifest.stages[stage].graphs[graph].engines
        )

    def padded_size(self, graph: Graph, dim: str, size: int) -> int:
        """Round `size` up to what `graph` runs: its bucket, or without buckets the next valid multiple."""
        spec = graph.spec.dim(dim)
        if spec.buckets:
            return graph.bucket(dim, size)
        return max(spec.minimum, -(-size // spec.multiple) * spec.multiple)

    def put(self, value: NDArray[np.generic], graph: Graph, name: str) -> torch.Tensor:
        """Copy `value` to the device, in the dtype of input `name` of `graph`."""
        spec = graph.spec.input(name)
        return torch.from_numpy(np.ascontiguousarray(value)).to(self.device, torch_dtype(spec.dtype))


def pad_rows(value: NDArray[np.generic], rows: int) -> NDArray[np.generic]:
    """Pad `value` with zero rows to `rows`."""
    return np.pad(value, [(0, rows - len(value))] + [(0, 0)] * (value.ndim - 1))
