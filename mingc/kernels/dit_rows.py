"""The DiT and the aggregator at batch 1: kernels of their own for few rows, and for what is between sampler steps.

At 74 rows the vendor's products take longer to begin and to end than to multiply. These begin early (their weights
come while the kernel before them ends), split the depth over a cluster of thread blocks, and take norm, activation
and residual sum with them. Only on CUDA of Hopper's architecture and for the released geometry; the reference is
what `LatentTransformer` and `Cfm` do elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from mingc.kernels.dispatch import use_clusters

WIDTH, INNER, HEAD_SIZE = 1024, 4096, 64
MAX_ROWS = 80  # what one matrix instruction takes
PATCH, CHANNELS = 4, 64  # latents of a patch and their channels


class BlockWeights(NamedTuple):
    """One block: norms (D,), products (out, in) with biases."""

    attention_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor
    out: Tensor
    out_bias: Tensor
    mlp_norm: Tensor
    up: Tensor
    up_bias: Tensor
    down: Tensor
    down_bias: Tensor


class TransformerWeights(NamedTuple):
    """Blocks, the norm (D,) after them, rope tables (T, d/2) float32."""

    blocks: Sequence[BlockWeights]
    norm: Tensor
    cos: Tensor
    sin: Tensor


class SamplerWeights(NamedTuple):
    """The transformer between its embedding (D, C) and its projection (C, D)."""

    transformer: TransformerWeights
    embed: Tensor
    embed_bias: Tensor
    project: Tensor
    project_bias: Tensor


def takes_transformer(sequences: int, weights: TransformerWeights) -> bool:
    """Whether `transform` is there for this many sequences of all the tokens of the rope tables."""
    # In this order: the batch of a dynamic graph must not be asked for its size.
    return _takes(weights) and sequences == 1


def takes_sampler(state: Tensor, weights: SamplerWeights) -> bool:
    """Whether `sample` is there for ODE states of this shape."""
    return _takes(weights.transformer) and state.shape == (1, PATCH, CHANNELS)


def _takes(weights: TransformerWeights) -> bool:
    first = weights.blocks[0]
    return (
        use_clusters(first.qkv)
        and 2 * weights.cos.shape[0] <= MAX_ROWS
        and first.qkv.shape == (3 * WIDTH, WIDTH)
        and first.up.shape == (INNER, WIDTH)
        and weights.cos.shape[1] == HEAD_SIZE // 2
    )


def transform(x: Tensor, weights: TransformerWeights) -> Tensor:
    """Tokens (N, T, D) → the stream (N, T, D) after the blocks and the norm."""
    from mingc.kernels.gpu import dit_rows as gpu

    return gpu.transform(x, weights)


def sample(
    first: Tensor,
    history: Tensor,
    noise: Tensor,
    kicks: Tensor,
    step_sizes: Tensor,
    guidance: Tensor,
    weights: SamplerWeights,
) -> Tensor:
    """The ODE state (1, P, C) float32 after all steps.

    Args:
        first: (2, steps, D), the token before all others at every step: conditioned, then free.
        history: (2, H, D), the tokens after it.
        noise: (1, P, C) float32, the state before the first step.
        kicks: (1, steps, P, C) float32, what each step adds besides.
        step_sizes: (steps,) float32.
        guidance: (1,) float32.
    """
    from mingc.kernels.gpu import dit_rows as gpu

    return gpu.sample(first, history, noise, kicks, step_sizes, guidance, weights)
