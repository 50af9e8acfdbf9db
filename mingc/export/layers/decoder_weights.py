"""Weight sources of the thinker's decoder: checkpoint tensors, sharded for one rank.

Checkpoint names and shapes: spec: checkpoint.md §3. Slices of memory-mapped tensors copy only the rank's shard.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from mingc.export.layers.decoder import DecoderConfig
from mingc.export.stage import Quantizable, Shard, WeightSource, as_stored
from mingc.export.weights.mapping import stored
from mingc.export.weights.sharding import shard_tensor

_ROOT = "model.model"
_ROUTERS = ("gate", "image_gate", "audio_gate")
_TIME, _HEIGHT, _WIDTH = 0, 1, 2
# Frequencies below this index alternate between height and width, the others rotate with time. A constant of the
# model's code, not of its config (spec: thinker.md §3).
_NUM_SPATIAL_FREQUENCIES = 24


def decoder_weights(config: DecoderConfig, shard: Shard, *, is_tied: bool) -> Sequence[WeightSource]:
    """One source for each name of `Decoder(config, shard.world_size).state_dict()`."""
    hidden = config.hidden_size
    embedding = f"{_ROOT}.word_embeddings.weight"
    vocab_shape = (config.vocab_size, hidden)
    head = embedding if is_tied else "model.lm_head.weight"
    head_size = config.local_vocab(shard.world_size)
    half = config.rotary_dim // 2
    sources = [
        stored("embed.word_embeddings", embedding, *vocab_shape),
        _source("embed.inv_freq", compute=partial(_inverse_frequencies, config), dtype=torch.float32),
        _source("embed.position_rows", compute=partial(_position_rows, half), dtype=torch.int64),
        stored("head.norm", f"{_ROOT}.norm.weight", hidden),
        _source(
            "head.lm_head",
            (head,),
            (vocab_shape,),
            partial(shard_tensor, axis=0, rank=shard.rank, size=head_size),
            quantizable="linear",
        ),
    ]
    for index in range(config.num_layers):
        sources += _attention(config, shard, index)
        if index < config.num_dense_layers:
            width = config.dense_intermediate_size
            target, source = f"layers.{index}.feed_forward.mlp", f"{_ROOT}.layers.{index}.mlp"
            sources += _swiglu(config, shard, target, source, width, "linear")
        else:
            sources += _moe(config, shard, index)
    return sources


def _source(
    name: str,
    tensors: tuple[str, ...] = (),
    shapes: tuple[tuple[int, ...], ...] = (),
    compute: Callable[..., Tensor] = as_stored,
    dtype: torch.dtype | None = None,
    quantizable: Quantizable | None = None,
) -> WeightSource:
    return WeightSource(
        name=name,
        part="main",
        tensors=tensors,
        shapes=shapes,
        compute=compute,
        dtype=dtype,
        quantizable=quantizable,
    )


def _attention(config: DecoderConfig, shard: Shard, index: int) -> list[WeightSource]:
    target, source = f"layers.{index}", f"{_ROOT}.layers.{index}"
    hidden, width = config.hidden_size, config.head_dim
    rows = (config.num_heads + 2 * config.num_kv_heads) * width
    return [
        stored(f"{target}.attention.norm", f"{source}.input_layernorm.weight", hidden),
        stored(f"{target}.attention.q_norm", f"{source}.attention.q_norm.weight", width),
        stored(f"{target}.attention.k_norm", f"{source}.attention.k_norm.weight", width),
        stored(f"{target}.feed_forward.norm", f"{source}.post_attention_layernorm.weight", hidden),
        _source(
            f"{target}.attention.qkv",
            (f"{source}.attention.query_key_value.weight",),
            ((rows, hidden),),
            partial(_shard_qkv, config, shard),
            quantizable="linear",
        ),
        _source(
            f"{target}.attention.dense",
            (f"{source}.attention.dense.weight",),
            ((hidden, config.num_heads * width),),
            partial(_shard_dense, config, shard),
            quantizable="linear",
        ),
    ]


def _swiglu(
    config: DecoderConfig, shard: Shard, target: str, source: str, width: int, quantizable: Quantizable
) -> list[WeightSource]:
    up_shape, down_shape = (width, config.hidden_size), (config.hidden_size, width)
    size = config.local_width(width, shard.world_size)
    gate_up = (f"{source}.gate_proj.weight", f"{source}.up_proj.weight")
    down = (f"{source}.down_proj.weight",)
    return [
        _source(
            f"{target}.gate_up",
            gate_up,
            (up_shape, up_shape),
            partial(_join_gate_up, shard.rank, size),
            quantizable=quantizable,
        ),
        _source(
            f"{target}.down",
            down,
            (down_shape,),
            partial(shard_tensor, axis=1, rank=shard.rank, size=size),
            quantizable=quantizable,
        ),
    ]


def _moe(config: DecoderConfig, shard: Shard, index: int) -> list[WeightSource]:
    target, source = f"layers.{index}.feed_forward", f"{_ROOT}.layers.{index}.mlp"
    hidden, num_experts, width = config.hidden_size, config.num_experts, config.expert_intermediate_size
    size = config.local_width(width, shard.world_size)
    weights = tuple(f"{source}.{gate}.weight" for gate in _ROUTERS)
    biases = tuple(f"{source}.{gate}.expert_bias" for gate in _ROUTERS)
    experts = [f"{source}.experts.{expert}" for expert in range(num_experts)]
    gate_up = tuple(f"{expert}.{name}_proj.weight" for expert in experts for name in ("gate", "up"))
    down = tuple(f"{expert}.down_proj.weight" for expert in experts)
    sources = [
        _source(f"{target}.router.weight", weights, ((num_experts, hidden),) * len(_ROUTERS), _stack),
        _source(f"{target}.router.bias", biases, ((num_experts,),) * len(_ROUTERS), _stack, torch.float32),
        _source(
            f"{target}.gate_up",
            gate_up,
            ((width, hidden),) * len(gate_up),
            partial(_stack_gate_up, shard.rank, size),
            quantizable="experts",
        ),
        _source(
            f"{target}.down",
            down,
            ((hidden, width),) * num_experts,
            partial(_stack_down, shard.rank, size),
            quantizable="experts",
        ),
    ]
    if config.shared_intermediate_size:
        width = config.shared_intermediate_size
        # Stored in the format of the routed experts, whose kernels compute it as one more expert.
        sources += _swiglu(config, shard, f"{target}.shared", f"{source}.shared_experts", width, "experts")
    return sources


def _stack(*tensors: Tensor) -> Tensor:
    return torch.stack(tensors)


def _inverse_frequencies(config: DecoderConfig) -> Tensor:
    exponents = torch.arange(0, config.rotary_dim, 2, dtype=torch.float32) / config.rotary_dim
    return 1.0 / (config.rope_theta**exponents)


def _position_rows(half: int) -> Tensor:
    rows = [_HEIGHT if f % 2 == 0 else _WIDTH for f in range(min(half, _NUM_SPATIAL_FREQUENCIES))]
    return torch.tensor(rows + [_TIME] * (half - len(rows)), dtype=torch.int64)


def _shard_qkv(config: DecoderConfig, shard: Shard, packed: Tensor) -> Tensor:
    """The rank's Q, K and V rows of a weight that packs all Q heads, then all K heads, then all V heads."""
    num_heads, num_kv_heads = config.local_heads(shard.world_size)
    first_head = shard.rank * config.num_heads // shard.world_size
    first_kv_head = shard.rank * config.num_kv_heads // shard.world_size
    width = config.head_dim
    starts = (
        first_head,
        config.num_heads + first_kv_head,
        config.num_heads + config.num_kv_heads + first_kv_head,
    )
    counts = (num_heads, num_kv_heads, num_kv_heads)
    return torch.cat(
        [packed.narrow(0, start * width, count * width) for start, count in zip(starts, counts, strict=True)]
    )


def _shard_dense(config: DecoderConfig, shard: Shard, weight: Tensor) -> Tensor:
    """The rank's columns; zeros where another rank computes the same head and contributes it to the all-reduce."""
    copies = max(1, shard.world_size // config.num_heads)
    if shard.rank % copies:
        return torch.zeros(weight.shape[0], config.head_dim, dtype=weight.dtype)
    num_heads, _ = config.local_heads(shard.world_size)
    return shard_tensor(weight, 1, shard.rank // copies, num_heads * config.head_dim)


def _join_gate_up(rank: int, size: int, gate: Tensor, up: Tensor) -> Tensor:
    return torch.cat((shard_tensor(gate, 0, rank, size), shard_tensor(up, 0, rank, size)))


def _stack_gate_up(rank: int, size: int, *tensors: Tensor) -> Tensor:
    """(E, 2 * size, D) from the gate and up projections of expert 0, of expert 1, …"""
    first = tensors[0]
    stacked = first.new_empty(len(tensors) // 2, 2, size, first.shape[1])
    for index, tensor in enumerate(tensors):
        stacked[index // 2, index % 2] = shard_tensor(tensor, 0, rank, size)
    return stacked.flatten(1, 2)


def _stack_down(rank: int, size: int, *tensors: Tensor) -> Tensor:
    """(E, D, size) from the down projections of the experts in order."""
    first = tensors[0]
    stacked = first.new_empty(len(tensors), first.shape[0], size)
    for index, tensor in enumerate(tensors):
        stacked[index] = shard_tensor(tensor, 1, rank, size)
    return stacked
