"""Quantization error of the thinker, per layer and at the logits."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.nn import functional as F

from mingc.artifacts.manifest import QuantizationError
from mingc.export.checks.eager_decoder import PromptStream, logits_of
from mingc.export.layers.decoder import DecoderConfig
from mingc.export.stage import Load, LoadRanks

_NUM_TOKENS = 64


def decoder_quantization_error(config: DecoderConfig, exact: Load, stored: LoadRanks) -> QuantizationError:
    """Compare one prompt of random text tokens under the checkpoint's weights and under the stored ones.

    One half of a layer at a time is in memory, in both formats.
    """
    with torch.no_grad():
        ids = torch.randint(config.vocab_size, (_NUM_TOKENS,), generator=torch.Generator().manual_seed(11))
        text = torch.zeros(_NUM_TOKENS, dtype=torch.int64)
        no_media = torch.zeros(_NUM_TOKENS, config.hidden_size)
        positions = torch.arange(_NUM_TOKENS).expand(3, -1)
        reference = PromptStream.embed(exact("embed"), ids, no_media, text, positions)
        quantized = replace(reference)
        cosines, scales = [], []
        for layer in range(config.num_layers):
            before, layer_only = reference.residual, replace(reference)
            for half in ("attention", "feed_forward"):
                path = f"layers.{layer}.{half}"
                module, ranks = [exact(path)], stored(path)
                reference.add(module)
                quantized.add(ranks)
                layer_only.add(ranks)
            # From the same residual stream: errors of earlier layers do not count.
            expected, update = reference.residual - before, layer_only.residual - before
            cosines.append(float(F.cosine_similarity(expected, update, dim=-1).mean()))
            scales.append(float(((update * expected).sum(-1) / expected.square().sum(-1)).median()))
        logits = logits_of([exact("head")], reference.residual, config.vocab_size).log_softmax(-1)
        quantized_logits = logits_of(stored("head"), quantized.residual, config.vocab_size).log_softmax(-1)
    return QuantizationError(
        tokens=_NUM_TOKENS,
        layer_cosine=tuple(round(value, 6) for value in cosines),
        layer_scale=tuple(round(value, 6) for value in scales),
        logit_kl=float(F.kl_div(quantized_logits, logits, log_target=True, reduction="batchmean")),
        same_argmax=float((logits.argmax(-1) == quantized_logits.argmax(-1)).double().mean()),
    )
