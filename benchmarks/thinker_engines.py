"""Build the thinker's engines for one rank, with random weights on the device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from harness import compiler_pool
from torch import Tensor

from mingc.artifacts.manifest import TunedKernel
from mingc.artifacts.spec import Quantization
from mingc.export.autotune.tuning import autotune, moe_problems, tuned_table, with_choice
from mingc.export.compile.backends import aoti
from mingc.export.compile.trace import capture, share_weights
from mingc.export.layers.decoder import PAGE_SIZE, DecoderConfig
from mingc.export.layers.decoder_graphs import thinker_graphs
from mingc.export.stage import GraphDef, Shard, StageOptions, WeightSource
from mingc.export.stages import find
from mingc.export.stages.thinker import ThinkerConfig
from mingc.export.synthetic.checkpoint import open_synthetic
from mingc.export.weights.quantization import prepare
from mingc.kernels.quantized import FP8, INT4
from mingc.kernels.triton.moe_config import use_tuned_configs
from mingc.runtime.engines.base import Graph
from mingc.runtime.engines.stage_loader import LoadedStage, load_engine, weights_within

_SCALE = 0.02  # scale of random quantized weights: FP8 of unit variance
_INT4_MAX = (
    7  # random values are as often negative as positive: an offset would send all tokens to the same experts
)
_INT4_SCALE = _SCALE / (_INT4_MAX * (_INT4_MAX + 1) / 3) ** 0.5
# Dims that vary: a graph has some of these.
PREFILL, DECODE, BOTH = (
    ("prefill_attention", "prefill_experts"),
    ("decode_attention", "decode_experts"),
    ("embed", "dense"),
)


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Build settings: one rank of the thinker of `configs`, with these batch sizes, chunks and context."""

    configs: str
    world_size: int
    batches: tuple[int, ...]
    chunks: tuple[int, ...]
    max_model_len: int
    device: str = "cuda"
    dtype: str = "bfloat16"
    layers: int | None = None
    quantize: Quantization | None = None

    def config(self) -> DecoderConfig:
        full: DecoderConfig = find("thinker").config(open_synthetic(Path(self.configs))).decoder
        return replace(full, num_layers=self.layers or full.num_layers)

    def options(self) -> StageOptions:
        return StageOptions(
            dtype=getattr(torch, self.dtype),
            device=self.device,
            static_buckets=True,
            batch_sizes=self.batches,
            max_model_len=self.max_model_len,
            prefill_chunk_size=max(self.chunks, default=256),
        )

    def plans(self) -> dict[str, GraphDef]:
        shard = Shard(world_size=self.world_size)
        return {plan.spec.name: plan for plan in thinker_graphs(self.config(), shard, self.options())}

    def sizes(self, graph: str) -> list[dict[str, int]]:
        """Sizes to compile `graph` for."""
        pages = self.max_model_len // PAGE_SIZE
        tokens = {
            **dict.fromkeys(PREFILL, ("T", self.chunks)),
            **dict.fromkeys(DECODE, ("B", self.batches)),
            **dict.fromkeys(BOTH, ("N", tuple(sorted({*self.batches, *self.chunks})))),
            "head": ("B", tuple(sorted({1, *self.batches}))),
            "sample": ("B", self.batches),
        }
        name, counts = tokens[graph]
        table = {"P": pages} if graph.endswith("attention") else {}
        return [{name: count, **table} for count in counts]


def engine_path(folder: Path, setup: Setup, graph: str, sizes: Mapping[str, int]) -> Path:
    label = "".join(f"-{name}{size}" for name, size in sizes.items())
    return folder / f"tp{setup.world_size}.{setup.quantize or setup.dtype}.{graph}{label}.pt2"


def tune_kernels(setup: Setup, folder: Path, jobs: int) -> tuple[TunedKernel, ...]:
    """Autotune the mixture-of-experts kernels for all batches and chunks on the GPU, as an export does."""
    stage, config = find("thinker"), _config(setup)
    dims = stage.experts(config, Shard(world_size=setup.world_size))
    if dims is None:
        return ()
    problems = with_choice(moe_problems(dims, setup.quantize, (*setup.batches, *setup.chunks)))
    return autotune(dims, problems, jobs=jobs, cache=folder)


def build_all(setup: Setup, folder: Path, jobs: int, tiles: tuple[TunedKernel, ...] = ()) -> float:
    """Compile every graph. Returns the compile seconds of all processes together."""
    tasks = [(graph, sizes) for graph in setup.plans() for sizes in setup.sizes(graph)]
    tasks.sort(key=lambda task: task[0] not in PREFILL + DECODE)  # the longest first
    with compiler_pool(jobs) as pool:
        futures = [pool.submit(_build, setup, graph, sizes, folder, tiles) for graph, sizes in tasks]
        return sum(future.result() for future in futures)


def load(setup: Setup, folder: Path, weights: Mapping[str, Tensor], device: torch.device) -> LoadedStage:
    """Load the stage from the engines in `folder`."""
    graphs = {}
    for name, plan in setup.plans().items():
        instance = plan.spec.layer_instances[0]
        spec = share_weights(plan, piece(setup, instance, weights)).spec
        own = weights_within(weights, instance)
        order = [dim.name for dim in spec.dims if dim.buckets]
        loaded = {}
        for sizes in setup.sizes(name):
            engine = load_engine("aoti", engine_path(folder, setup, name, sizes), device)
            engine.bind(own)
            loaded[tuple(sizes[dim] for dim in order)] = engine
        graphs[name] = Graph(spec, loaded, own)
    return LoadedStage("thinker", graphs, weights)


@dataclass(frozen=True, kw_only=True)
class Weight:
    """One stored weight of a rank; `source` is None for a scale."""

    shape: torch.Size
    dtype: torch.dtype
    source: WeightSource | None


def layout(setup: Setup) -> dict[str, Weight]:
    """Stored weights of a rank, by name."""
    stage = find("thinker")
    full = stage.config(open_synthetic(Path(setup.configs)))
    shard = Shard(world_size=setup.world_size)
    sources = {source.name: source for source in stage.weights(replace(full, decoder=setup.config()), shard)}
    weights = {}
    for name, tensor in _module(setup).state_dict().items():
        source = sources.get(name)
        is_plain = source is not None and tensor.dtype == torch.float32
        dtype = (source.dtype if source else None) or getattr(torch, setup.dtype)
        weights[name] = Weight(shape=tensor.shape, dtype=dtype if is_plain else tensor.dtype, source=source)
    return weights


def random_weights(setup: Setup, device: torch.device, *, distinct: int | None) -> dict[str, Tensor]:
    """Random weights of a rank by name, on `device`: norms near 1; GEMMs preserve the scale of their input.

    With `distinct`, only that many expert layers have their own weights and the others repeat them in turn. The
    caches hold none of these layers, so the time is the same.
    """
    config = setup.config()
    generator = torch.Generator(device).manual_seed(0)
    weights: dict[str, Tensor] = {}
    for name, weight in layout(setup).items():
        shared = _same_weight(name, config, distinct)
        weights[name] = weights[shared] if shared != name else _draw(name, weight, device, generator)
    return weights


def _same_weight(name: str, config: DecoderConfig, distinct: int | None) -> str:
    """The name of the weight that stands for `name`."""
    words = name.split(".")
    if distinct is None or words[0] != "layers" or words[2] != "feed_forward":
        return name
    layer = int(words[1]) - config.num_dense_layers
    if layer < distinct:
        return name
    return ".".join((words[0], str(config.num_dense_layers + layer % distinct), *words[2:]))


def _draw(name: str, weight: Weight, device: torch.device, generator: torch.Generator) -> Tensor:
    if weight.source is None:
        scale = _INT4_SCALE if weight.dtype == torch.bfloat16 else _SCALE
        return torch.full(weight.shape, scale, dtype=weight.dtype, device=device)
    if not weight.source.tensors:
        return weight.source.compute().to(device)
    if weight.dtype == INT4:
        return _draw_int4(weight.shape, device, generator)
    value = torch.empty(
        weight.shape, dtype=torch.bfloat16 if weight.dtype == FP8 else weight.dtype, device=device
    )
    if weight.dtype == FP8:
        return value.normal_(generator=generator).to(FP8)
    if value.dim() < 2:
        return value.normal_(1, 0.1, generator=generator)
    if name.endswith("router.bias"):
        return value.zero_()
    return value.normal_(0, value.shape[-1] ** -0.5, generator=generator)


def _draw_int4(shape: torch.Size, device: torch.device, generator: torch.Generator) -> Tensor:
    """Two random values -7..7 a byte."""
    pairs = torch.randint(0, (2 * _INT4_MAX + 1) ** 2, shape, dtype=INT4, device=device, generator=generator)
    low, high = pairs % (2 * _INT4_MAX + 1), pairs // (2 * _INT4_MAX + 1)
    # Unsigned bytes wrap around: their low four bits equal the signed value's.
    return ((low - _INT4_MAX) & 15) | ((high - _INT4_MAX) & 15) << 4


def _config(setup: Setup) -> ThinkerConfig:
    return replace(find("thinker").config(open_synthetic(Path(setup.configs))), decoder=setup.config())


def _module(setup: Setup) -> torch.nn.Module:
    """The decoder of one rank on the meta device."""
    stage = find("thinker")
    full = _config(setup)
    shard = Shard(world_size=setup.world_size)
    with torch.device("meta"):
        module = stage.build(full, shard)
    return prepare(module, stage.weights(full, shard), setup.quantize).eval().requires_grad_(False)


def piece(setup: Setup, instance: str, weights: Mapping[str, Tensor]) -> torch.nn.Module:
    """Eager module at the path `instance`, with its part of the stage's `weights`."""
    module = _module(setup).get_submodule(instance)
    module.load_state_dict(weights_within(weights, instance), strict=True, assign=True)
    return module


def _build(
    setup: Setup, graph: str, sizes: dict[str, int], folder: Path, tiles: tuple[TunedKernel, ...]
) -> float:
    plan = setup.plans()[graph]
    device = torch.device(setup.device)
    instance = plan.spec.layer_instances[0]
    zeros = {
        name: torch.zeros(weight.shape, dtype=weight.dtype, device=device)
        for name, weight in layout(setup).items()
        if name.startswith(f"{instance}.")
    }
    module = piece(setup, instance, zeros)
    plan = share_weights(plan, module)
    path = engine_path(folder, setup, graph, sizes)
    tokens = next(iter(sizes.values()))
    with use_tuned_configs(tuned_table(tiles, tokens) if plan.routing is not None else {}):
        program = capture(plan, module, stage="thinker", static_shapes=sizes, device=device)
        return aoti.compile_graph(
            program, path, device=setup.device, cache=folder / "cache", where=f"thinker.{graph}"
        )


def expected_experts(config: DecoderConfig, tokens: int) -> float:
    """Expected number of experts per layer that `tokens` tokens select under uniform routing, the worst case."""
    share = config.num_experts_per_token / config.num_experts
    return config.num_experts * (1 - (1 - share) ** tokens)


def chunk_flops(setup: Setup, tokens: int, start: int) -> float:
    """FLOPs of one rank for a chunk of `tokens` tokens after `start` others: GEMMs and causal attention."""
    config = setup.config()
    heads, kv_heads = config.local_heads(setup.world_size)
    hidden, size = config.hidden_size, config.head_dim
    seen = tokens * start + tokens * (tokens + 1) / 2
    attention = 2 * tokens * hidden * size * (2 * heads + 2 * kv_heads) + 4 * heads * size * seen
    width, shared, dense = (
        config.local_width(each, setup.world_size)
        for each in (
            config.expert_intermediate_size,
            config.shared_intermediate_size,
            config.dense_intermediate_size,
        )
    )
    experts = config.num_experts_per_token * width + shared
    routed = 2 * tokens * hidden * (3 * experts + config.num_experts)
    num_routed = config.num_layers - config.num_dense_layers
    feed_forward = num_routed * routed + config.num_dense_layers * 6 * tokens * hidden * dense
    return config.num_layers * attention + feed_forward + 2 * hidden * config.local_vocab(setup.world_size)


def step_bytes(setup: Setup, lengths: Sequence[int]) -> float:
    """Bytes that one rank reads to decode one token for each request of `lengths` tokens."""
    config = setup.config()
    chosen = expected_experts(config, len(lengths)) / config.num_experts
    total = 0.0
    for name, weight in layout(setup).items():
        words = name.split(".")
        num_bytes = weight.shape.numel() * weight.dtype.itemsize
        if words[0] == "embed":
            continue  # a row a token
        if words[-2] == "router":
            num_bytes //= weight.shape[0]  # the gate of text alone
        is_expert = words[-2] == "feed_forward" and len(weight.shape) == 3
        total += num_bytes * (chosen if is_expert else 1)
    _, kv_heads = config.local_heads(setup.world_size)
    row = 2 * kv_heads * config.head_dim * getattr(torch, setup.dtype).itemsize
    return total + config.num_layers * row * sum(lengths)
