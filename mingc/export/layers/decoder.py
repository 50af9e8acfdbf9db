"""Modules of the thinker's decoder that are compiled separately: embedding, attention, feed-forward, head.

A layer has two halves, `Attention` and a feed-forward (`mingc.export.layers.moe`). Each takes the residual stream and
the delta of the half before it, and returns the new residual and this rank's partial sum, the next delta. The runtime
all-reduces partial sums between halves, so no module depends on other ranks, and modules of the same shape are compiled
once for all layers.

Shape suffixes: T tokens, D hidden, H this rank's heads, d head width, R half the rotated width, V this rank's shard of
the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.layers.linear import empty_weight
from mingc.export.layers.moe import DenseFeedForward, MoeFeedForward, Router
from mingc.export.weights.sharding import check_heads, shard_size
from mingc.kernels.decode_attention import decode_attention
from mingc.kernels.gemv import gemv, sum_norm_linear
from mingc.kernels.linear import linear
from mingc.kernels.mrope import mrope_cos_sin
from mingc.kernels.norm_rope_write import norm_rope_write
from mingc.kernels.paged_attention import chunk_rows, paged_prefill_attention
from mingc.kernels.rms_norm import rms_norm
from mingc.kernels.sample_tokens import sample_tokens

PAGE_SIZE = 16
# Expert widths are padded to a multiple of this: grouped GEMMs need rows that are multiples of 16 bytes.
_EXPERT_WIDTH_MULTIPLE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Geometry of the whole decoder, before it is divided among ranks (spec: thinker.md §1)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_dense_layers: int  # the first layers, without experts
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    norm_eps: float
    dense_intermediate_size: int
    num_experts: int
    expert_intermediate_size: int
    shared_intermediate_size: int  # 0: no shared expert
    num_experts_per_token: int
    num_expert_groups: int
    num_kept_groups: int
    routed_scale: float

    def local_heads(self, world_size: int) -> tuple[int, int]:
        """Numbers of query and KV heads of one rank. Raises: ConfigError."""
        check_heads(self.num_heads, self.num_kv_heads, world_size)
        return max(1, self.num_heads // world_size), max(1, self.num_kv_heads // world_size)

    def local_vocab(self, world_size: int) -> int:
        """Rows of one rank's shard of the LM head."""
        return shard_size(self.vocab_size, world_size)

    def local_width(self, intermediate_size: int, world_size: int) -> int:
        """One rank's shard of a feed-forward width."""
        return shard_size(intermediate_size, world_size, _EXPERT_WIDTH_MULTIPLE)


class Embedding(nn.Module):
    """Token ids and media embeddings → residual stream, positions → rotary cosines and sines.

    The word embedding is replicated on every rank: sharding it would save 1.1 GB of 139 at the released size on 8
    ranks, and cost one more all-reduce (7-14 µs) in every step.
    """

    inv_freq: Tensor
    position_rows: Tensor

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        half = config.rotary_dim // 2
        self.word_embeddings = empty_weight(config.vocab_size, config.hidden_size)
        self.register_buffer("inv_freq", torch.empty(half, dtype=torch.float32))
        self.register_buffer("position_rows", torch.empty(half, dtype=torch.int64))

    def forward(
        self, input_ids: Tensor, embeds: Tensor, embed_kind: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual (T, D), zeros (T, D) to add to it, cosines and sines (T, R) float32."""
        words_TD = F.embedding(input_ids, self.word_embeddings)
        x_TD = torch.where((embed_kind == 0).unsqueeze(1), words_TD, embeds)
        cos, sin = mrope_cos_sin(positions, self.inv_freq, self.position_rows)
        return x_TD, torch.zeros_like(x_TD), cos, sin


class Attention(nn.Module):
    """Causal grouped-query attention with normalized, rotated queries and keys (spec: thinker.md §2.1).

    Scales are None for weights that are not quantized.
    """

    qkv_scale: Tensor | None
    dense_scale: Tensor | None

    def __init__(self, config: DecoderConfig, world_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.local_heads(world_size)
        self.head_dim = config.head_dim
        self.eps = config.norm_eps
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.norm = empty_weight(config.hidden_size)
        self.qkv = empty_weight(rows, config.hidden_size)
        self.register_parameter("qkv_scale", None)
        self.q_norm = empty_weight(self.head_dim)
        self.k_norm = empty_weight(self.head_dim)
        self.dense = empty_weight(config.hidden_size, self.num_heads * self.head_dim)
        self.register_parameter("dense_scale", None)

    def prefill(
        self,
        residual_TD: Tensor,
        delta_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        page_table: Tensor,
        segment: Tensor,
        index: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """New residual and partial sum for one chunk of tokens of some requests, see `paged_prefill_attention`."""
        x_TD = residual_TD + delta_TD
        # Padding rows write zeros, so that the pool stays finite whatever they computed.
        qkv_THd = torch.where((index >= 0)[:, None, None], self._qkv(x_TD), 0)
        rows = chunk_rows(page_table, segment, index, PAGE_SIZE)
        q_THd = norm_rope_write(qkv_THd, self.q_norm, self.k_norm, cos, sin, rows, k_pages, v_pages, self.eps)
        out_THd = paged_prefill_attention(q_THd, k_pages, v_pages, page_table, segment, index, PAGE_SIZE)
        return x_TD, linear(out_THd.flatten(1), self.dense, None, self.dense_scale)

    def decode(
        self,
        residual_TD: Tensor,
        delta_TD: Tensor,
        cos: Tensor,
        sin: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """New residual and partial sum for one token per request, the last of its `lengths` tokens."""
        x_TD, packed = sum_norm_linear(residual_TD, delta_TD, self.norm, self.qkv, self.eps, self.qkv_scale)
        out_THd = decode_attention(
            packed.view(x_TD.shape[0], -1, self.head_dim),
            self.q_norm,
            self.k_norm,
            cos,
            sin,
            k_pages,
            v_pages,
            page_table,
            lengths,
            self.eps,
            PAGE_SIZE,
        )
        return x_TD, gemv(out_THd.flatten(1), self.dense, self.dense_scale)

    def _qkv(self, x_TD: Tensor) -> Tensor:
        packed = linear(rms_norm(x_TD, self.norm, self.eps), self.qkv, None, self.qkv_scale)
        return packed.view(x_TD.shape[0], -1, self.head_dim)


class Head(nn.Module):
    """Residual stream → this rank's shard of the logits; `lm_head_scale` is None if not quantized."""

    lm_head_scale: Tensor | None

    def __init__(self, config: DecoderConfig, world_size: int) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.norm = empty_weight(config.hidden_size)
        self.lm_head = empty_weight(config.local_vocab(world_size), config.hidden_size)
        self.register_parameter("lm_head_scale", None)

    def forward(self, residual_TD: Tensor, delta_TD: Tensor) -> tuple[Tensor]:
        """Logits (T, V) float32."""
        _, logits_TV = sum_norm_linear(
            residual_TD, delta_TD, self.norm, self.lm_head, self.eps, self.lm_head_scale
        )
        return (logits_TV.to(torch.float32),)


class Sampler(nn.Module):
    """Logits of a batch → next tokens. Has no weights."""

    def forward(self, logits_BV: Tensor, sampling: Tensor, seen_BV: Tensor) -> tuple[Tensor]:
        """Tokens (B,) int64; see `mingc.kernels.sample_tokens`."""
        return (sample_tokens(logits_BV, sampling, seen_BV),)


class DecoderLayer(nn.Module):
    """The two halves of a layer, which name its weights."""

    def __init__(self, attention: Attention, feed_forward: DenseFeedForward | MoeFeedForward) -> None:
        super().__init__()
        self.attention = attention
        self.feed_forward = feed_forward


class Decoder(nn.Module):
    """All modules of the thinker, one rank's shard."""

    def __init__(self, config: DecoderConfig, world_size: int) -> None:
        super().__init__()
        self.embed = Embedding(config)
        self.layers = nn.ModuleList(
            DecoderLayer(Attention(config, world_size), _feed_forward(config, index, world_size))
            for index in range(config.num_layers)
        )
        self.head = Head(config, world_size)
        self.sampler = Sampler()


def _feed_forward(config: DecoderConfig, index: int, world_size: int) -> DenseFeedForward | MoeFeedForward:
    if index < config.num_dense_layers:
        width = config.local_width(config.dense_intermediate_size, world_size)
        return DenseFeedForward(config.hidden_size, width, config.norm_eps)
    router = Router(
        config.hidden_size,
        config.num_experts,
        num_groups=config.num_expert_groups,
        num_kept_groups=config.num_kept_groups,
        top_k=config.num_experts_per_token,
        scale=config.routed_scale,
    )
    return MoeFeedForward(
        router,
        config.hidden_size,
        config.num_experts,
        config.local_width(config.expert_intermediate_size, world_size),
        config.local_width(config.shared_intermediate_size, world_size),
        config.norm_eps,
    )
