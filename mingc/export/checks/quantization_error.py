"""Quantization error of the thinker, per layer and at the logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mingc.artifacts.manifest import QuantizationError
from mingc.export.layers.decoder import PAGE_SIZE, Attention, DecoderConfig
from mingc.export.layers.moe import MoeFeedForward
from mingc.export.stage import Load, LoadRanks

_NUM_TOKENS = 64


def decoder_quantization_error(config: DecoderConfig, exact: Load, stored: LoadRanks) -> QuantizationError:
    """Compare one prompt of random text tokens under the checkpoint's weights and under the stored ones.

    One half of a layer at a time is in memory, in both formats.
    """
    prompt = _Prompt(config)
    with torch.no_grad():
        reference = quantized = prompt.embed(exact("embed"))
        cosines, scales = [], []
        for layer in range(config.num_layers):
            before = layer_only = reference
            for half in ("attention", "feed_forward"):
                path = f"layers.{layer}.{half}"
                module, ranks = [exact(path)], stored(path)
                reference, quantized = prompt.add(module, reference), prompt.add(ranks, quantized)
                layer_only = prompt.add(ranks, layer_only)
            # From the same residual stream: errors of earlier layers do not count.
            expected, update = reference - before, layer_only - before
            cosines.append(float(F.cosine_similarity(expected, update, dim=-1).mean()))
            scales.append(float(((update * expected).sum(-1) / expected.square().sum(-1)).median()))
        logits = prompt.logits([exact("head")], reference)
        quantized_logits = prompt.logits(stored("head"), quantized)
    return QuantizationError(
        tokens=_NUM_TOKENS,
        layer_cosine=tuple(round(value, 6) for value in cosines),
        layer_scale=tuple(round(value, 6) for value in scales),
        logit_kl=float(F.kl_div(quantized_logits, logits, log_target=True, reduction="batchmean")),
        same_argmax=float((logits.argmax(-1) == quantized_logits.argmax(-1)).double().mean()),
    )


class _Prompt:
    """Runs modules of the decoder on one prompt; several modules are the ranks of a sharded one."""

    def __init__(self, config: DecoderConfig) -> None:
        self._config = config
        self._text = torch.zeros(_NUM_TOKENS, dtype=torch.int64)

    def embed(self, module: nn.Module) -> Tensor:
        """The residual stream (T, D) before the first layer."""
        config = self._config
        ids = torch.randint(config.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(11))
        positions = torch.arange(_NUM_TOKENS).expand(3, -1)
        no_media = torch.zeros(_NUM_TOKENS, config.hidden_size)
        stream: Tensor
        stream, _, self._cos, self._sin = module(ids, no_media, self._text, positions)
        return stream

    def add(self, ranks: Sequence[nn.Module], stream: Tensor) -> Tensor:
        """The residual stream (T, D) after half a layer."""
        return stream + torch.stack([self._partial(module, stream) for module in ranks]).sum(0)

    def logits(self, ranks: Sequence[nn.Module], stream: Tensor) -> Tensor:
        """Log-probabilities of the next token (T, vocabulary)."""
        shards = [module(stream, torch.zeros_like(stream))[0] for module in ranks]
        return torch.cat(shards, dim=-1)[:, : self._config.vocab_size].log_softmax(-1)

    def _partial(self, module: Any, stream: Tensor) -> Tensor:
        none = torch.zeros_like(stream)
        partial: Tensor
        if isinstance(module, Attention):
            num_pages = -(-_NUM_TOKENS // PAGE_SIZE)
            shape = ((1 + num_pages) * PAGE_SIZE, module.num_kv_heads, module.head_dim)
            table = torch.arange(1, 1 + num_pages, dtype=torch.int32)[None]
            segment, index = torch.zeros_like(self._text), torch.arange(_NUM_TOKENS)
            pages = [torch.zeros(shape) for _ in range(2)]
            _, partial = module.prefill(stream, none, self._cos, self._sin, table, segment, index, *pages)
        elif isinstance(module, MoeFeedForward):
            _, partial = module.prefill(stream, none, self._text)
        else:
            _, partial = module(stream, none)
        return partial
