"""Forward pass of the thinker's eager modules over whole prompts: no KV cache, no chunks, no batches.

Modules of several ranks are given together; their partial sums are added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mingc.export.layers.decoder import PAGE_SIZE, Attention
from mingc.export.layers.moe import MoeFeedForward


@dataclass(slots=True, eq=False)
class PromptStream:
    """One prompt between two halves of a layer.

    Attributes:
        embed_kind: (T,) int64.
        residual: (T, D) float32.
        cos, sin: (T, R) float32.
    """

    embed_kind: Tensor
    residual: Tensor
    cos: Tensor
    sin: Tensor

    @classmethod
    def embed(
        cls, module: nn.Module, input_ids: Tensor, embeds: Tensor, embed_kind: Tensor, positions: Tensor
    ) -> PromptStream:
        """The stream before the first layer. `embeds` (T, D) replaces the words where `embed_kind` is not 0."""
        residual, _, cos, sin = module(input_ids, embeds, embed_kind, positions)
        return cls(embed_kind, residual, cos, sin)

    def add(self, ranks: Sequence[nn.Module]) -> None:
        """Run half a layer, given as one module per rank."""
        self.residual = self.residual + torch.stack([self.partial(each) for each in ranks]).sum(0)

    def partial(self, module: Any) -> Tensor:
        """One rank's partial sum (T, D) of half a layer."""
        none, num_tokens = torch.zeros_like(self.residual), len(self.residual)
        partial: Tensor
        if isinstance(module, Attention):
            num_pages = -(-num_tokens // PAGE_SIZE)
            shape = ((1 + num_pages) * PAGE_SIZE, module.num_kv_heads, module.head_dim)
            table = torch.arange(1, 1 + num_pages, dtype=torch.int32)[None]
            segment, index = torch.zeros(num_tokens, dtype=torch.int64), torch.arange(num_tokens)
            pages = [torch.zeros(shape) for _ in range(2)]
            _, partial = module.prefill(
                self.residual, none, self.cos, self.sin, table, segment, index, *pages
            )
        elif isinstance(module, MoeFeedForward):
            _, partial = module.prefill(self.residual, none, self.embed_kind)
        else:
            _, partial = module(self.residual, none)
        return partial


def logits_of(ranks: Sequence[nn.Module], residual: Tensor, vocab_size: int) -> Tensor:
    """Logits (T, V) of the residual stream (T, D) after the last layer."""
    shards = [module(residual, torch.zeros_like(residual))[0] for module in ranks]
    return torch.cat(shards, dim=-1)[:, :vocab_size]
