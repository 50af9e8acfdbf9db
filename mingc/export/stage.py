"""Interface of a stage file: discovery, edges of the stage graph, module, weights and graphs to trace.

A file `mingc/export/stages/<name>.py` defines one `Stage` subclass and `STAGE = ThatClass()`; other distributions
provide such an object as an entry point in the group `mingc.stages`. It holds the eager PyTorch module of the stage;
nothing here compiles or runs engines.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from mingc.artifacts.manifest import QuantizationError
from mingc.artifacts.spec import GraphSpec, Quantization
from mingc.artifacts.stage_graph import Edge, Policy
from mingc.export.checkpoint import Checkpoint
from mingc.export.defaults import BATCH_SIZES, MAX_MODEL_LEN, PREFILL_CHUNK_SIZE

Quantizable = Literal["linear", "experts"]

RecipeOption = Literal["world_size", "max_model_len", "prefill_chunk_size"]
"""Fields of `ExportRecipe` that do not concern every stage."""

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
    """The part of the recipe that stages see.

    `dtype` is the compute and storage dtype of weights. With `static_buckets` every bucket has its own engine (CUDA),
    otherwise one engine with dynamic dims serves all buckets (CPU). `batch_sizes` are the buckets of every dim that
    counts requests, ascending.
    """

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    static_buckets: bool = False
    batch_sizes: tuple[int, ...] = BATCH_SIZES
    max_model_len: int = MAX_MODEL_LEN
    prefill_chunk_size: int = PREFILL_CHUNK_SIZE

    @property
    def max_batch(self) -> int:
        """The largest batch of one step."""
        return self.batch_sizes[-1]

    def engine_sizes(self, graph: GraphDef) -> list[dict[str, int] | None]:
        """The sizes that engines of a graph are compiled for; None is one engine for every size."""
        return [*(graph.sizes or graph.spec.bucket_sizes())] if self.static_buckets else [None]


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


def as_stored(tensor: torch.Tensor) -> torch.Tensor:
    """The value of a weight that is one tensor of the checkpoint, unchanged."""
    return tensor


@dataclass(frozen=True, kw_only=True)
class WeightSource:
    """How one parameter or buffer of the module is computed from checkpoint tensors.

    `tensors` are names in part `part`, read one at a time when the weight is written; `compute` receives them in
    order (any stored dtype, CPU, memory-mapped: must not be modified) and returns the value, already cut for the
    shard. With no `tensors` the value is derived (time embeddings, position tables). `shapes` are the full shapes
    that the checkpoint must hold for `tensors`; they are checked for all weights before any is read. The result
    is cast to `dtype`, or to the recipe's dtype when None.

    A `quantizable` weight may be stored in fewer bits (`mingc.export.weights.quantization`): "linear" has the shape
    (N, K), "experts" (E, N, K), or (N, K) for a single expert. Its module then holds the scale as `<name>_scale`, and
    otherwise registers this name as None.
    """

    name: str
    part: str
    tensors: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    compute: Callable[..., torch.Tensor] = as_stored
    dtype: torch.dtype | None = None
    quantizable: Quantizable | None = None


@dataclass(frozen=True, kw_only=True)
class GraphDef:
    """One graph to trace: its I/O signature, the module's method, and valid random inputs.

    The module is the stage's, or the part of it at the path of the spec's first instance: others have the same code.
    `method` is called with the inputs then the state tensors of `spec`, positionally, and returns the outputs
    as a tuple. `example(dims, generator)` returns inputs and state for concrete dim sizes (CPU tensors; every dim of
    `spec` is a key); values must be possible in real use, or parity on them is meaningless.
    `sizes` are the sizes of the dims with buckets that engines are compiled for if each size has its own engine; empty:
    every combination of buckets. `trace_dims` are the sizes used for tracing (never 1: torch.export would specialise on
    it), `check_dims` the sizes at which goldens and parity are taken. A graph that routes tokens to experts by the
    module's submodule `router` names in `routing` a method that is called with the inputs and whose return value ends
    with the expert ids (tokens, K) and weights (tokens, K): low-precision engines are compared token by token (see
    `mingc.export.checks.routing`). Graphs with the largest `compile_cost` are compiled first. `slots` names an int64
    input (rows,) of a graph whose states are pools: a call reads and writes only these rows of their first axis, and
    row 0, which is padding. `typical_dims`: sizes of dims without buckets that one engine takes as they are; its cost
    is counted at them, and probe times it at them.
    """

    spec: GraphSpec
    method: str
    example: Callable[[dict[str, int], torch.Generator], dict[str, torch.Tensor]]
    trace_dims: dict[str, int]
    check_dims: dict[str, int]
    routing: str | None = None
    compile_cost: int = 0
    typical_dims: Mapping[str, int] = field(default_factory=dict)
    slots: str | None = None
    sizes: tuple[dict[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerSource:
    """Location of a stage's tokenizer.json in a checkpoint.

    Without the file, an export of random weights writes a byte tokenizer with the special tokens `byte_fallback`, which
    the stage's prompts use; a stage that names none is exported without a tokenizer.
    """

    file: str
    byte_fallback: tuple[str, ...] = ()


class Stage(ABC):
    """One stage of the model.

    Attributes:
        name: also the name of its file or entry point.
        policy: how often the stage runs for a request.
        edges: the edges of the stage graph that begin or end at this stage; an edge may be declared at either end or
            at both. Edges to stages outside the export are dropped.
        is_sharded: whether the stage is split over tensor-parallel ranks.
        quantizations: formats its quantizable weights may be stored in.
        options: fields of the recipe that apply only to stages which name them.
        tokenizer: None for a stage without a tokenizer.
    """

    name: str
    policy: Policy
    edges: tuple[Edge, ...] = ()
    is_sharded: bool = False
    quantizations: tuple[Quantization, ...] = ()
    options: tuple[RecipeOption, ...] = ()
    tokenizer: TokenizerSource | None = None

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
        """The stage's parameters for the manifest: a frozen dataclass of JSON values that the runtime reads."""

    def quantization_error(self, config: Any, exact: Load, stored: LoadRanks) -> QuantizationError | None:
        """End-to-end error of quantized weights; None: the parity of the graphs is enough."""
        return None

    def experts(self, config: Any, shard: Shard) -> ExpertDims | None:
        """Dimensions of the experts in graphs with a `routing`, for timing their kernels; None: no experts."""
        return None

    def ignored(self, checkpoint: Checkpoint) -> Sequence[tuple[str, str]]:
        """(prefix of tensor names, reason) of this stage's tensors that are deliberately unused."""
        return ()
