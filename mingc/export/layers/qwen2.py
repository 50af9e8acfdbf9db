"""Qwen2 decoder stack of the speech LLM, of the three AudioVAE bodies, and of the connector of pictures.

The stack computes norms, projections and the MLP; the caller passes attention (over a whole sequence, a KV slot or a
ring buffer) as a function of the packed projection. Source: HF Qwen2; spec: talker.md §0, §8.1; spec: checkpoint.md §4.
Shape letters: N rows (any leading axes), D hidden, Hq query heads, Hk key/value heads, d head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mingc.errors import CheckpointError
from mingc.export.checkpoint import FIX, check_number, check_size
from mingc.export.config_fields import QWEN2, check_fields
from mingc.export.layers.linear import Linear
from mingc.export.stage import Quantizable, WeightSource
from mingc.kernels.linear import ResidualState, add_linear, begin_residual, final_norm, normed_linear

Attend = Callable[[int, Tensor], Tensor]
"""(layer index, packed projection (N, (Hq + 2 Hk) d)) → context (N, Hq d)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Qwen2Config:
    """Geometry of one stack.

    `windows[i]` is the number of keys that a query of layer i attends to, including its own; None: all earlier keys.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    eps: float
    max_positions: int
    windows: tuple[int | None, ...]

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    @property
    def qkv_size(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


def read_qwen2_config(raw: dict[str, Any], where: str, max_layers: int | None = None) -> Qwen2Config:
    """Read the geometry from a HF `config.json` object `raw`, of the first `max_layers` layers if given.

    Raises: CheckpointError for a missing key or a variant that is not implemented.
    """
    needed = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "rms_norm_eps")
    missing = [key for key in needed if key not in raw]
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise CheckpointError(f"rope_scaling is {rope!r}, expected an object", where=where, fix=FIX)
    theta = raw.get("rope_theta", rope.get("rope_theta"))
    if theta is None:
        missing.append("rope_theta")
    if missing:
        raise CheckpointError(f"config keys missing: {', '.join(missing)}", where=where)
    assert theta is not None, "its absence is reported above"
    check_fields(raw, QWEN2, where)
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise CheckpointError(f"rope scaling {rope} is not supported, only plain rope", where=where)

    def size(key: str, default: int | None = None) -> int:
        found = raw.get(key)
        return check_size(default if found is None else found, key, where)

    heads = size("num_attention_heads")
    num_kv_heads = size("num_key_value_heads", heads)
    if heads % num_kv_heads:
        raise CheckpointError(f"{heads} query heads do not divide into {num_kv_heads} key heads", where=where)
    windows = _layer_windows(raw, size("num_hidden_layers"), where)
    return Qwen2Config(
        hidden_size=size("hidden_size"),
        intermediate_size=size("intermediate_size"),
        num_heads=heads,
        num_kv_heads=num_kv_heads,
        head_dim=size("head_dim", size("hidden_size") // heads),
        rope_theta=check_number(theta, "rope_theta", where),
        eps=check_number(raw["rms_norm_eps"], "rms_norm_eps", where),
        max_positions=size("max_position_embeddings", 32768),
        windows=windows[:max_layers],
    )


def _layer_windows(raw: dict[str, Any], num_layers: int, where: str) -> tuple[int | None, ...]:
    """Window of each layer: by `layer_types`, or as HF does, of the layers from `max_window_layers` on."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    types = raw.get("layer_types")
    if types is not None and not isinstance(types, list):
        raise CheckpointError(f"layer_types is {types!r}, expected a list", where=where, fix=FIX)
    if types is None:
        first = raw.get("max_window_layers", 28)
        if not isinstance(first, int):
            raise CheckpointError(
                f"max_window_layers is {first!r}, expected a whole number", where=where, fix=FIX
            )
        types = ["sliding_attention" if index >= first else "full_attention" for index in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in types[:num_layers])


class Qwen2Layer(nn.Module):
    """One decoder layer with packed QKV and packed gate and up projections."""

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        self.eps = config.eps
        self.attention_norm = nn.Parameter(torch.empty(hidden))
        self.qkv = Linear(hidden, config.qkv_size)
        self.out = Linear(config.num_heads * config.head_dim, hidden, bias=False)
        self.mlp_norm = nn.Parameter(torch.empty(hidden))
        self.gate_up = Linear(hidden, 2 * inner, bias=False)
        self.down = Linear(inner, hidden, bias=False)

    def forward(
        self, x: ResidualState, attend: Callable[[Tensor], Tensor], next_norm: Tensor
    ) -> ResidualState:
        qkv, out, gate_up, down = self.qkv, self.out, self.gate_up, self.down
        context = attend(normed_linear(x, qkv.weight, qkv.bias, self.eps, weight_scale=qkv.weight_scale))
        x = add_linear(context, out.weight, None, x, self.mlp_norm, self.eps, out.weight_scale)
        inner = normed_linear(x, gate_up.weight, None, self.eps, "swiglu", gate_up.weight_scale)
        return add_linear(inner, down.weight, None, x, next_norm, self.eps, down.weight_scale)


class Qwen2Stack(nn.Module):
    """All layers and the final norm; RoPE frequencies are a float32 buffer."""

    inv_freq: Tensor

    def __init__(self, config: Qwen2Config) -> None:
        super().__init__()
        self.config = config
        self.layers = nn.ModuleList(Qwen2Layer(config) for _ in range(config.num_layers))
        self.norm = nn.Parameter(torch.empty(config.hidden_size))
        self.register_buffer("inv_freq", torch.empty(config.head_dim // 2))

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (…, d/2) float32 of integer `positions` (…), shared by both halves of a head."""
        angles = positions.float().unsqueeze(-1) * self.inv_freq
        return angles.cos(), angles.sin()

    def forward(self, x: Tensor, attend: Attend, kept: Tensor | None = None) -> Tensor:
        """Inputs (N, D) → final norm of the outputs; `kept` (K,) int64 selects rows of axis 0 → (K, D)."""
        norms = [*(layer.get_parameter("attention_norm") for layer in self.layers), self.norm]
        rows = begin_residual(x, norms[0], self.config.eps)
        for index, layer in enumerate(self.layers):
            rows = layer(rows, partial(attend, index), norms[index + 1])
        out = final_norm(rows, self.config.eps)
        return out if kept is None else out.index_select(0, kept)


def inverse_frequencies(theta: float, head_dim: int) -> Tensor:
    """RoPE frequencies (head_dim/2,) float32, computed as in HF, so that angles are bitwise equal."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)


def qwen2_weights(
    config: Qwen2Config, *, part: str, source: str, target: str, quantizable: bool = True
) -> list[WeightSource]:
    """Sources of a `Qwen2Stack` with prefix `target` in the module and `source` in the checkpoint."""
    hidden, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
    q_rows, kv_rows = config.num_heads * size, config.num_kv_heads * size

    # Norms and biases are never quantized.
    matrix: Quantizable | None = "linear" if quantizable else None

    def copy(name: str, tensor: str, *shape: int) -> WeightSource:
        return WeightSource(
            name=target + name,
            part=part,
            tensors=(source + tensor,),
            shapes=(shape,),
            quantizable=matrix if len(shape) == 2 else None,
        )

    def pack(name: str, tensors: tuple[str, ...], shapes: tuple[tuple[int, ...], ...]) -> WeightSource:
        return WeightSource(
            name=target + name,
            part=part,
            tensors=tuple(source + tensor for tensor in tensors),
            shapes=shapes,
            compute=lambda *values: torch.cat(values),
            quantizable=matrix if len(shapes[0]) == 2 else None,
        )

    sources = [copy("norm", "norm.weight", hidden)]
    for index in range(config.num_layers):
        layer = f"layers.{index}."
        projections = tuple(f"{layer}self_attn.{letter}_proj." for letter in "qkv")
        rows = (q_rows, kv_rows, kv_rows)
        sources += [
            copy(layer + "attention_norm", layer + "input_layernorm.weight", hidden),
            pack(
                layer + "qkv.weight",
                tuple(name + "weight" for name in projections),
                tuple((count, hidden) for count in rows),
            ),
            pack(
                layer + "qkv.bias",
                tuple(name + "bias" for name in projections),
                tuple((count,) for count in rows),
            ),
            copy(layer + "out.weight", layer + "self_attn.o_proj.weight", hidden, q_rows),
            copy(layer + "mlp_norm", layer + "post_attention_layernorm.weight", hidden),
            pack(
                layer + "gate_up.weight",
                (layer + "mlp.gate_proj.weight", layer + "mlp.up_proj.weight"),
                ((inner, hidden), (inner, hidden)),
            ),
            copy(layer + "down.weight", layer + "mlp.down_proj.weight", hidden, inner),
        ]
    sources.append(
        WeightSource(
            name=target + "inv_freq",
            part=part,
            compute=lambda: inverse_frequencies(config.rope_theta, size),
            dtype=torch.float32,
        )
    )
    return sources
