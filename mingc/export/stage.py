"""The contract of a stage file: how a stage is found, built, filled with weights, and traced.

A file `mingc/export/stages/<name>.py` defines one `Stage` subclass and `STAGE = ThatClass()`. It holds the
eager PyTorch module of the stage; nothing here compiles or runs engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.spec import GraphSpec
from mingc.export.checkpoint import Checkpoint

Quantizable = Literal["linear", "experts"]

Load = Callable[[str], nn.Module]
"""Path in the stage's module → the unsharded module there in float32, over the checkpoint's weights."""

LoadRanks = Callable[[str], Sequence[nn.Module]]
"""Path in the stage's module → each rank's module there, computing in float32 over the weights it has stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Which tensor-parallel share of a stage is built."""

    rank: int = 0
    world_size: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StageOptions:
    """What the recipe asks of every stage.

    `dtype` is the compute and storage dtype of weights; `static_buckets` says that every bucket gets an engine
    of its own (CUDA), otherwise one engine with dynamic dims serves all buckets (CPU). `batch_sizes` are the
    buckets of every dim that counts requests, ascending.
    """

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    static_buckets: bool = False
    batch_sizes: tuple[int, ...] = (1, 2, 4, 8)
    max_model_len: int = 32768
    prefill_chunk_size: int = 256

    @property
    def max_batch(self) -> int:
        """The largest batch of one step."""
        return self.batch_sizes[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertDims:
    """A stage's mixture of experts as one rank's kernels see it.

    `intermediate_size` and `shared_intermediate_size` (0: none) are one rank's share of an expert, and of
    the shared expert.
    """

    hidden_size: int
    intermediate_size: int
    shared_intermediate_size: int
    num_experts: int
    num_groups: int
    num_kept_groups: int
    top_k: int


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """How one parameter or buffer of the module is made from checkpoint tensors.

    `tensors` are names in part `part`, read one at a time when the weight is written; `compute` receives them in
    order (any stored dtype, CPU, memory-mapped: must not be modified) and returns the value, already cut for the
    shard. With no `tensors` the value is derived (time embeddings, position tables). `shapes` are the full shapes
    that the checkpoint must hold for `tensors`; they are checked for all weights before any is read. The result
    is cast to `dtype`, or to the recipe's dtype when None.

    A `quantizable` weight may be stored in fewer bits (`mingc.export.weights.quantization`): a "linear" has the
    shape (N, K),
    "experts" (E, N, K) or, a single one, (N, K). Its module then holds the scale as `<name>_scale`, and registers that
    name as None otherwise.
    """

    name: str
    part: str
    tensors: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    compute: Callable[..., torch.Tensor]
    dtype: torch.dtype | None = None
    quantizable: Quantizable | None = None


@dataclass(frozen=True, kw_only=True)
class GraphDef:
    """One graph to trace: its border, the module's method, and valid random inputs for it.

    The module is the stage's, or the part of it at the path of the spec's first instance: others have the same code.
    `method` is called with the inputs then the state tensors of `spec`, positionally, and returns the outputs
    as a tuple. `example(dims, generator)` returns inputs and state for concrete dim sizes (CPU tensors; every dim of
    `spec` is a key); values must be ones that real use could produce, so that parity on them means something.
    `trace_dims` are the sizes used for tracing (never 1: torch.export would specialise on it), `check_dims`
    the sizes at which goldens and parity are taken. A graph that routes tokens to experts by the module's submodule
    `router` names in `routing` a method that is called with the inputs and ends what it returns with the expert ids
    (tokens, K) and weights (tokens, K): narrow engines are compared token by token (see `mingc.export.checks.routing`).
    """

    spec: GraphSpec
    method: str
    example: Callable[[dict[str, int], torch.Generator], dict[str, torch.Tensor]]
    trace_dims: dict[str, int]
    check_dims: dict[str, int]
    routing: str | None = None


class Stage(ABC):
    """One stage of the model."""

    name: str
    is_sharded: bool = False

    @abstractmethod
    def is_present(self, checkpoint: Checkpoint) -> bool:
        """Whether the checkpoint holds this stage."""

    @abstractmethod
    def config(self, checkpoint: Checkpoint) -> Any:
        """The stage's frozen config dataclass, from its own config file. Raises CheckpointError."""

    @abstractmethod
    def build(self, config: Any, shard: Shard) -> nn.Module:
        """The module with uninitialised parameters; called under `torch.device("meta")`."""

    @abstractmethod
    def weights(self, config: Any, shard: Shard) -> Sequence[WeightSource]:
        """One entry for each name of `build(...).state_dict()`, exactly."""

    @abstractmethod
    def graphs(self, config: Any, shard: Shard, options: StageOptions) -> Sequence[GraphDef]:
        """The graphs to compile."""

    @abstractmethod
    def parameters(self, config: Any, options: StageOptions) -> Any:
        """The stage's dataclass of `mingc.artifacts.parameters` for the manifest."""

    def quantization_error(self, config: Any, exact: Load, stored: LoadRanks) -> QuantizationError | None:
        """What quantized weights lose end to end; None: the parity of the graphs says it all."""
        return None

    def experts(self, config: Any, shard: Shard) -> ExpertDims | None:
        """The experts of the graphs that name a `routing`, for timing their kernels; None: the stage has none."""
        return None

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        """(prefix of tensor names, why) of tensors that belong to this stage and are knowingly not used."""
        return ()
