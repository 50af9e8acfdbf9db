"""The thinker's decoder: embeddings, grouped-query attention over paged keys and values, feed-forward, logits.

Shape suffixes: T tokens, D hidden, H this rank's heads, d head width. Shapes at the graphs' borders: see
`mingc.export.stages.thinker`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.export.layers.moe import MoeFeedForward, Router, Routes, SwiGlu
from mingc.export.layers.tensor_shard import check_heads, share_size
from mingc.kernels.all_reduce import all_gather_last, all_reduce
from mingc.kernels.mrope import mrope_cos_sin
from mingc.kernels.norm_rope_write import norm_rope_write
from mingc.kernels.paged_attention import paged_decode_attention, paged_prefill_attention, token_rows
from mingc.kernels.rms_norm import rms_norm

PAGE_SIZE = 16
# Expert widths are filled up to this many values: grouped products want rows that are multiples of 16 bytes.
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
        """Query and KV heads of one rank. Raises: ConfigError."""
        check_heads(self.num_heads, self.num_kv_heads, world_size)
        return max(1, self.num_heads // world_size), max(1, self.num_kv_heads // world_size)

    def local_vocab(self, world_size: int) -> int:
        """Rows of the logits matrix of one rank."""
        return share_size(self.vocab_size, world_size)

    def local_width(self, intermediate_size: int, world_size: int) -> int:
        """One rank's share of a feed-forward width."""
        return share_size(intermediate_size, world_size, _EXPERT_WIDTH_MULTIPLE)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionContext:
    """What attention of every layer needs of the batch.

    With `start` and `last` the tokens are one request's chunk, otherwise each token is a request of its own and
    `lengths` says how far it sees.
    """

    cos: Tensor  # (T, rotary_dim / 2) float32
    sin: Tensor
    rows: Tensor  # (T,) int64, pool rows that the tokens are written to
    page_table: Tensor  # (P,) or (T, P) int32
    start: Tensor | None = None  # (1,) int64
    last: Tensor | None = None  # (1,) int64, the last token that is not padding
    lengths: Tensor | None = None  # (T,) int64


class Attention(nn.Module):
    """Causal grouped-query attention with normed, rotated queries and keys (spec: thinker.md §2.1)."""

    def __init__(self, config: DecoderConfig, world_size: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.local_heads(world_size)
        self.head_dim = config.head_dim
        self.eps = config.norm_eps
        self.world_size = world_size
        rows = (self.num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = nn.Parameter(torch.empty(rows, config.hidden_size), requires_grad=False)
        self.q_norm = nn.Parameter(torch.empty(self.head_dim), requires_grad=False)
        self.k_norm = nn.Parameter(torch.empty(self.head_dim), requires_grad=False)
        self.dense = nn.Parameter(
            torch.empty(config.hidden_size, self.num_heads * self.head_dim), requires_grad=False
        )

    def forward(self, x_TD: Tensor, context: AttentionContext, k_pages: Tensor, v_pages: Tensor) -> Tensor:
        """(T, D) → (T, D), summed over ranks; writes the tokens' keys and values into the pools."""
        qkv_THd = F.linear(x_TD, self.qkv).view(x_TD.shape[0], -1, self.head_dim)
        if context.last is not None:
            # Padding writes zeros, whatever it has computed: what lies in the pool stays finite.
            is_token_T = torch.arange(x_TD.shape[0], device=x_TD.device) <= context.last
            qkv_THd = torch.where(is_token_T[:, None, None], qkv_THd, 0)
        q_THd = norm_rope_write(
            qkv_THd,
            self.q_norm,
            self.k_norm,
            context.cos,
            context.sin,
            context.rows,
            k_pages,
            v_pages,
            self.eps,
        )
        if context.start is not None:
            out_THd = paged_prefill_attention(
                q_THd, k_pages, v_pages, context.page_table, context.start, PAGE_SIZE
            )
        else:
            assert context.lengths is not None, "a batch is either one chunk or one token a request"
            out_THd = paged_decode_attention(
                q_THd, k_pages, v_pages, context.page_table, context.lengths, PAGE_SIZE
            )
        return all_reduce(F.linear(out_THd.flatten(1), self.dense), self.world_size)


class DecoderLayer(nn.Module):
    """Pre-norm attention and feed-forward with two residual additions."""

    def __init__(self, config: DecoderConfig, feed_forward: nn.Module, world_size: int) -> None:
        super().__init__()
        self.input_norm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.attention = Attention(config, world_size)
        self.post_attention_norm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.feed_forward = feed_forward
        self.eps = config.norm_eps
        self.world_size = world_size

    def forward(
        self,
        x_TD: Tensor,
        context: AttentionContext,
        gate_index_T: Tensor | None,
        k_pages: Tensor,
        v_pages: Tensor,
        routes: Routes | None,
    ) -> Tensor:
        """(T, D) → (T, D)."""
        x_TD = x_TD + self.attention(rms_norm(x_TD, self.input_norm, self.eps), context, k_pages, v_pages)
        partial_TD = self.feed_forward(
            rms_norm(x_TD, self.post_attention_norm, self.eps), gate_index_T, routes
        )
        return x_TD + all_reduce(partial_TD, self.world_size)


class Decoder(nn.Module):
    """The whole thinker, one rank's share. `prefill` and `decode` are the graphs.

    The word embedding is whole on every rank: splitting it would save 1.1 GB of 139 at the released size on 8
    ranks, and cost one more all-reduce (7-14 µs) in every step.
    """

    inv_freq: Tensor
    position_rows: Tensor

    def __init__(self, config: DecoderConfig, world_size: int) -> None:
        super().__init__()
        self.config = config
        self.world_size = world_size
        half = config.rotary_dim // 2
        self.word_embeddings = nn.Parameter(
            torch.empty(config.vocab_size, config.hidden_size), requires_grad=False
        )
        self.register_buffer("inv_freq", torch.empty(half, dtype=torch.float32))
        self.register_buffer("position_rows", torch.empty(half, dtype=torch.int64))
        self.layers = nn.ModuleList(
            DecoderLayer(config, _feed_forward(config, index, world_size), world_size)
            for index in range(config.num_layers)
        )
        self.norm = nn.Parameter(torch.empty(config.hidden_size), requires_grad=False)
        self.lm_head = nn.Parameter(
            torch.empty(config.local_vocab(world_size), config.hidden_size), requires_grad=False
        )

    def prefill(self, *tensors: Tensor) -> tuple[Tensor]:
        """One chunk of one request, inputs and state as in the graph's spec. Returns (logits,)."""
        return (self._prefill(None, *tensors),)

    def prefill_routed(self, *tensors: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`prefill` that also tells which experts were used.

        Returns (logits, expert ids (M, T, K) int32, expert weights (M, T, K) float32) for M expert layers.
        """
        routes: Routes = []
        logits = self._prefill(routes, *tensors)
        ids = torch.stack([ids_TK for ids_TK, _ in routes]).to(torch.int32)
        return logits, ids, torch.stack([weights_TK for _, weights_TK in routes])

    def _prefill(
        self,
        routes: Routes | None,
        input_ids: Tensor,
        embeds: Tensor,
        embed_kind: Tensor,
        positions: Tensor,
        page_table: Tensor,
        start: Tensor,
        last: Tensor,
        *pages: Tensor,
    ) -> Tensor:
        """Logits; `pages` are k, v of layer 0, then of layer 1, ..."""
        words_TD = F.embedding(input_ids, self.word_embeddings)
        x_TD = torch.where((embed_kind == 0).unsqueeze(1), words_TD, embeds)
        cos, sin = mrope_cos_sin(positions, self.inv_freq, self.position_rows)
        context = AttentionContext(
            cos=cos,
            sin=sin,
            rows=_chunk_rows(page_table, start, input_ids.shape[0]),
            page_table=page_table,
            start=start,
            last=last,
        )
        x_TD = self._run_layers(x_TD, context, embed_kind, pages, routes)
        return self._logits(x_TD.index_select(0, last))

    def decode(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: Tensor,
        page_table: Tensor,
        *pages: Tensor,
    ) -> tuple[Tensor]:
        """One token of every request; all take the text gate (spec: thinker.md §2.3). Returns (logits,)."""
        x_TD = F.embedding(input_ids, self.word_embeddings)
        cos, sin = mrope_cos_sin(positions.expand(3, -1), self.inv_freq, self.position_rows)
        rows = token_rows(page_table, (lengths - 1).clamp_min(0), PAGE_SIZE)
        context = AttentionContext(cos=cos, sin=sin, rows=rows, page_table=page_table, lengths=lengths)
        return (self._logits(self._run_layers(x_TD, context, None, pages, None)),)

    def _run_layers(
        self,
        x_TD: Tensor,
        context: AttentionContext,
        gate_index_T: Tensor | None,
        pages: Sequence[Tensor],
        routes: Routes | None,
    ) -> Tensor:
        for index, layer in enumerate(self.layers):
            x_TD = layer(x_TD, context, gate_index_T, pages[2 * index], pages[2 * index + 1], routes)
        return x_TD

    def _logits(self, x_TD: Tensor) -> Tensor:
        normed_TD = rms_norm(x_TD, self.norm, self.config.norm_eps)
        gathered = all_gather_last(F.linear(normed_TD, self.lm_head), self.world_size)
        return gathered[:, : self.config.vocab_size].to(torch.float32)


def _chunk_rows(page_table: Tensor, start: Tensor, num_tokens: int) -> Tensor:
    """Pool rows (num_tokens,) int64 of a chunk; tokens beyond the table are padding and go to page 0."""
    index = start + torch.arange(num_tokens, device=start.device)
    end = page_table.shape[0] * PAGE_SIZE
    rows = token_rows(page_table, index.clamp_max(end - 1), PAGE_SIZE)
    return torch.where(index < end, rows, index % PAGE_SIZE)


def _feed_forward(config: DecoderConfig, index: int, world_size: int) -> nn.Module:
    if index < config.num_dense_layers:
        return SwiGlu(config.hidden_size, config.local_width(config.dense_intermediate_size, world_size))
    router = Router(
        config.hidden_size,
        config.num_experts,
        num_groups=config.num_expert_groups,
        num_kept_groups=config.num_kept_groups,
        num_chosen=config.num_experts_per_token,
        scale=config.routed_scale,
    )
    return MoeFeedForward(
        router,
        config.hidden_size,
        config.num_experts,
        config.local_width(config.expert_intermediate_size, world_size),
        config.local_width(config.shared_intermediate_size, world_size),
    )
